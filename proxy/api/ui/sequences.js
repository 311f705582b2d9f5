// The sequences of a rollout: the rows of the export, each with its mask and, when opened, its tokens.

import { json, lines } from "./api.js";
import { count, decimal, el, hash, line, put, svg } from "./dom.js";
import { Table } from "./table.js";
import { TokenView } from "./tokens.js";

const MAX_TOKENS = 3_000_000; // about 100 MB in the page
const PIECES = 150; // of a mask strip

const COLUMNS = [
  { key: "branch", title: "Branch", cell: (r) => String(r.branch), sort: (r) => r.branch },
  {
    key: "length",
    title: "Tokens",
    cell: (r) => count(r.token_ids.length),
    sort: (r) => r.token_ids.length,
    first: "down",
  },
  { key: "trained", title: "Trained", cell: (r) => count(r.trained), sort: (r) => r.trained, first: "down" },
  { key: "mask", title: "Mask", cell: strip },
  { key: "reward", title: "Reward", cell: (r) => decimal(r.reward), sort: (r) => r.reward, first: "down" },
  { key: "finish", title: "Finished", cell: (r) => line(r.finish_reason ?? "–", 20), sort: (r) => r.finish_reason },
];

export function sequences(rolloutId, fail) {
  const place = el("div", { class: "opened" });
  const sum = el("span", { class: "sum", role: "status" }, "Loading…");
  const element = el("div", { class: "sequences" });
  const view = { element, table: null, turn() {}, next() {}, end: () => stopped.abort() };
  let stopped = new AbortController();
  const include = el(
    "select",
    {
      "aria-label": "Which steps",
      onchange: () => {
        stopped.abort();
        void load();
      },
    },
    el("option", { value: "exact" }, "exact steps"),
    el("option", { value: "flagged" }, "flagged steps too"),
  );
  const table = new Table({
    name: "sequences",
    label: "Sequences",
    columns: COLUMNS,
    height: 34,
    identity: (r) => r.branch,
    open: (r) => openRow(r),
    href: null,
  });
  view.table = table;
  element.append(el("div", { class: "bar small" }, include, sum), table.element, place);
  void load();
  return view;

  async function load() {
    stopped = new AbortController();
    const rows = [];
    let tokens = 0;
    try {
      const { nodes, drift } = await json(["rollouts", rolloutId, "tree"]);
      const flagged = include.value === "flagged" ? untrained(nodes) : new Set();
      const query = { format: "sequences", include: include.value, overlong: "keep" };
      for await (const row of lines(["rollouts", rolloutId, "export"], query, { signal: stopped.signal })) {
        row.trained = row.mask.reduce((total, value) => total + value, 0);
        row.flagged = flagged;
        row.drift = driftIn(row, drift);
        rows.push(row);
        tokens += row.token_ids.length;
        if (tokens >= MAX_TOKENS) break;
      }
      table.fill(rows);
      const isCut = tokens >= MAX_TOKENS ? "; the export has more rows than this page shows" : "";
      sum.textContent = `${count(rows.length)} rows, ${count(tokens)} tokens${isCut}`;
      table.showMessage(rows.length ? null : "No rows: no step of this kind has sampled tokens.");
      if (rows.length === 1) openRow(rows[0]);
    } catch (error) {
      if (!stopped.signal.aborted) fail(error);
    }
  }

  function openRow(row) {
    const tokens = new TokenView(`Tokens of branch ${row.branch}`, rowOf(row), textsOf(rolloutId, row));
    view.turn = tokens.turn;
    view.next = () => {
      tokens.host.focus();
      tokens.next();
    };
    const last = row.spans.at(-1);
    put(
      place,
      el("h2", {}, `Branch ${row.branch}`),
      last
        ? el(
            "p",
            { class: "dim" },
            "Ends with step ",
            el("a", { href: hash("rollout", rolloutId, "step", last.step_id) }, line(last.step_id, 60)),
          )
        : null,
      row.problems ? el("p", { class: "flagged" }, `⚑ ${line(row.problems.join(", "), 300)}`) : null,
      tokens.element,
    );
  }
}

/** Return the steps whose tokens are in rows only because flagged steps are included. */
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
    version: (at) => spanAt(at)?.policy_version ?? null,
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

/** Return the choice whose texts the row has: its last one. */
function textsOf(rolloutId, row) {
  const last = row.spans.at(-1);
  return last === undefined ? null : { rolloutId, stepId: last.step_id, choice: last.choice };
}

/** Draw the mask of a row; trained tokens are higher. */
function strip(row) {
  const size = row.mask.length;
  const piece = Math.max(1, Math.ceil(size / PIECES));
  const runs = [];
  for (let at = 0; at < size; at += piece) {
    const isTrained = row.mask.slice(at, at + piece).includes(1);
    if (runs.length && runs.at(-1).isTrained === isTrained) runs.at(-1).to = Math.min(size, at + piece);
    else runs.push({ isTrained, from: at, to: Math.min(size, at + piece) });
  }
  return svg(
    "svg",
    {
      class: "strip",
      viewBox: `0 0 ${size} 10`,
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": `${count(row.trained)} of ${count(size)} tokens are trained`,
    },
    runs.map((run) =>
      svg("rect", {
        class: run.isTrained ? "m-trained" : "m-prompt",
        x: run.from,
        width: run.to - run.from,
        y: run.isTrained ? 0 : 4,
        height: run.isTrained ? 10 : 4,
      }),
    ),
  );
}
