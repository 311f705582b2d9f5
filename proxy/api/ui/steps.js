// The steps of a rollout on a timeline: their tree, times and marks.

import { comparison, MAX_COMPARED } from "./compare.js";
import { count, decimal, duration, hash, line, versionOf } from "./format.js";
import { html, useMemo } from "./html.js";
import { Status } from "./parts.js";
import { InheritedMark, RepeatedMark, sumOf } from "./playback.js";
import { speed } from "./plots.js";
import { Table, useSelected } from "./table.js";
import { continuationText, position, range } from "./tree.js";

const LEAST = 14; // characters of the column of marks
const MAX_INDENT = 12; // levels that are indented; deeper ones show their number

/** Show one row per choice of a step; null: they are not loaded. */
export function Steps({ rolloutId, rows }) {
  const span = useMemo(() => range(rows ?? []), [rows]);
  const longest = useMemo(() => (rows ?? []).reduce((most, row) => Math.max(most, widthOf(marksOf(row))), LEAST), [rows]);
  const selection = useSelected();
  const ends = [...new Set((rows ?? []).filter(({ key }) => selection.names.has(key)).map((row) => row.step_id))];
  return html`
    ${selection.names.size > 0 && html`
      <section class="bar selection" aria-label="Selection">
        <b>${count(ends.length)} selected</b>
        ${ends.length > 1 && ends.length <= MAX_COMPARED && html`
          <a href=${comparison(ends.map((stepId) => [rolloutId, stepId]))}>Compare the branches that end there</a>`}
        <button type="button" onclick=${selection.clear}>Clear</button>
      </section>`}
    <${Table} name="steps" label="Steps, as a tree" columns=${columnsOf(span)} rows=${rows ?? []} height=${30}
      selection=${selection}
      style=${`--marks: ${(0.58 * longest).toFixed(1)}rem`}
      identity=${(r) => r.key} keepsEnd=${true} message=${rows?.length === 0 ? "No steps yet." : null}
      href=${(r) => hash("rollout", rolloutId, "step", r.step_id)}
      open=${(r) => { location.hash = hash("rollout", rolloutId, "step", r.step_id); }} />`;
}

const sampledOf = (r) => (r.unplaced ? r.sampled : r.end - r.start);
const cachedOf = ({ cached_tokens: cached }) => (cached === undefined ? null : `${count(cached)} prompt tokens were cached`);
const took = (r) => (r.ended_ms === null ? null : r.ended_ms - r.started_ms);
const firstByte = (r) => (r.first_byte_ms === null ? null : r.first_byte_ms - r.started_ms);

const columnsOf = (span) => [
  {
    key: "step",
    title: "Step",
    cell: (r) => html`<${Branch} row=${r} /><span class="index">#${r.index}${r.choice ? `.${r.choice}` : ""}</span>`,
    sort: (r) => r.index,
  },
  {
    key: "time",
    title: html`<${Axis} span=${span} />`,
    cell: (r) => html`<${Bar} row=${r} span=${span} />`,
    sort: (r) => r.started_ms,
  },
  {
    key: "first",
    title: "1st byte",
    from: "desk",
    cell: (r) => html`<span title="from the request to the first byte of the response">${duration(firstByte(r))}</span>`,
    sort: firstByte,
    first: "down",
  },
  { key: "took", title: "Took", cell: (r) => duration(took(r)), sort: took, first: "down" },
  {
    key: "kind",
    title: "Status",
    cell: (r) => marksOf(r).map(({ node }) => node),
    sort: (r) => (r.exact ? 0 : 1),
    first: "down",
  },
  {
    key: "prompt",
    title: "New prompt",
    from: "desk",
    cell: (r) => (r.unplaced ? "–" : html`<span title=${cachedOf(r)}>${count(r.fresh)}</span>`),
    sort: (r) => r.fresh ?? null,
    first: "down",
  },
  { key: "sampled", title: "Completion", from: "tablet", cell: (r) => count(sampledOf(r)), sort: sampledOf, first: "down" },
  {
    key: "policy",
    title: "Version",
    from: "desk",
    cell: (r) => html`<span title=${r.model ? line(`model ${r.model}`) : null}>${line(versionOf(r) ?? "–", 30)}</span>`,
    sort: versionOf,
  },
  {
    key: "opening",
    title: "Reply",
    from: "tablet",
    cell: (r) => line(r.opening ?? (r.unplaced ? `not in the tree: ${r.why}` : "–"), 120),
  },
];

