// The list of rollouts.
//
// Holds its columns, its filters, and how it follows what happens: a rollout that changed is asked for by itself.

import { ApiError, json } from "./api.js";
import { count, decimal, el, ended, hash, line, since } from "./dom.js";
import { follow, gently } from "./live.js";
import { Table } from "./table.js";

const PAGE = 500;
const AT_ONCE = 20; // changed rollouts asked for by themselves; more of them: the newest page again
const STATUSES = ["open", "limited", "completed", "failed", "aborted", "truncated"];

export const status = (word) => el("span", { class: `status s-${word}` }, line(String(word), 20));

export const driftOf = (rollout) =>
  rollout.drift ? Object.values(rollout.drift).reduce((sum, one) => sum + one, 0) : null;

const driftKinds = (rollout) =>
  Object.entries(rollout.drift ?? {})
    .map(([kind, n]) => `${kind}: ${n}`)
    .join(", ");

/** Exact and flagged steps, in words and as a share. */
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
        { title: driftKinds(r) || (r.drift ? "none" : "counted when the rollout is finished") },
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

/** A table of rollouts; of a group, which tells less of each, without what is the same or not told. */
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

/** What a word of the filter is sought in. */
const searched = (r) =>
  `${r.rollout_id} ${r.group_id ?? ""} ${r.model ?? ""} ${JSON.stringify(r.metadata)}`.toLowerCase();

export function show(main, { fail, told }) {
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
      (r) => (!word || r.status === word) && (words.length === 0 || words.every((one) => searched(r).includes(one))),
    );
    tell();
  }

  function tell() {
    const of = table.rows.length === rollouts.size ? "" : `${count(table.rows.length)} of `;
    sum.textContent = `${of}${count(rollouts.size)} loaded${cursor === null ? "" : "; there are older ones"}`;
    more.hidden = cursor === null;
    table.say(
      table.rows.length
        ? null
        : rollouts.size
          ? "No rollout is like this."
          : "No rollout is recorded yet. Point an agent at this proxy, and it appears here.",
    );
  }

  function refill() {
    table.fill([...rollouts.values()].sort((a, b) => b.created_ms - a.created_ms));
    tell();
  }

  async function newest() {
    const page = await json(["rollouts"], { limit: PAGE });
    if (rollouts.size === 0) cursor = page.cursor;
    const oldest = page.cursor === null ? 0 : Math.min(...page.rollouts.map((one) => one.created_ms));
    const there = new Set(page.rollouts.map((one) => one.rollout_id));
    for (const one of rollouts.values()) {
      if (one.created_ms > oldest && !there.has(one.rollout_id)) rollouts.delete(one.rollout_id); // deleted meanwhile
    }
    for (const one of page.rollouts) rollouts.set(one.rollout_id, one);
    refill();
  }

  async function older() {
    more.disabled = true;
    try {
      const page = await json(["rollouts"], { limit: PAGE, cursor });
      cursor = page.cursor;
      for (const one of page.rollouts) if (!rollouts.has(one.rollout_id)) rollouts.set(one.rollout_id, one);
      refill();
    } catch (error) {
      fail(error);
    } finally {
      more.disabled = false;
    }
  }

  async function again(name) {
    try {
      rollouts.set(name, await json(["rollouts", name]));
    } catch (error) {
      if (error instanceof ApiError && error.status === 404) rollouts.delete(name);
      else throw error;
    }
  }

  let changes = new Set();
  let lost = true;
  const look = gently(async () => {
    const names = changes;
    const isLost = lost || names.size > AT_ONCE;
    [changes, lost] = [new Set(), false];
    try {
      if (isLost) await newest();
      await Promise.all([...names].slice(0, AT_ONCE).map(again));
      refill();
    } catch (error) {
      fail(error);
    }
  });
  look();
  const end = follow(
    null,
    (change) => {
      if (change === null) lost = true;
      else changes.add(change.rollout_id);
      look();
    },
    told,
  );
  return { end, table, filter };
}
