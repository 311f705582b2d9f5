// The list of rollouts: its columns, its filters and its live updates. A rollout that changes is requested individually.

import { ApiError, json } from "./api.js";
import { count, decimal, el, ended, hash, line, since } from "./dom.js";
import { follow, gently } from "./live.js";
import { Table } from "./table.js";

const PAGE = 500;
const MAX_INDIVIDUAL = 20; // changed rollouts requested individually; for more, the newest page is requested again
const STATUSES = ["open", "limited", "completed", "failed", "aborted", "truncated"];

export const status = (word) => el("span", { class: `status s-${word}` }, line(String(word), 20));

export const driftOf = (rollout) =>
  rollout.drift ? Object.values(rollout.drift).reduce((sum, number) => sum + number, 0) : null;

const driftKinds = (rollout) =>
  Object.entries(rollout.drift ?? {})
    .map(([kind, n]) => `${kind}: ${n}`)
    .join(", ");

/** Show the numbers of exact and flagged steps. */
export function fidelity(exact, flagged) {
  return el(
    "span",
    { class: flagged ? "flagged" : "exact", title: `${exact} exact, ${flagged} flagged` },
    flagged ? `${count(exact)} / ⚑ ${count(flagged)}` : `${count(exact)} ✓`,
  );
}

const COLUMNS = [
  { key: "id", title: "Rollout", cell: (r) => ended(r.rollout_id), sort: (r) => r.rollout_id },
  { key: "status", title: "Status", cell: (r) => status(r.status), sort: (r) => r.status },
  { key: "reward", title: "Reward", cell: (r) => decimal(r.reward), sort: (r) => r.reward, first: "down" },
  { key: "steps", title: "Steps", cell: (r) => count(r.counts.steps), sort: (r) => r.counts.steps, first: "down" },
  {
    key: "tokens",
    title: "Tokens",
    cell: (r) => count(r.counts.sampled_tokens),
    sort: (r) => r.counts.sampled_tokens,
    first: "down",
  },
  {
    key: "fidelity",
    title: "Exact / flagged",
    cell: (r) => fidelity(r.counts.exact, r.counts.flagged),
    sort: (r) => r.counts.flagged,
    first: "down",
  },
  {
    key: "drift",
    title: "Drift",
    sort: driftOf,
    first: "down",
    cell: (r) =>
      el(
        "span",
        { title: driftKinds(r) || (r.drift ? "none" : "counted when the rollout finishes") },
        count(driftOf(r)),
      ),
  },
  {
    key: "group",
    title: "Group",
    cell: (r) => (r.group_id === null ? "–" : line(r.group_id, 60)),
    sort: (r) => r.group_id,
  },
  {
    key: "age",
    title: "Changed",
    sort: (r) => r.touched_ms,
    first: "down",
    cell: (r) => since(r.touched_ms),
  },
];

/** Return a table of rollouts; of a group, without the columns that are equal for all members or that the group lacks. */
export function rolloutTable(label, isOfGroup = false) {
  return new Table({
    name: isOfGroup ? "members" : "rollouts",
    label,
    columns: isOfGroup ? COLUMNS.filter(({ key }) => !["group", "age"].includes(key)) : COLUMNS,
    height: 34,
    identity: (r) => r.rollout_id,
    open: (r) => {
      location.hash = hash("rollout", r.rollout_id);
    },
    href: (r) => hash("rollout", r.rollout_id),
  });
}

/** Return the text that the filter searches. */
const searched = (r) =>
  `${r.rollout_id} ${r.group_id ?? ""} ${r.model ?? ""} ${JSON.stringify(r.metadata)}`.toLowerCase();

export function show(main, { fail, showState }) {
  const rollouts = new Map();
  let cursor = null;
  const table = rolloutTable("Rollouts");
  const filter = el("input", {
    type: "search",
    id: "filter",
    placeholder: "Filter ( / )",
    "aria-label": "Filter by id, group, model or metadata",
    spellcheck: "false",
    oninput: () => narrow(),
  });
  const chosen = el(
    "select",
    { "aria-label": "Status", onchange: () => narrow() },
    el("option", { value: "" }, "any status"),
    STATUSES.map((word) => el("option", { value: word }, word)),
  );
  const more = el("button", { type: "button", hidden: true, onclick: () => older() }, "Load older");
  const sum = el("span", { class: "sum", role: "status" });
  main.append(el("div", { class: "bar" }, el("h1", {}, "Rollouts"), filter, chosen, more, sum), table.element);

  function narrow() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const word = chosen.value;
    table.filter(
      (r) => (!word || r.status === word) && (words.length === 0 || words.every((text) => searched(r).includes(text))),
    );
    showSum();
  }

  function showSum() {
    const of = table.rows.length === rollouts.size ? "" : `${count(table.rows.length)} of `;
    sum.textContent = `${of}${count(rollouts.size)} loaded${cursor === null ? "" : "; older ones exist"}`;
    more.hidden = cursor === null;
    table.showMessage(
      table.rows.length
        ? null
        : rollouts.size
          ? "No rollout matches the filter."
          : "No rollouts yet. Rollouts appear here when an agent calls this proxy.",
    );
  }

  function refill() {
    table.fill([...rollouts.values()].sort((a, b) => b.created_ms - a.created_ms));
    showSum();
  }

  async function newest() {
    const page = await json(["rollouts"], { limit: PAGE });
    if (rollouts.size === 0) cursor = page.cursor;
    const oldest = page.cursor === null ? 0 : Math.min(...page.rollouts.map((rollout) => rollout.created_ms));
    const listed = new Set(page.rollouts.map((rollout) => rollout.rollout_id));
    for (const { rollout_id: name, created_ms } of rollouts.values()) {
      if (created_ms > oldest && !listed.has(name)) rollouts.delete(name); // deleted meanwhile
    }
    for (const rollout of page.rollouts) rollouts.set(rollout.rollout_id, rollout);
    refill();
  }

  async function older() {
    more.disabled = true;
    try {
      const page = await json(["rollouts"], { limit: PAGE, cursor });
      cursor = page.cursor;
      for (const rollout of page.rollouts)
        if (!rollouts.has(rollout.rollout_id)) rollouts.set(rollout.rollout_id, rollout);
      refill();
    } catch (error) {
      fail(error);
    } finally {
      more.disabled = false;
    }
  }

  async function reload(name) {
    try {
      rollouts.set(name, await json(["rollouts", name]));
    } catch (error) {
      if (error instanceof ApiError && error.status === 404) rollouts.delete(name);
      else throw error;
    }
  }

  let changes = new Set();
  let lost = true;
  const update = gently(async () => {
    const names = changes;
    const isLost = lost || names.size > MAX_INDIVIDUAL;
    [changes, lost] = [new Set(), false];
    try {
      if (isLost) await newest();
      await Promise.all([...names].slice(0, MAX_INDIVIDUAL).map(reload));
      refill();
    } catch (error) {
      fail(error);
    }
  });
  update();
  const end = follow(
    null,
    (change) => {
      if (change === null) lost = true;
      else changes.add(change.rollout_id);
      update();
    },
    showState,
  );
  return { end, table, filter };
}
