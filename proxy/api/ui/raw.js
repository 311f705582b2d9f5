// The raw JSON of a response: shown in lines, copied, downloaded. Only the lines in view are in the document.

import { el, visible } from "./dom.js";
import { Rows } from "./virtual.js";

const LINE = 120; // characters of a line before an array of numbers is broken
const MAX_SHOWN = 2000; // characters of a line; the copy and the file have all of it

/** Return buttons that show, copy and save the JSON. `text` is the body of the response. */
export function raw(text, name) {
  const status = el("span", { role: "status" });
  const host = el("div", { class: "raw", hidden: true, tabindex: "0", role: "region", "aria-label": "Raw JSON" });
  let rows = null;
  const show = el(
    "button",
    {
      type: "button",
      "aria-expanded": "false",
      class: "show-raw",
      onclick: () => {
        host.hidden = !host.hidden;
        show.setAttribute("aria-expanded", String(!host.hidden));
        if (rows === null) {
          const found = lines(JSON.parse(text));
          rows = new Rows(host, 18, (index) => el("div", { class: "rawline" }, cut(found[index])));
          rows.update(found.length);
        }
      },
    },
    "Raw JSON",
  );
  const copy = el(
    "button",
    {
      type: "button",
      onclick: async () => {
        try {
          await navigator.clipboard.writeText(text);
          status.textContent = "copied";
        } catch {
          status.textContent = "the browser does not allow copying; use Download";
        }
      },
    },
    "Copy",
  );
  const save = el(
    "button",
    {
      type: "button",
      onclick: () => {
        const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
        el("a", { href: url, download: `${name.replace(/[^\w.-]/g, "_").slice(0, 100)}.json` }).click();
        setTimeout(() => URL.revokeObjectURL(url), 60_000);
      },
    },
    "Download",
  );
  return el("section", { class: "rawbox" }, el("div", { class: "bar small" }, show, copy, save, status), host);
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
