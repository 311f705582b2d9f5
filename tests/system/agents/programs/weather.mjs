// The arguments, the tool and the output format of every program here, as in weather.py.
export const [TASK, DIALECT] = process.argv.slice(2);
export const STREAMED = process.argv[4] === "streamed";
export const SYSTEM = "Use the tools.";
export const MODEL = "policy";
export const SCHEMA = {
  type: "object",
  properties: { city: { type: "string" }, days: { type: "number" } },
  required: ["city", "days"],
  additionalProperties: false,
};

const calls = [];

export function weather({ city, days }) {
  calls.push([city, days]);
  return `${city}: dry for ${days} days.`;
}

export function report(answer) {
  console.log(JSON.stringify({ answer, calls: calls.sort() }));
}
