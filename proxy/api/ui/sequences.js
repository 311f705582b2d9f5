// The sequences of a rollout: the rows of the export, each with its mask and, when opened, its tokens.

import { json, lines } from "./api.js";
import { count, decimal, hash, line, versionOf } from "./format.js";
import { html, useEffect, useMemo, useState } from "./html.js";
import { Sampled } from "./playback.js";
import { Table } from "./table.js";
import { TokenView } from "./tokens.js";

const MAX_TOKENS = 3_000_000; // about 100 MB in the page
const PIECES = 150; // of a mask strip

const length = (r) => r.token_ids.length;

const COLUMNS = [
  { key: "branch", title: "Branch", cell: (r) => r.branch, sort: (r) => r.branch },
  { key: "length", title: "Tokens", cell: (r) => count(length(r)), sort: length, first: "down" },
  { key: "trained", title: "Trained", cell: (r) => count(r.trained), sort: (r) => r.trained, first: "down" },
  { key: "mask", title: "Mask", cell: (r) => html`<${Strip} row=${r} />` },
  { key: "reward", title: "Reward", from: "tablet", cell: (r) => decimal(r.reward), sort: (r) => r.reward, first: "down" },
  {
    key: "finish",
    title: "Finished",
    from: "tablet",
    cell: (r) => line(r.finish_reason ?? "–", 20),
    sort: (r) => r.finish_reason,
  },
];

export function Sequences({ rolloutId, shell }) {
  const [include, setInclude] = useState("exact");
  const [{ rows, tokens, isLoaded }, setLoaded] = useState({ rows: [], tokens: 0, isLoaded: false });
  const [opened, setOpened] = useState(null);
  useEffect(() => {
    const stopped = new AbortController();
    const load = async () => {
      const found = await readRows(rolloutId, include, stopped.signal);
      setLoaded({ ...found, isLoaded: true });
      setOpened(found.rows.length === 1 ? found.rows[0] : null);
    };
    load().catch((error) => !stopped.signal.aborted && shell.fail(error));
    return () => stopped.abort();
  }, [include]);
  const isCut = tokens >= MAX_TOKENS ? "; the export has more rows than this page shows" : "";
  const none = isLoaded && rows.length === 0 ? "No rows: no step of this kind has sampled tokens." : null;
  return html`
    <div class="sequences">
      <div class="bar small">
        <select aria-label="Which steps" value=${include} onchange=${(event) => setInclude(event.target.value)}>
          <option value="exact">exact steps</option>
          <option value="flagged">flagged steps too</option>
        </select>
        <span class="sum" role="status"
          >${isLoaded ? `${count(rows.length)} rows, ${count(tokens)} tokens${isCut}` : "Loading…"}</span>
      </div>
      <${Table} name="sequences" label="Sequences" columns=${COLUMNS} rows=${rows} identity=${(r) => r.branch}
        open=${setOpened} message=${none} />
      ${opened && html`<${Opened} key=${`${include} ${opened.branch}`} row=${opened} rolloutId=${rolloutId} />`}
    </div>`;
}

/** Read the rows of the export, up to MAX_TOKENS. */
async function readRows(rolloutId, include, signal) {
  const rows = [];
  let tokens = 0;
  const { nodes, drift } = await json(["rollouts", rolloutId, "tree"], {}, { signal });
  const flagged = include === "flagged" ? untrained(nodes) : new Set();
  const query = { format: "sequences", include, overlong: "keep" };
  for await (const row of lines(["rollouts", rolloutId, "export"], query, { signal })) {
    row.trained = row.mask.reduce((total, value) => total + value, 0);
    row.flagged = flagged;
    row.drift = driftIn(row, drift);
    rows.push(row);
    tokens += row.token_ids.length;
    if (tokens >= MAX_TOKENS) break;
  }
  return { rows, tokens };
}

