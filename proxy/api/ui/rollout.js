// A rollout: its facts and its tabs (steps on a timeline, sequences, plots), with live updates.

import { json } from "./api.js";
import { clock, count, decimal, duration, el, hash, line, put } from "./dom.js";
import { driftOf, fidelity, status } from "./list.js";
import { follow, gently } from "./live.js";
import { rolloutPlots, speed } from "./plots.js";
import { raw } from "./raw.js";
import { sequences } from "./sequences.js";
import { memory } from "./step.js";
import { Table } from "./table.js";
import { bar, continuationText, layout, range } from "./tree.js";

const TABS = { steps: "Steps", sequences: "Sequences", plots: "Plots" };
const MAX_INDENT = 12; // levels that are indented; deeper ones show their number

export function showRollout(main, rolloutId, tab, { fail, showState }) {
  const facts = el("dl", { class: "facts" });
  const jsonPlace = el("div");
  const place = el("div", { class: "tab" });
  const where = (name) => (name === "steps" ? hash("rollout", rolloutId) : hash("rollout", rolloutId, name));
  const tabs = el(
    "nav",
    { class: "tabs", "aria-label": "Views of this rollout" },
    Object.entries(TABS).map(([name, title]) =>
      el("a", { href: where(name), "aria-current": name === tab ? "page" : null }, title),
    ),
  );
  main.append(
    el("p", { class: "path" }, el("a", { href: "#/rollouts" }, "Rollouts"), " / "),
    el("div", { class: "bar" }, el("h1", {}, line(rolloutId)), tabs),
    facts,
    jsonPlace,
    place,
  );
  const context = {
    back: "#/rollouts",
    table: null,
    turn() {},
    end: () => {
      stop();
      inner?.end();
    },
  };
  const steps = tab === "steps" ? stepTable(rolloutId) : null;
  const inner = tab === "sequences" ? sequences(rolloutId, fail) : null;
  if (steps) put(place, steps.table.element);
  if (inner) put(place, inner.element);
  context.table = steps?.table ?? inner?.table ?? null;
  context.turn = () => inner?.turn();
  context.next = () => inner?.next();

  const update = gently(async () => {
    try {
      const [rollout, tree] = await Promise.all([
        json(["rollouts", rolloutId]),
        tab === "sequences" ? null : json(["rollouts", rolloutId, "tree"]),
      ]);
      if (!main.contains(place)) return;
      put(
        facts,
        factsOf(rollout).map(([term, value]) => el("div", {}, el("dt", {}, term), el("dd", {}, value))),
      );
      if (!jsonPlace.querySelector(".raw:not([hidden])"))
        put(jsonPlace, raw(JSON.stringify(rollout), `rollout-${rolloutId}`));
      if (tree === null) return;
      Object.assign(memory, { rolloutId, tree });
      const rows = layout(tree);
      if (steps) steps.fill(rows);
      else put(place, rolloutPlots(tree, rows));
    } catch (error) {
      fail(error);
    }
  });
  update();
  const stop = follow(rolloutId, update, showState);
  return context;
}

function factsOf(rollout) {
  const { counts } = rollout;
  return [
    ["Status", status(rollout.status)],
    ["Reward", decimal(rollout.reward)],
    [
      "Steps",
      count(counts.steps) +
        also(counts.error, "failed") +
        also(counts.undelivered, "undelivered") +
        also(counts.late, "late"),
    ],
    ["Exact / flagged", fidelity(counts.exact, counts.flagged)],
    ["Tokens", `${count(counts.prompt_tokens)} prompt tokens, ${count(counts.sampled_tokens)} completion tokens`],
    [
      "Drift",
      rollout.drift
        ? `${count(driftOf(rollout))}${Object.entries(rollout.drift)
            .map(([kind, n]) => ` · ${kind} ${n}`)
            .join("")}`
        : "counted when the rollout finishes",
    ],
    [
      "Group",
      rollout.group_id === null ? "–" : el("a", { href: hash("group", rollout.group_id) }, line(rollout.group_id, 80)),
    ],
    ["Opened", `${clock(rollout.created_ms)} UTC`],
    [
      "Finished",
      rollout.finished_ms
        ? `after ${duration(rollout.finished_ms - rollout.created_ms)}${rollout.reason ? ` (${rollout.reason})` : ""}`
        : "–",
    ],
    ["Metadata", line(JSON.stringify(rollout.metadata ?? {}), 400)],
  ];
}

const also = (number, what) => (number ? `, ${count(number)} ${what}` : "");

