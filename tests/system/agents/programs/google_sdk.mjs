// The official SDK with automatic function calling; streamed, a loop in a chat written by hand, since it calls no functions there.
import { GoogleGenAI } from "@google/genai";
import { MODEL, SCHEMA, STREAMED, SYSTEM, TASK, report, weather } from "./weather.mjs";

const client = new GoogleGenAI({ httpOptions: { retryOptions: { attempts: 3, initialDelay: 0.1, maxDelay: 0.1 } } });
const declaration = { name: "weather", parametersJsonSchema: SCHEMA };

async function whole() {
  const tool = {
    tool: async () => ({ functionDeclarations: [declaration] }),
    callTool: async (calls) =>
      calls.map(({ id, name, args }) => ({ functionResponse: { id, name, response: { output: weather(args) } } })),
  };
  const config = { systemInstruction: SYSTEM, tools: [tool] };
  const response = await client.models.generateContent({ model: MODEL, contents: TASK, config });
  return response.text;
}

async function streamed() {
  const config = { systemInstruction: SYSTEM, tools: [{ functionDeclarations: [declaration] }] };
  const chat = client.chats.create({ model: MODEL, config });
  for (let message = TASK; ; ) {
    let text = "";
    const calls = [];
    for await (const chunk of await chat.sendMessageStream({ message })) {
      text += (chunk.candidates[0].content.parts ?? []).filter((part) => !part.thought).map((part) => part.text ?? "").join("");
      calls.push(...(chunk.functionCalls ?? []));
    }
    if (calls.length === 0) return text;
    message = calls.map(({ id, name, args }) => ({ functionResponse: { id, name, response: { output: weather(args) } } }));
  }
}

report(await (STREAMED ? streamed() : whole()));