function Opened({ row, rolloutId }) {
  const last = row.spans.at(-1);
  const tokens = useMemo(() => rowOf(row), [row]);
  return html`
    <div>
      <h2>Branch ${row.branch}</h2>
      ${last && html`
        <p class="dim">
          Ends with step <a href=${hash("rollout", rolloutId, "step", last.step_id)}>${line(last.step_id, 60)}</a>
        </p>`}
      ${row.inherited && html`
        <p class="dim">
          ${count(row.inherited.tokens)} tokens are inherited, the last of <${Sampled} rolloutId=${row.inherited.of}
            stepId=${row.inherited.step_id} />
        </p>`}
      ${row.problems && html`<p class="flagged">⚑ ${line(row.problems.join(", "), 300)}</p>`}
      <${TokenView} label=${`Tokens of branch ${row.branch}`} row=${tokens} of=${textsOf(rolloutId, row)} />
    </div>`;
}

/** Return the steps that rows contain only because flagged steps are included. */
function untrained(nodes) {
  return new Set(
    nodes
      .filter((node) => !node.exact || !node.delivered || node.late || node.status !== "complete")
      .map((node) => node.step_id),
  );
}

/** Return the kinds of drift by token index, where a step of the row differs from another step. */
function driftIn(row, drift) {
  const steps = new Set(row.spans.map((span) => span.step_id));
  const found = drift.filter((entry) => steps.has(entry.step_id) || steps.has(entry.earlier_step_id));
  return new Map(found.map((entry) => [entry.index, entry.kind]));
}

/** Describe each token of a row, for TokenView. */
function rowOf(row) {
  const starts = new Map(row.spans.map((span) => [span.start, span]));
  const spanAt = finder(row.spans);
  return {
    ids: row.token_ids,
    kind: (at) => {
      const span = spanAt(at);
      if (span === null) return "prompt";
      if (row.flagged.has(span.step_id)) return "flagged";
      return row.mask[at] === 1 ? "sampled" : "context";
    },
    logprob: (at) => row.logprobs[at],
    version: (at) => (spanAt(at) ? versionOf({ policy: row.policy, policy_epoch: spanAt(at).epoch, ...spanAt(at) }) : null),
    span: (at) => {
      const span = spanAt(at);
      return span ? `${span.start}–${span.end} of step ${line(span.step_id, 60)}, choice ${span.choice}` : "prompt";
    },
    spanStarts: (at) => starts.has(at),
    drift: (at) => (row.drift.has(at) ? `${row.drift.get(at)}: token ids differ from here` : null),
  };
}

/** Return a function that finds the span at an index by binary search: there may be thousands. */
function finder(spans) {
  return (at) => {
    let [low, high] = [0, spans.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (spans[middle].end <= at) low = middle + 1;
      else high = middle;
    }
    return low < spans.length && spans[low].start <= at ? spans[low] : null;
  };
}

/** Return the choice that provides the texts of the row: its last one. */
function textsOf(rolloutId, row) {
  const last = row.spans.at(-1);
  return last === undefined ? null : { rolloutId, stepId: last.step_id, choice: last.choice };
}

/** Draw the mask of a row; trained tokens are higher. */
function Strip({ row }) {
  const size = row.mask.length;
  const piece = Math.max(1, Math.ceil(size / PIECES));
  const runs = [];
  for (let at = 0; at < size; at += piece) {
    const isTrained = row.mask.slice(at, at + piece).includes(1);
    if (runs.length && runs.at(-1).isTrained === isTrained) runs.at(-1).to = Math.min(size, at + piece);
    else runs.push({ isTrained, from: at, to: Math.min(size, at + piece) });
  }
  return html`
    <svg class="strip" viewBox=${`0 0 ${size} 10`} preserveAspectRatio="none" role="img"
      aria-label=${`${count(row.trained)} of ${count(size)} tokens are trained`}>
      ${runs.map(({ isTrained, from, to }) => html`
        <rect class=${isTrained ? "m-trained" : "m-prompt"} x=${from} width=${to - from} y=${isTrained ? 0 : 4}
          height=${isTrained ? 10 : 4} />`)}
    </svg>`;
}
