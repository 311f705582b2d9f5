// The raw JSON of a response: shown in lines, copied, downloaded. Only the lines in view are in the document.

import { visible } from "./format.js";
import { html, useMemo, useState } from "./html.js";
import { useRows } from "./virtual.js";

const LINE = 120; // characters of a line before an array of numbers is broken
const MAX_SHOWN = 2000; // characters of a line; the copy and the file have all of it
const HEIGHT = 18;

/** Show buttons that show, copy and save the JSON. `text` is the body of the response. */
export function Raw({ text, name }) {
  const [isOpen, setOpen] = useState(false);
  const [status, setStatus] = useState("");
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      setStatus("copied");
    } catch {
      setStatus("the browser does not allow copying; use Download");
    }
  };
  return html`
    <section class="rawbox">
      <div class="bar small">
        <button type="button" aria-expanded=${String(isOpen)} onclick=${() => setOpen(!isOpen)}>Raw JSON</button>
        <button type="button" onclick=${copy}>Copy</button>
        <button type="button" onclick=${() => save(text, `${name}.json`, "application/json")}>Download</button>
        <span role="status">${status}</span>
      </div>
      ${isOpen && html`<${Lines} text=${text} />`}
    </section>`;
}

/** Save a text as a file of the browser's downloads. */
export function save(text, name, type) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement("a");
  Object.assign(link, { href: url, download: name.replace(/[^\w.-]/g, "_").slice(-100) }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

function Lines({ text }) {
  const found = useMemo(() => lines(JSON.parse(text)), [text]);
  const list = useRows(found.length, HEIGHT);
  return html`
    <div class="raw" tabindex="0" role="region" aria-label="Raw JSON" ref=${list.host}>
      <div class="virtual" style=${list.whole}>
        <div style=${list.part}>
          ${found.slice(list.from, list.to).map((one) => html`<div class="rawline">${cut(one)}</div>`)}
        </div>
      </div>
    </div>`;
}

function cut(text) {
  return visible(
    text.length > MAX_SHOWN ? `${text.slice(0, MAX_SHOWN)}… (${text.length.toLocaleString("en")} characters)` : text,
  );
}

/** Return a JSON value as lines; lists of scalars are wrapped. */
export function lines(value, indent = "", lead = "", tail = "") {
  const isList = Array.isArray(value);
  if (value === null || typeof value !== "object" || Object.keys(value).length === 0) {
    return [`${indent}${lead}${JSON.stringify(value)}${tail}`];
  }
  const inner = `${indent}  `;
  const [open, close] = isList ? ["[", "]"] : ["{", "}"];
  const found = [`${indent}${lead}${open}`];
  if (isList && value.every((item) => item === null || typeof item !== "object")) found.push(...wrapped(value, inner));
  else {
    const entries = Object.entries(value);
    entries.forEach(([name, item], index) => {
      const comma = index + 1 < entries.length ? "," : "";
      for (const line of lines(item, inner, isList ? "" : `${JSON.stringify(name)}: `, comma)) found.push(line);
    });
  }
  found.push(`${indent}${close}${tail}`);
  return found;
}

function wrapped(values, indent) {
  const found = [];
  let line = indent;
  values.forEach((value, index) => {
    const item = JSON.stringify(value) + (index + 1 < values.length ? ", " : "");
    if (line.length + item.length > LINE && line !== indent) {
      found.push(line.trimEnd());
      line = indent;
    }
    line += item;
  });
  found.push(line);
  return found;
}