/** Return the tree as a table with one row per choice of a step. */
function stepTable(rolloutId) {
  let span = { from: 0, to: 1 };
  const columns = [
    {
      key: "step",
      title: "Step",
      cell: (r) => [indent(r), el("span", { class: "index" }, `#${r.index}${r.choice ? `.${r.choice}` : ""}`)],
      sort: (r) => r.index,
    },
    { key: "time", title: "Timeline", cell: (r) => barOf(r, span), sort: (r) => r.started_ms },
    { key: "kind", title: "Status", cell: (r) => marks(r), sort: (r) => (r.exact ? 0 : 1), first: "down" },
    {
      key: "prompt",
      title: "New prompt",
      cell: (r) => (r.unplaced ? "–" : count(r.fresh)),
      sort: (r) => r.fresh ?? null,
      first: "down",
    },
    {
      key: "sampled",
      title: "Completion",
      cell: (r) => count(r.unplaced ? r.sampled : r.end - r.start),
      sort: (r) => (r.unplaced ? r.sampled : r.end - r.start),
      first: "down",
    },
    {
      key: "policy",
      title: "Version",
      cell: (r) => line(String(r.policy_version ?? "–"), 30),
      sort: (r) => r.policy_version,
    },
    {
      key: "opening",
      title: "Reply",
      cell: (r) => line(r.opening ?? (r.unplaced ? `not in the tree: ${r.why}` : "–"), 120),
    },
  ];
  const table = new Table({
    name: "steps",
    label: "Steps, as a tree",
    columns,
    height: 30,
    identity: (r) => r.key,
    open: (r) => {
      location.hash = hash("rollout", rolloutId, "step", r.step_id);
    },
    href: (r) => hash("rollout", rolloutId, "step", r.step_id),
  });
  return {
    table,
    fill(rows) {
      span = range(rows);
      const { scroller } = table;
      const isAtEnd = scroller.scrollTop > 0 && scroller.scrollTop + scroller.clientHeight >= scroller.scrollHeight - 4;
      table.fill(rows);
      if (isAtEnd) scroller.scrollTop = scroller.scrollHeight; // keep showing the newest rows
      table.showMessage(rows.length ? null : "No steps yet.");
    },
  };
}

function indent(row) {
  if (row.depth === 0) return el("span", { class: "branch" });
  const shown = Math.min(row.depth, MAX_INDENT);
  return el(
    "span",
    { class: `branch d-${shown}`, title: `branch level ${row.depth}` },
    `${row.depth > MAX_INDENT ? row.depth : ""}${row.begins ? "└" : "│"} `,
  );
}

function barOf(row, span) {
  const { left, width } = bar(row, span);
  const took = row.ended_ms === null ? null : row.ended_ms - row.started_ms;
  const fast = speed(row);
  const pace = fast === null ? "" : `, ${decimal(fast, 1)} tokens/s`;
  const label = `started after ${duration(row.started_ms - span.from)}, took ${duration(took)}${pace}`;
  const inner = el("span", { class: `timebar${row.exact && row.status === "complete" ? "" : " off"}` });
  inner.style.left = `${Math.min(left, 99.6)}%`;
  inner.style.width = `${Math.min(width, 100 - Math.min(left, 99.6))}%`;
  return el("span", { class: "timeline", title: label, role: "img", "aria-label": label }, inner);
}

function marks(row) {
  const found = [];
  if (row.status !== "complete") found.push(status(row.status));
  if (row.status !== "error")
    found.push(
      row.exact
        ? el("span", { class: "exact", title: "exact" }, "✓")
        : el(
            "span",
            { class: "flagged", title: line(row.problems.join(", "), 300) },
            `⚑ ${line(row.problems[0] ?? "", 30)}`,
          ),
    );
  const isNamedByDrift = row.drift.some(({ kind }) => kind === row.continuation?.reason);
  if (row.continuation && !isNamedByDrift) found.push(continuationMark(row.continuation));
  if (row.drift.length)
    found.push(
      el(
        "span",
        { class: "driftmark", title: line(row.drift.map(driftTitle).join(", "), 300) },
        `◆ ${line(row.drift[0].kind, 20)}`,
      ),
    );
  if (row.delivered === false)
    found.push(el("span", { class: "flagged", title: "the client did not receive the response" }, "undelivered"));
  if (row.late) found.push(el("span", { class: "flagged", title: "the call ended after the rollout finished" }, "late"));
  if (row.superseded) found.push(el("span", { class: "dim", title: "a retry replaces it" }, "superseded"));
  return found;
}

/** Return `»` for a call that continues an earlier step by token ids, or the code of the reason why it does not. */
function continuationMark(continuation) {
  const title = line(continuationText(continuation), 300);
  if (continuation.kept !== undefined)
    return el("span", { class: "continued", title, role: "img", "aria-label": title }, "»");
  return el("span", { class: "forked", title }, `≠ ${line(continuation.reason, 20)}`);
}

const driftTitle = ({ kind, why }) => (why === undefined ? kind : `${kind} (not continued: ${why})`);
