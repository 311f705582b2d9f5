// The official SDK: its tool runner for chat, its streaming helper in a loop written by hand for responses.
import OpenAI from "openai";
import { DIALECT, MODEL, SCHEMA, STREAMED, SYSTEM, TASK, report, weather } from "./weather.mjs";

const client = new OpenAI();

async function byChat() {
  const runner = client.chat.completions.runTools({
    model: MODEL,
    stream: STREAMED,
    messages: [{ role: "system", content: SYSTEM }, { role: "user", content: TASK }],
    tools: [{ type: "function", function: { name: "weather", parameters: SCHEMA, parse: JSON.parse, function: weather } }],
  });
  return runner.finalContent();
}

async function byResponses() {
  const input = [{ role: "user", content: TASK }];
  for (;;) {
    const tools = [{ type: "function", name: "weather", parameters: SCHEMA, strict: true }];
    const request = { model: MODEL, input, instructions: SYSTEM, tools, store: false };
    const response = STREAMED ? await client.responses.stream(request).finalResponse() : await client.responses.create(request);
    const calls = response.output.filter((item) => item.type === "function_call");
    if (calls.length === 0) return response.output_text;
    input.push(...response.output);
    for (const call of calls) {
      const output = weather(JSON.parse(call.arguments));
      input.push({ type: "function_call_output", call_id: call.call_id, output });
    }
  }
}

report(await (DIALECT === "chat" ? byChat() : byResponses()));
