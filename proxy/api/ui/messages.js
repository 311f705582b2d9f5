// The messages of a call: its request and its response.
//
// Requests and responses are untrusted and may have any shape. All of it is shown as text; long texts are folded.

import { get, path } from "./api.js";
import { line, visible } from "./format.js";
import { html, useEffect, useRef, useState } from "./html.js";

const MAX_FOLDED = 4000; // characters of a text that are shown before its button is pressed
const MAX_UNSCROLLED = 1000; // characters that fit on every screen
const STORED = /^[0-9a-f]{32}$/; // names an image in a request; an image that the engine fetched has its URL as its name
const MAX_MESSAGES = 40; // messages that are shown before the button for earlier ones is pressed

/** Show the request and the response of a step. */
export function Conversation({ step }) {
  const [isWhole, setWhole] = useState(false);
  const sent = withPictures(requestMessages(step), step);
  const hidden = isWhole ? 0 : Math.max(0, sent.length - MAX_MESSAGES);
  const { tools } = sentBody(step);
  return html`
    <section class="conversation">
      ${Array.isArray(tools) && tools.length > 0 && html`
        <${Fold} title=${`${tools.length} tools`} text=${JSON.stringify(tools, null, 2)} />`}
      <div class="messages">
        ${hidden > 0 && html`<button type="button" onclick=${() => setWhole(true)}>Show ${hidden} earlier messages</button>`}
        ${sent.slice(hidden).map((each, at) => html`<${Message} key=${hidden + at} sent=${each} />`)}
        ${responseMessages(step).map((each, at) => html`<${Message} key=${`answer-${at}`} sent=${each} />`)}
      </div>
    </section>`;
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

/** An image in place of a part; recorded parts are never one. */
class Pictured {
  constructor(rollout, name, number) {
    Object.assign(this, { rollout, name, number });
  }
}

/** Return the messages with the images of the call, by name, in place of their parts. */
function withPictures(messages, step) {
  const names = step.extra?.images?.ids;
  if (!Array.isArray(names)) return messages;
  let count = 0;
  const named = (part) => {
    const url = part?.image_url?.url ?? part?.image_url;
    if (typeof url !== "string") return part;
    count += 1;
    return new Pictured(step.rollout_id, String(names[count - 1]), count);
  };
  return messages.map((sent) => (Array.isArray(sent.content) ? { ...sent, content: sent.content.map(named) } : sent));
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

function Message({ sent }) {
  const thoughts = sent.reasoning_content ?? sent.reasoning;
  const dim = (text) => html`<span class="dim"> ${text}</span>`;
  return html`
    <article class=${`message${sent.answer ? " answer" : ""}`} data-role=${line(sent.role, 20)}>
      <header>
        <b>${line(sent.role, 40)}</b>${sent.name && ` ${line(String(sent.name), 80)}`}
        ${sent.tool_call_id && dim(`of ${line(String(sent.tool_call_id), 80)}`)}
        ${typeof sent.index === "number" && dim(`choice ${sent.index}`)}
        ${sent.finish && dim(`finished: ${line(String(sent.finish), 40)}`)}
      </header>
      ${typeof thoughts === "string" && thoughts && html`<${Fold} title="reasoning" text=${thoughts} />`}
      ${contents(sent.content).map((part) => (part instanceof Pictured
        ? html`<${Picture} ...${part} />`
        : html`<${Body} text=${part} />`))}
      ${calls(sent).map(([name, args]) => html`
        <div class="toolcall"><b>calls ${line(name, 120)}</b><${Body} text=${args} /></div>`)}
    </article>`;
}

/** Return the texts and the images of a content: a string, a list of parts, or any other JSON value. */
function contents(content) {
  if (content === null || content === undefined) return [];
  if (typeof content === "string") return [content];
  if (!Array.isArray(content)) return [JSON.stringify(content)];
  return content.map((part) => {
    if (part instanceof Pictured) return part;
    return typeof part?.text === "string" ? part.text : (JSON.stringify(part) ?? "");
  });
}

function calls(sent) {
  if (!Array.isArray(sent.tool_calls)) return [];
  return sent.tool_calls.map((call) => {
    const { name, arguments: args } = call?.function ?? {};
    return [String(name ?? "?"), typeof args === "string" ? args : (JSON.stringify(args ?? call) ?? "")];
  });
}

/** Show a text; a long one gets a button that shows the rest. */
function Body({ text }) {
  const [isWhole, setWhole] = useState(text.length <= MAX_FOLDED);
  const isLong = text.length > MAX_UNSCROLLED; // a scrollable text must be reachable by keyboard
  return html`
    <div class="text" dir="auto" tabindex=${isLong ? "0" : null}>${visible(isWhole ? text : text.slice(0, MAX_FOLDED))}</div>
    ${!isWhole && html`
      <button type="button" onclick=${() => setWhole(true)}>Show all ${text.length.toLocaleString("en")} characters</button>`}`;
}

const Fold = ({ title, text }) => html`<details class="fold"><summary>${title}</summary><${Body} text=${text} /></details>`;

/** Show an image of a rollout, which is drawn from the bytes of its route; the page loads images from nowhere else.
 *
 * `number` is its place among the images of the call.
 */
function Picture({ rollout, name, number }) {
  const canvas = useRef(null);
  const [problem, setProblem] = useState(null);
  const isStored = STORED.test(name);
  useEffect(() => {
    if (!isStored) return undefined;
    const stop = new AbortController();
    draw(canvas.current, rollout, name, stop.signal).then(
      () => setProblem(null),
      (error) => stop.signal.aborted || setProblem(error.message),
    );
    return () => stop.abort();
  }, [rollout, name]);
  if (!isStored) return html`<div class="text">image ${number}, by URL: ${name}</div>`;
  return html`
    <canvas class="picture" role="img" aria-label=${`image ${number}`} hidden=${problem !== null} ref=${canvas}></canvas>
    ${problem && html`<div class="text">image ${number} is not shown: ${problem}</div>`}`;
}

async function draw(canvas, rollout, name, signal) {
  const response = await get(path(["rollouts", rollout, "images", name]), { accept: "image/*", signal });
  const picture = await createImageBitmap(await response.blob());
  canvas.width = picture.width;
  canvas.height = picture.height;
  canvas.getContext("2d").drawImage(picture, 0, 0);
  picture.close();
}