function Branch({ row }) {
  if (row.depth === 0) return html`<span class="branch"></span>`;
  const number = row.depth > MAX_INDENT ? row.depth : "";
  return html`
    <span class=${`branch d-${row.depth}`} title=${`branch level ${row.depth}`}
      style=${`padding-left: ${0.2 + 0.2 * Math.min(row.depth, MAX_INDENT)}rem`}
      >${`${number}${row.begins ? "└" : "│"} `}</span>`;
}

/** Show the first and the last time of the timeline. */
const Axis = ({ span }) => html`<span class="axis"><span>Time 0 s</span><span>${duration(span.to - span.from)}</span></span>`;

function Bar({ row, span }) {
  const left = Math.min(position(row.started_ms, span), 99.6);
  const widthOf = (ms) => Math.min(100 - left, Math.max(position(span.from + (ms ?? 0), span), 0));
  const fast = speed(row);
  const pace = fast === null ? "" : `, ${decimal(fast, 1)} tokens/s`;
  const first = firstByte(row) === null ? "" : `, first byte after ${duration(firstByte(row))}`;
  const how = row.inherited ? ", inherited" : "";
  const label = `started after ${duration(row.started_ms - span.from)}, took ${duration(took(row))}${first}${pace}${how}`;
  const isOff = !row.exact || row.status !== "complete";
  return html`
    <span class=${row.inherited ? "timeline inherited" : "timeline"} title=${label} role="img" aria-label=${label}>
      <span class=${`timebar${isOff ? " off" : ""}`}
        style=${`left: ${left}%; width: ${Math.max(0.4, widthOf(took(row)))}%`}></span>
      ${!isOff && html`<span class="timebar wait" style=${`left: ${left}%; width: ${widthOf(firstByte(row))}%`}></span>`}
    </span>`;
}

/** Return the marks of a step, each with its class, its title and its text; or a component and its text. */
function marksOf(row) {
  const isNamedByDrift = row.drift.some(({ kind }) => kind === row.continuation?.reason);
  const branches = row.playbacks.length > 0 && sumOf(row.playbacks);
  return [
    row.status !== "complete" && { text: `  ${row.status}`, node: html`<${Status} of=${row.status} />` },
    row.status !== "error" && row.exact && mark("exact", "exact", "✓"),
    row.status !== "error" && !row.exact && mark("flagged", row.problems.join(", "), `⚑ ${line(row.problems[0] ?? "", 30)}`),
    row.inherited && { text: "▷ inherited", node: html`<${InheritedMark} of=${row.inherited} />` },
    row.branched_from && { text: "⋔ branch", node: html`<${RepeatedMark} of=${row.branched_from} />` },
    branches && mark("branchmark", branches.text, branches.mark),
    row.continuation && !isNamedByDrift && continuationMark(row.continuation),
    row.drift.length > 0 && mark("driftmark", row.drift.map(driftTitle).join(", "), `◆ ${line(row.drift[0].kind, 20)}`),
    row.thread && row.thread.kind !== "main" && threadMark(row.thread),
    row.fork && row.fork.kind !== "drift" && mark("forkmark", forkTitle(row.fork), `↳ ${row.fork.kind}`),
    row.delivered === false && mark("flagged", "the client did not receive the response", "undelivered"),
    row.late && mark("flagged", "the call ended after the rollout finished", "late"),
    row.superseded && mark("dim", "a retry replaces it", "superseded"),
  ].filter(Boolean);
}

const mark = (name, title, text) => ({ text, node: html`<span class=${name} title=${line(title, 300)}>${text}</span>` });
const widthOf = (marks) => marks.reduce((sum, { text }) => sum + text.length + 2, 0);

/** Return `»` for a call that continues an earlier step by token ids, or the code of the reason why it does not. */
function continuationMark(continuation) {
  const title = line(continuationText(continuation), 300);
  if (continuation.kept !== undefined)
    return { text: "»", node: html`<span class="continued" title=${title} role="img" aria-label=${title}>»</span>` };
  return mark("forked", title, `≠ ${line(continuation.reason, 20)}`);
}

/** Return why a step is a fork, with the texts that differ. */
const forkTitle = ({ why, expected, found }) =>
  `fork: ${why}${found === undefined ? "" : `. Before: ${expected ?? "no message"} | Here: ${found}`}`;

/** Return the mark of a step's thread; its title has what starts the thread. */
function threadMark({ agent, kind, name, tool, title }) {
  const about = `thread ${name}${tool === undefined ? "" : `, called by ${tool}`}: ${title}`;
  return mark("threadmark", about, `≡ ${line(agent ?? kind, 20)}`);
}

const driftTitle = ({ kind, why }) => (why === undefined ? kind : `${kind} (not continued: ${why})`);
