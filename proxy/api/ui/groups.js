// The list of groups: its columns and its live updates.
//
// The API returns the rollouts of one group at a time: the totals of each group are requested after the list, and again when
// one of its rollouts changes.

import { json } from "./api.js";
import { count, decimal, el, ended, hash, line, since } from "./dom.js";
import { sumsOf } from "./group.js";
import { fidelity, status } from "./list.js";
import { follow, gently } from "./live.js";
import { Table } from "./table.js";

const PAGE = 500;
const CONCURRENCY = 3;

const COLUMNS = [
  { key: "id", title: "Group", cell: (g) => ended(g.group_id), sort: (g) => g.group_id },
  { key: "status", title: "Status", cell: (g) => status(g.status), sort: (g) => g.status },
  {
    key: "finished",
    title: "Finished",
    sort: (g) => g.finished / Math.max(1, g.size ?? g.members),
    first: "down",
    cell: (g) =>
      el(
        "span",
        {},
        el("progress", { max: Math.max(1, g.size ?? g.members), value: g.finished, "aria-hidden": "true" }),
        ` ${g.finished} of ${g.size ?? g.members}`,
      ),
  },
  {
    key: "reward",
    title: "Mean reward",
    cell: (g) => decimal(g.sums?.reward),
    sort: (g) => g.sums?.reward,
    first: "down",
  },
  { key: "steps", title: "Steps", cell: (g) => count(g.sums?.steps), sort: (g) => g.sums?.steps, first: "down" },
  {
    key: "tokens",
    title: "Tokens",
    cell: (g) => count(g.sums?.sampled_tokens),
    sort: (g) => g.sums?.sampled_tokens,
    first: "down",
  },
  {
    key: "fidelity",
    title: "Exact / flagged",
    cell: (g) => (g.sums ? fidelity(g.sums.exact, g.sums.flagged) : "–"),
    sort: (g) => g.sums?.flagged,
    first: "down",
  },
  { key: "drift", title: "Drift", cell: (g) => count(g.sums?.drift), sort: (g) => g.sums?.drift, first: "down" },
  {
    key: "policy",
    title: "Version",
    cell: (g) => line(String(g.policy_version ?? "–"), 40),
    sort: (g) => g.policy_version,
  },
  { key: "held", title: "Consumer", cell: (g) => line(g.consumer ?? g.why ?? "–", 60), sort: (g) => g.consumer ?? null },
  {
    key: "age",
    title: "Opened",
    cell: (g) => since(g.created_ms),
    sort: (g) => g.created_ms,
    first: "down",
  },
];

export function show(main, { fail, showState }) {
  const groups = new Map();
  let cursor = null;
  const table = new Table({
    name: "groups",
    label: "Groups",
    columns: COLUMNS,
    height: 34,
    identity: (g) => g.group_id,
    open: (g) => {
      location.hash = hash("group", g.group_id);
    },
    href: (g) => hash("group", g.group_id),
  });
  const filter = el("input", {
    type: "search",
    id: "filter",
    placeholder: "Filter ( / )",
    "aria-label": "Filter by id, status or metadata",
    spellcheck: "false",
    oninput: () => narrow(),
  });
  const more = el("button", { type: "button", hidden: true, onclick: () => load(cursor).catch(fail) }, "Load older");
  const sum = el("span", { class: "sum", role: "status" });
  main.append(el("div", { class: "bar" }, el("h1", {}, "Groups"), filter, more, sum), table.element);

  function narrow() {
    const word = filter.value.toLowerCase();
    table.filter((g) => `${g.group_id} ${g.status} ${JSON.stringify(g.metadata)}`.toLowerCase().includes(word));
    showSum();
  }

  function showSum() {
    const older = cursor === null ? "" : "; older ones exist";
    sum.textContent = `${count(table.rows.length)} of ${count(groups.size)} loaded${states()}${older}`;
    more.hidden = cursor === null;
    table.showMessage(
      table.rows.length
        ? null
        : groups.size
          ? "No group matches the filter."
          : "No groups yet. POST /groups opens one.",
    );
  }

  /** Return how many of the loaded groups wait for a consumer, are claimed, or were dropped. */
  function states() {
    const all = [...groups.values()];
    return ["complete", "claimed", "dropped"]
      .map((state) => [state, all.filter((group) => group.status === state).length])
      .filter(([, number]) => number > 0)
      .map(([state, number]) => `, ${count(number)} ${state}`)
      .join("");
  }

  const sums = new Map(); // the totals of each group's rollouts
  const groupOf = new Map(); // by rollout
  let waiting = [];

  function refill() {
    const all = [...groups.values()].sort((a, b) => b.created_ms - a.created_ms);
    table.fill(all.map((group) => ({ ...group, sums: sums.get(group.group_id) })));
    showSum();
  }

  async function load(from) {
    const page = await json(["groups"], { limit: PAGE, cursor: from });
    if (from !== null || groups.size === 0) cursor = page.cursor;
    for (const group of page.groups) groups.set(group.group_id, group);
    waiting.push(...page.groups.map((group) => group.group_id).filter((name) => !sums.has(name)));
    refill();
    void add();
  }

  /** Request the totals of groups, CONCURRENCY at a time; a deleted group has none. */
  const add = gently(async () => {
    const names = new Set(waiting.splice(0, CONCURRENCY * 10));
    const requests = [...names].map((name) => async () => {
      const group = await json(["groups", name]).catch(() => null);
      if (group === null) return;
      sums.set(name, sumsOf(group));
      for (const rollout of group.rollouts) groupOf.set(rollout.rollout_id, name);
    });
    await Promise.all(
      Array.from({ length: CONCURRENCY }, async () => {
        for (let next = requests.shift(); next !== undefined && main.isConnected; next = requests.shift()) await next();
      }),
    );
    if (names.size) refill();
    if (waiting.length && main.isConnected) add();
  });

  const update = gently(() => load(null).catch(fail), 1000);
  update();
  const changed = (change) => {
    if (change === null) waiting = [...groups.keys()];
    else if (groupOf.has(change.rollout_id)) waiting.push(groupOf.get(change.rollout_id));
    update();
  };
  return { end: follow(null, changed, showState), table, filter };
}
