// What is done with the rows that are selected in a list: they are compared, or exported as one file.

import { ApiError, get, json, path } from "./api.js";
import { comparison, MAX_COMPARED } from "./compare.js";
import { count, line, visible } from "./format.js";
import { html, useEffect, useState } from "./html.js";
import { save } from "./raw.js";

const FORMAT = "sequences";
const MAX_WRITTEN = 200; // names in a command

/** Show how many rows are selected, their export and its command. `names`: of rollouts, or of groups if `of` is "groups". */
export function Selection({ names, clear, of = "rollouts" }) {
  const [formats, setFormats] = useState([FORMAT]);
  const [format, setFormat] = useState(FORMAT);
  const [status, setStatus] = useState("");
  const isAny = names.length > 0;
  useEffect(() => {
    setStatus("");
    if (isAny && formats.length === 1) readFormats().then(setFormats, () => {});
  }, [names.join("\n")]);
  if (!isAny) return null;
  const write = async () => {
    const progress = (done) => setStatus(`${count(done)} of ${count(names.length)}…`);
    const { text, notes } = await exported(of, names, format, progress);
    if (text) save(text, `${of}-${format}.jsonl`, "application/x-ndjson");
    setStatus(notes);
  };
  return html`
    <section class="bar selection" aria-label="Selection">
      <b>${count(names.length)} selected</b>
      ${of === "rollouts" && (names.length > 1 && names.length <= MAX_COMPARED
        ? html`<a href=${comparison(names.map((name) => [name]))}>Compare</a>`
        : html`<span class="dim">Compare: 2 to ${MAX_COMPARED} rollouts</span>`)}
      <select aria-label="Format of the export" value=${format} onchange=${(event) => setFormat(event.target.value)}>
        ${formats.map((name) => html`<option value=${name}>${name}</option>`)}
      </select>
      <button type="button" onclick=${write}>Export</button>
      <button type="button" onclick=${clear}>Clear</button>
      <span role="status">${status}</span>
      <details class="fold">
        <summary>As a command</summary>
        <div class="text toolcall" tabindex="0">${visible(commandOf(of, names, format))}</div>
      </details>
    </section>`;
}

/** Return the formats of exports. */
async function readFormats() {
  const { parameters } = (await json(["openapi.json"])).paths["/export"].get;
  return parameters.find(({ name }) => name === "format").schema.enum;
}

/** Return the rows of all exports as lines of JSON, and what became of them. */
async function exported(of, names, format, progress) {
  const parts = [];
  const refused = [];
  let skipped = 0;
  for (const [at, name] of names.entries()) {
    progress(at);
    try {
      const response = await get(path([of, name, "export"], { format, container: "ndjson" }));
      parts.push(await response.text());
      if (response.headers.get("X-Export-Skipped")) skipped += 1;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      refused.push(error.message);
    }
  }
  const notes = [
    `${count(names.length - refused.length)} of ${count(names.length)} ${of} exported`,
    skipped > 0 && `${count(skipped)} have steps or rollouts without rows`,
    refused.length > 0 && `refused: ${line(refused[0], 300)}`,
  ];
  return { text: parts.join(""), notes: notes.filter(Boolean).join("; ") };
}

const quoted = (name) => (/^[\w./:@%+-]+$/.test(name) ? name : `'${name.replaceAll("'", "'\\''")}'`);

/** Return the shell commands with the same rows. */
function commandOf(of, names, format) {
  const start = `tokentape export --url ${quoted(new URL("..", import.meta.url).href.replace(/\/$/, ""))} --format ${format}`;
  const written = names.slice(0, MAX_WRITTEN).map(quoted);
  const rest = names.length > MAX_WRITTEN ? `\n# and ${count(names.length - MAX_WRITTEN)} more` : "";
  if (of === "groups") return written.map((name) => `${start} --group ${name}`).join("\n") + rest;
  return `${start} ${written.map((name) => `--rollout ${name}`).join(" ")}${rest}`;
}
