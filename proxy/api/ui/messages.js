// The messages of a call: its request and its response.
//
// Requests and responses are untrusted and may have any shape. All of it is shown as text; long texts are folded.

import { el, line, visible } from "./dom.js";

const MAX_FOLDED = 4000; // characters of a text that are shown before its button is pressed
const MAX_UNSCROLLED = 1000; // characters that fit on every screen
const MAX_MESSAGES = 40; // messages that are shown before the button for earlier ones is pressed

/** Show the request and the response of a step. */
export function conversation(step) {
  const sent = requestMessages(step);
  const hidden = Math.max(0, sent.length - MAX_MESSAGES);
  const list = el("div", { class: "messages" });
  if (hidden) {
    const show = el(
      "button",
      { type: "button", onclick: () => show.replaceWith(...sent.slice(0, hidden).map(message)) },
      `Show ${hidden} earlier messages`,
    );
    list.append(show);
  }
  list.append(...sent.slice(hidden).map(message), ...responseMessages(step).map(message));
  const { tools } = sentBody(step);
  return el(
    "section",
    { class: "conversation" },
    Array.isArray(tools) && tools.length ? fold(`${tools.length} tools`, JSON.stringify(tools, null, 2)) : null,
    list,
  );
}

/** Return the body as it was sent to the engine; the client's own has another shape in translated dialects. */
function sentBody({ request, sent }) {
  const body = { ...request, ...sent?.set };
  for (const field of sent?.unset ?? []) delete body[field];
  return body;
}

function requestMessages(step) {
  const { messages, prompt, token_ids: ids } = sentBody(step);
  if (Array.isArray(messages)) return messages.map((sent) => ({ ...(sent ?? {}), role: String(sent?.role ?? "?") }));
  if (typeof prompt === "string") return [{ role: "prompt", content: prompt }];
  if (Array.isArray(prompt))
    return prompt.map((text) => ({ role: "prompt", content: Array.isArray(text) ? `${text.length} token ids` : text }));
  if (Array.isArray(ids)) return [{ role: "prompt", content: `${ids.length} token ids` }];
  return [];
}

function responseMessages(step) {
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
    const reply = choice?.message ?? { content: choice?.text };
    const index = response.choices.length > 1 ? choice?.index : null;
    return { ...reply, role: String(reply?.role ?? "completion"), answer: true, finish: choice?.finish_reason, index };
  });
}

function message(sent) {
  const texts = contents(sent.content);
  const thoughts = sent.reasoning_content ?? sent.reasoning;
  return el(
    "article",
    { class: `message${sent.answer ? " answer" : ""}`, "data-role": line(sent.role, 20) },
    el(
      "header",
      {},
      el("b", {}, line(sent.role, 40)),
      sent.name ? ` ${line(String(sent.name), 80)}` : null,
      sent.tool_call_id ? el("span", { class: "dim" }, ` of ${line(String(sent.tool_call_id), 80)}`) : null,
      typeof sent.index === "number" ? el("span", { class: "dim" }, ` choice ${sent.index}`) : null,
      sent.finish ? el("span", { class: "dim" }, ` finished: ${line(String(sent.finish), 40)}`) : null,
    ),
    typeof thoughts === "string" && thoughts ? fold("reasoning", thoughts) : null,
    texts.map(body),
    calls(sent).map(([name, args]) =>
      el("div", { class: "toolcall" }, el("b", {}, `calls ${line(name, 120)}`), body(args)),
    ),
  );
}

/** Return the texts of a content: a string, a list of parts, or any other JSON value. */
function contents(content) {
  if (content === null || content === undefined) return [];
  if (typeof content === "string") return [content];
  if (!Array.isArray(content)) return [JSON.stringify(content)];
  return content.map((part) => (typeof part?.text === "string" ? part.text : (JSON.stringify(part) ?? "")));
}

function calls(sent) {
  if (!Array.isArray(sent.tool_calls)) return [];
  return sent.tool_calls.map((call) => {
    const { name, arguments: args } = call?.function ?? {};
    return [String(name ?? "?"), typeof args === "string" ? args : (JSON.stringify(args ?? call) ?? "")];
  });
}

/** Show a text; a long one gets a button that shows the rest. */
export function body(text) {
  const isLong = text.length > MAX_UNSCROLLED; // a scrollable text must be reachable by keyboard
  const shown = el(
    "div",
    { class: "text", dir: "auto", tabindex: isLong ? "0" : null },
    visible(text.slice(0, MAX_FOLDED)),
  );
  if (text.length <= MAX_FOLDED) return shown;
  const rest = el(
    "button",
    {
      type: "button",
      onclick: () => {
        shown.textContent = visible(text);
        rest.remove();
      },
    },
    `Show all ${text.length.toLocaleString("en")} characters`,
  );
  return el("div", {}, shown, rest);
}

function fold(title, text) {
  return el("details", { class: "fold" }, el("summary", {}, title), body(text));
}
