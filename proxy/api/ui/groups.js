// The list of groups: its columns and its live updates.
//
// The API returns the rollouts of one group at a time: the totals of each group are requested after the list, and again when
// one of its rollouts changes.

import { json } from "./api.js";
import { count, decimal, hash, line, versionOf } from "./format.js";
import { sumsOf } from "./group.js";
import { html, useEffect, useMemo, useRef, useState } from "./html.js";
import { Filter } from "./list.js";
import { follow, gently } from "./live.js";
import { Ended, Fidelity, Since, Status } from "./parts.js";
import { Table } from "./table.js";

const PAGE = 500;
const CONCURRENCY = 3;

const sizeOf = (g) => g.size ?? g.members;
const sum = (key, title, name) => ({
  key,
  title,
  cell: (g) => count(g.sums?.[name]),
  sort: (g) => g.sums?.[name],
  first: "down",
});

const COLUMNS = [
  { key: "id", title: "Group", cell: (g) => html`<${Ended} text=${g.group_id} />`, sort: (g) => g.group_id },
  { key: "status", title: "Status", cell: (g) => html`<${Status} of=${g.status} />`, sort: (g) => g.status },
  {
    key: "finished",
    title: "Finished",
    sort: (g) => g.finished / Math.max(1, sizeOf(g)),
    first: "down",
    cell: (g) => html`
      <progress max=${Math.max(1, sizeOf(g))} value=${g.finished} aria-hidden="true" /> ${g.finished} of ${sizeOf(g)}`,
  },
  {
    key: "reward",
    title: "Mean reward",
    cell: (g) => decimal(g.sums?.reward),
    sort: (g) => g.sums?.reward,
    first: "down",
  },
  sum("steps", "Steps", "steps"),
  sum("tokens", "Tokens", "sampled_tokens"),
  {
    key: "fidelity",
    title: "Exact / flagged",
    cell: (g) => (g.sums ? html`<${Fidelity} exact=${g.sums.exact} flagged=${g.sums.flagged} />` : "–"),
    sort: (g) => g.sums?.flagged,
    first: "down",
  },
  sum("drift", "Drift", "drift"),
  {
    key: "policy",
    title: "Version",
    cell: (g) => line(versionOf(g) ?? "–", 40),
    sort: (g) => g.policy_version,
  },
  { key: "held", title: "Consumer", cell: (g) => line(g.consumer ?? g.why ?? "–", 60), sort: (g) => g.consumer ?? null },
  {
    key: "age",
    title: "Opened",
    cell: (g) => html`<${Since} ms=${g.created_ms} />`,
    sort: (g) => g.created_ms,
    first: "down",
  },
];

const searched = (g) => `${g.group_id} ${g.status} ${JSON.stringify(g.metadata)}`.toLowerCase();

export function Groups({ shell }) {
  const [{ all, cursor, isLoaded }, setList] = useState({ all: [], cursor: null, isLoaded: false });
  const [text, setText] = useState("");
  const loader = useRef(null);
  useEffect(() => {
    loader.current = following(setList, shell);
    return loader.current.end;
  }, []);
  const rows = useMemo(() => all.filter((g) => searched(g).includes(text.toLowerCase())), [all, text]);
  const none = all.length ? "No group matches the filter." : "No groups yet. POST /groups opens one.";
  const older = cursor === null ? "" : "; older ones exist";
  return html`
    <div class="bar">
      <h1>Groups</h1>
      <${Filter} label="Filter by id, status or metadata" value=${text} choose=${setText} />
      <button type="button" hidden=${cursor === null} onclick=${() => loader.current.load(cursor)}>Load older</button>
      <span class="sum" role="status">
        ${isLoaded && `${count(rows.length)} of ${count(all.length)} loaded${states(all)}${older}`}
      </span>
    </div>
    <${Table} name="groups" label="Groups" columns=${COLUMNS} rows=${rows} identity=${(g) => g.group_id}
      message=${isLoaded && rows.length === 0 ? none : null} href=${(g) => hash("group", g.group_id)}
      open=${(g) => { location.hash = hash("group", g.group_id); }} />`;
}

/** Return how many groups wait for a consumer, are claimed, or were dropped. */
function states(all) {
  return ["complete", "claimed", "dropped"]
    .map((state) => [state, all.filter((group) => group.status === state).length])
    .filter(([, number]) => number > 0)
    .map(([state, number]) => `, ${count(number)} ${state}`)
    .join("");
}

/** Keep a list of groups and their totals current. Return `load`, which loads a page, and `end`. */
function following(setList, shell) {
  const groups = new Map();
  const sums = new Map(); // the totals of each group's rollouts
  const groupOf = new Map(); // by rollout
  let cursor = null;
  let isOver = false;
  let waiting = [];

  function show() {
    const all = [...groups.values()].sort((a, b) => b.created_ms - a.created_ms);
    if (!isOver) setList({ all: all.map((g) => ({ ...g, sums: sums.get(g.group_id) })), cursor, isLoaded: true });
  }
  async function load(from) {
    try {
      const page = await json(["groups"], { limit: PAGE, cursor: from });
      if (from !== null || groups.size === 0) cursor = page.cursor;
      for (const group of page.groups) groups.set(group.group_id, group);
      waiting.push(...page.groups.map((group) => group.group_id).filter((name) => !sums.has(name)));
      show();
      void add();
    } catch (error) {
      if (!isOver) shell.fail(error);
    }
  }
  /** Request the totals of groups, CONCURRENCY at a time; a deleted group has none. */
  const add = gently(async () => {
    const names = [...new Set(waiting.splice(0, CONCURRENCY * 10))];
    const isAny = names.length > 0;
    const request = async () => {
      for (let name = names.shift(); name !== undefined && !isOver; name = names.shift()) {
        const group = await json(["groups", name]).catch(() => null);
        if (group === null) continue;
        sums.set(name, sumsOf(group));
        for (const rollout of group.rollouts) groupOf.set(rollout.rollout_id, name);
      }
    };
    await Promise.all(Array.from({ length: CONCURRENCY }, request));
    if (isAny) show();
    if (waiting.length && !isOver) add();
  });
  const update = gently(() => load(null), 1000);
  update();
  const changed = (change) => {
    if (change === null) waiting = [...groups.keys()];
    else if (groupOf.has(change.rollout_id)) waiting.push(groupOf.get(change.rollout_id));
    update();
  };
  const unfollow = follow(null, changed, shell.showState);
  const end = () => {
    isOver = true;
    unfollow();
  };
  return { load, end };
}
