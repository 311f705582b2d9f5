// The official SDK: messages.stream with its accumulated message, or messages.create.
import Anthropic from "@anthropic-ai/sdk";
import { MODEL, SCHEMA, STREAMED, SYSTEM, TASK, report, weather } from "./weather.mjs";

const client = new Anthropic();
const messages = [{ role: "user", content: TASK }];
for (;;) {
  const tools = [{ name: "weather", input_schema: SCHEMA }];
  const request = { model: MODEL, max_tokens: 1000, system: SYSTEM, messages, tools };
  const message = STREAMED ? await client.messages.stream(request).finalMessage() : await client.messages.create(request);
  const calls = message.content.filter((block) => block.type === "tool_use");
  if (calls.length === 0) {
    report(message.content.map((block) => block.text ?? "").join(""));
    break;
  }
  messages.push({ role: "assistant", content: message.content });
  const results = calls.map((call) => ({ type: "tool_result", tool_use_id: call.id, content: weather(call.input) }));
  messages.push({ role: "user", content: results });
}
