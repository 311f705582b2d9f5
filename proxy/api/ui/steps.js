// The steps of a rollout on a timeline: their tree, times and marks.

import { count, decimal, duration, hash, line, versionOf } from "./format.js";
import { html, useMemo } from "./html.js";
import { Status } from "./parts.js";
import { BranchesMark, InheritedMark, RepeatedMark } from "./playback.js";
import { speed } from "./plots.js";
import { Table } from "./table.js";
import { continuationText, position, range } from "./tree.js";

const MAX_INDENT = 12; // levels that are indented; deeper ones show their number

/** Show one row per choice of a step; null: they are not loaded. */
export function Steps({ rolloutId, rows }) {
  const span = useMemo(() => range(rows ?? []), [rows]);
  return html`
    <${Table} name="steps" label="Steps, as a tree" columns=${columnsOf(span)} rows=${rows ?? []} height=${30}
      identity=${(r) => r.key} keepsEnd=${true} message=${rows?.length === 0 ? "No steps yet." : null}
      href=${(r) => hash("rollout", rolloutId, "step", r.step_id)}
      open=${(r) => { location.hash = hash("rollout", rolloutId, "step", r.step_id); }} />`;
}

const sampledOf = (r) => (r.unplaced ? r.sampled : r.end - r.start);
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
    cell: (r) => html`<span title="from the request to the first byte of the response">${duration(firstByte(r))}</span>`,
    sort: firstByte,
    first: "down",
  },
  { key: "took", title: "Took", cell: (r) => duration(took(r)), sort: took, first: "down" },
  { key: "kind", title: "Status", cell: (r) => marks(r), sort: (r) => (r.exact ? 0 : 1), first: "down" },
  {
    key: "prompt",
    title: "New prompt",
    cell: (r) => (r.unplaced ? "–" : count(r.fresh)),
    sort: (r) => r.fresh ?? null,
    first: "down",
  },
  { key: "sampled", title: "Completion", cell: (r) => count(sampledOf(r)), sort: sampledOf, first: "down" },
  {
    key: "policy",
    title: "Version",
    cell: (r) => html`<span title=${r.model ? line(`model ${r.model}`) : null}>${line(versionOf(r) ?? "–", 30)}</span>`,
    sort: versionOf,
  },
  {
    key: "opening",
    title: "Reply",
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

function marks(row) {
  const mark = (name, title, text) => html`<span class=${name} title=${line(title, 300)}>${text}</span>`;
  const isNamedByDrift = row.drift.some(({ kind }) => kind === row.continuation?.reason);
  return [
    row.status !== "complete" && html`<${Status} of=${row.status} />`,
    row.status !== "error" && row.exact && mark("exact", "exact", "✓"),
    row.status !== "error" && !row.exact && mark("flagged", row.problems.join(", "), `⚑ ${line(row.problems[0] ?? "", 30)}`),
    row.inherited && html`<${InheritedMark} of=${row.inherited} />`,
    row.branched_from && html`<${RepeatedMark} of=${row.branched_from} />`,
    row.playbacks.length > 0 && html`<${BranchesMark} branches=${row.playbacks} />`,
    row.continuation && !isNamedByDrift && continuationMark(row.continuation),
    row.drift.length > 0 && mark("driftmark", row.drift.map(driftTitle).join(", "), `◆ ${line(row.drift[0].kind, 20)}`),
    row.thread && row.thread.kind !== "main" && threadMark(row.thread),
    row.fork && row.fork.kind !== "drift" && mark("forkmark", forkTitle(row.fork), `↳ ${row.fork.kind}`),
    row.delivered === false && mark("flagged", "the client did not receive the response", "undelivered"),
    row.late && mark("flagged", "the call ended after the rollout finished", "late"),
    row.superseded && mark("dim", "a retry replaces it", "superseded"),
  ];
}

/** Return `»` for a call that continues an earlier step by token ids, or the code of the reason why it does not. */
function continuationMark(continuation) {
  const title = line(continuationText(continuation), 300);
  if (continuation.kept !== undefined)
    return html`<span class="continued" title=${title} role="img" aria-label=${title}>»</span>`;
  return html`<span class="forked" title=${title}>≠ ${line(continuation.reason, 20)}</span>`;
}

/** Return why a step is a fork, with the texts that differ. */
const forkTitle = ({ why, expected, found }) =>
  `fork: ${why}${found === undefined ? "" : `. Before: ${expected ?? "no message"} | Here: ${found}`}`;

/** Return the mark of a step's thread; its title has what starts the thread. */
function threadMark({ agent, kind, name, tool, title }) {
  const about = `thread ${name}${tool === undefined ? "" : `, called by ${tool}`}: ${title}`;
  return html`<span class="threadmark" title=${line(about, 300)}>≡ ${line(agent ?? kind, 20)}</span>`;
}

const driftTitle = ({ kind, why }) => (why === undefined ? kind : `${kind} (not continued: ${why})`);
