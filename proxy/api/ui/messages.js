// The messages of a call: what was asked, and what was answered.
//
// Holds the reading of requests and answers of every dialect, which are other people's and may have any shape. All of it is
// shown as text; what is long is folded.

import { el, line, visible } from "./dom.js";

const FOLDED = 4000; // characters shown of one text until somebody asks for the rest
const SEEN = 1000; // characters that no screen is too low for
const FEW = 40; // messages shown until somebody asks for the earlier ones

/** The request and the answer of a step. */
export function conversation(step) {
  const asked = requestMessages(step);
  const told = answers(step);
  const hidden = Math.max(0, asked.length - FEW);
  const list = el("div", { class: "messages" });
  if (hidden) {
    const show = el(
      "button",
      { type: "button", onclick: () => show.replaceWith(...asked.slice(0, hidden).map(message)) },
      `Show ${hidden} earlier messages`,
    );
    list.append(show);
  }
  list.append(...asked.slice(hidden).map(message), ...told.map(message));
  const { tools } = sentBody(step);
  return el(
    "section",
    { class: "conversation" },
    Array.isArray(tools) && tools.length ? fold(`${tools.length} tools`, JSON.stringify(tools, null, 2)) : null,
    list,
  );
}

/** The body as it was sent: a client's own may be of another shape, as in dialects that are asked for by way of chat. */
function sentBody({ request, sent }) {
  const body = { ...request, ...sent?.set };
  for (const field of sent?.unset ?? []) delete body[field];
  return body;
}

function requestMessages(step) {
  const { messages, prompt, token_ids: ids } = sentBody(step);
  if (Array.isArray(messages)) return messages.map((one) => ({ ...(one ?? {}), role: String(one?.role ?? "?") }));
  if (typeof prompt === "string") return [{ role: "prompt", content: prompt }];
  if (Array.isArray(prompt))
    return prompt.map((one) => ({ role: "prompt", content: Array.isArray(one) ? `${one.length} token ids` : one }));
  if (Array.isArray(ids)) return [{ role: "prompt", content: `${ids.length} token ids` }];
  return [];
}

function answers(step) {
  const response = step.response;
  if (response === null || response === undefined) return [];
  if (step.status === "error")
    return [
      {
        role: "error",
        content: `${response.status ?? ""} ${typeof response.body === "string" ? response.body : JSON.stringify(response)}`,
        answer: true,
      },
    ];
  if (!Array.isArray(response.choices)) return [{ role: "answer", content: JSON.stringify(response), answer: true }];
  return response.choices.map((choice) => {
    const said = choice?.message ?? { content: choice?.text };
    const index = response.choices.length > 1 ? choice?.index : null;
    return { ...said, role: String(said?.role ?? "completion"), answer: true, finish: choice?.finish_reason, index };
  });
}

function message(one) {
  const texts = contents(one.content);
  const thoughts = one.reasoning_content ?? one.reasoning;
  return el(
    "article",
    { class: `message${one.answer ? " answer" : ""}`, "data-role": line(one.role, 20) },
    el(
      "header",
      {},
      el("b", {}, line(one.role, 40)),
      one.name ? ` ${line(String(one.name), 80)}` : null,
      one.tool_call_id ? el("span", { class: "dim" }, ` of ${line(String(one.tool_call_id), 80)}`) : null,
      typeof one.index === "number" ? el("span", { class: "dim" }, ` choice ${one.index}`) : null,
      one.finish ? el("span", { class: "dim" }, ` finished: ${line(String(one.finish), 40)}`) : null,
    ),
    typeof thoughts === "string" && thoughts ? fold("reasoning", thoughts) : null,
    texts.map(body),
    calls(one).map(([name, spelt]) =>
      el("div", { class: "toolcall" }, el("b", {}, `calls ${line(name, 120)}`), body(spelt)),
    ),
  );
}

/** The texts of a content: a string, a list of parts, or whatever else it is. */
function contents(content) {
  if (content === null || content === undefined) return [];
  if (typeof content === "string") return [content];
  if (!Array.isArray(content)) return [JSON.stringify(content)];
  return content.map((part) => (typeof part?.text === "string" ? part.text : (JSON.stringify(part) ?? "")));
}

function calls(one) {
  if (!Array.isArray(one.tool_calls)) return [];
  return one.tool_calls.map((call) => {
    const { name, arguments: given } = call?.function ?? {};
    return [String(name ?? "?"), typeof given === "string" ? given : (JSON.stringify(given ?? call) ?? "")];
  });
}

/** A text as it is, with a button for the rest of a long one. */
export function body(text) {
  const isLong = text.length > SEEN; // it scrolls within itself: keys must get there
  const spelt = el(
    "div",
    { class: "text", dir: "auto", tabindex: isLong ? "0" : null },
    visible(text.slice(0, FOLDED)),
  );
  if (text.length <= FOLDED) return spelt;
  const rest = el(
    "button",
    {
      type: "button",
      onclick: () => {
        spelt.textContent = visible(text);
        rest.remove();
      },
    },
    `Show all ${text.length.toLocaleString("en")} characters`,
  );
  return el("div", {}, spelt, rest);
}

function fold(title, text) {
  return el("details", { class: "fold" }, el("summary", {}, title), body(text));
}
