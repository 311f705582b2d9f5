// The raw JSON of an answer: seen, copied, downloaded.
//
// Holds the cutting into lines, arrays of numbers many to a line, of which only those in view are in the document.

import { el, visible } from "./dom.js";
import { Rows } from "./virtual.js";

const LINE = 120; // characters of a line before an array of numbers is broken
const LONGEST = 2000; // of a line that is shown: the copy and the file have all of it

/** A button that shows the JSON below itself, one that copies it, and one that saves it. `text` is as the API told it. */
export function raw(text, name) {
  const told = el("span", { role: "status" });
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
          told.textContent = "copied";
        } catch {
          told.textContent = "the browser does not let this page copy; download it";
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
  return el("section", { class: "rawbox" }, el("div", { class: "bar small" }, show, copy, save, told), host);
}

function cut(text) {
  return visible(
    text.length > LONGEST ? `${text.slice(0, LONGEST)}… (${text.length.toLocaleString("en")} characters)` : text,
  );
}

/** A JSON value as lines: objects and lists broken, lists of numbers many to a line. */
export function lines(value, indent = "", lead = "", tail = "") {
  const isList = Array.isArray(value);
  if (value === null || typeof value !== "object" || Object.keys(value).length === 0) {
    return [`${indent}${lead}${JSON.stringify(value)}${tail}`];
  }
  const inner = `${indent}  `;
  const [open, close] = isList ? ["[", "]"] : ["{", "}"];
  const found = [`${indent}${lead}${open}`];
  if (isList && value.every((one) => one === null || typeof one !== "object")) found.push(...wrapped(value, inner));
  else {
    const entries = Object.entries(value);
    entries.forEach(([name, one], at) => {
      const comma = at + 1 < entries.length ? "," : "";
      for (const each of lines(one, inner, isList ? "" : `${JSON.stringify(name)}: `, comma)) found.push(each);
    });
  }
  found.push(`${indent}${close}${tail}`);
  return found;
}

function wrapped(values, indent) {
  const found = [];
  let line = indent;
  values.forEach((value, at) => {
    const spelt = JSON.stringify(value) + (at + 1 < values.length ? ", " : "");
    if (line.length + spelt.length > LINE && line !== indent) {
      found.push(line.trimEnd());
      line = indent;
    }
    line += spelt;
  });
  found.push(line);
  return found;
}
