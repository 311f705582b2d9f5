// Groups: the list with their totals, and one group with its members.

import { json } from "./api.js";
import { comparison, MAX_COMPARED } from "./compare.js";
import { Filter, localOf, matches, metadataOf, parse, queryOf, useSettled } from "./filter.js";
import { clock, count, decimal, hash, line, versionOf } from "./format.js";
import { Facts, html, Path, useKeys, useMemo, useQuery, useState } from "./html.js";
import { RolloutTable } from "./list.js";
import { useLoaded } from "./live.js";
import { Ended, Fidelity, Since, Status } from "./parts.js";
import { Selection } from "./selection.js";
import { Table, useSelected } from "./table.js";

const PAGE = 200;
const NONE = { groups: [], cursor: null }; // the same at each rendering

const sizeOf = (g) => g.size ?? g.members;
const total = (key, title, name, from, shown = count) => ({
  key,
  title,
  from,
  cell: (g) => shown(g.totals?.[name]),
  sort: (g) => g.totals?.[name],
  first: "down",
});
const text = (value) => (value ? html`<span title=${line(value, 300)}>${line(value, 60)}</span>` : "–");

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
  total("reward", "Mean reward", "reward", undefined, decimal),
  total("steps", "Steps", "steps", "tablet"),
  total("tokens", "Tokens", "sampled_tokens", "tablet"),
  {
    key: "fidelity",
    title: "Exact / flagged",
    from: "tablet",
    cell: (g) => (g.totals ? html`<${Fidelity} exact=${g.totals.exact} flagged=${g.totals.flagged} />` : "–"),
    sort: (g) => g.totals?.flagged,
    first: "down",
  },
  total("drift", "Drift", "drift", "desk"),
  {
    key: "policy",
    title: "Version",
    from: "desk",
    cell: (g) => line(versionOf(g) ?? "–", 40),
    sort: (g) => g.policy_version,
  },
  { key: "held", title: "Consumer", from: "desk", cell: (g) => text(g.consumer), sort: (g) => g.consumer ?? null },
  { key: "why", title: "Dropped because", from: "desk", cell: (g) => text(g.why), sort: (g) => g.why ?? null },
  {
    key: "age",
    title: "Opened",
    from: "desk",
    cell: (g) => html`<${Since} ms=${g.created_ms} />`,
    sort: (g) => g.created_ms,
    first: "down",
  },
];

const words = (g) => `${g.group_id} ${g.status} ${JSON.stringify(g.metadata)}`;
const INDEXED = { status: ["status", ["open", "complete", "claimed", "done", "dropped"]], policy: ["policy"] };
const FIELDS = {
  status: (g) => g.status,
  policy: (g) => (g.policies ? Object.keys(g.policies) : "default"),
  since: (g) => g.created_ms / 1000,
  until: (g) => g.created_ms / 1000,
  time: () => null,
  id: (g) => g.group_id,
  reward: (g) => g.totals?.reward,
  version: (g) => g.policy_version,
  metadata: metadataOf,
  steps: (g) => g.totals?.steps,
  tokens: (g) => g.totals?.sampled_tokens,
  exact: (g) => g.totals && [g.totals.exact, g.totals.exact > 0 && g.totals.flagged === 0 ? "yes" : "no"],
  flagged: (g) => g.totals?.flagged,
  failed: (g) => g.totals?.error,
  drift: (g) => g.totals?.drift,
  consumer: (g) => g.consumer,
  dropped: (g) => g.code,
};

/** Read the newest pages of groups, with their totals. */
async function readGroups(pages, query) {
  const found = { groups: [], cursor: null };
  for (let page = 0; page < pages && (page === 0 || found.cursor !== null); page += 1) {
    const { groups, cursor } = await json(["groups"], { limit: PAGE, cursor: found.cursor, totals: true, ...query });
    found.groups.push(...groups);
    found.cursor = cursor;
  }
  return found;
}

export function Groups({ shell }) {
  const [pages, setPages] = useState(1);
  const [{ q: text = "", sort = "" }, setQuery] = useQuery();
  const selection = useSelected();
  const terms = useMemo(() => parse(text, FIELDS), [text]);
  const asked = useSettled(JSON.stringify(queryOf(terms, INDEXED)));
  const load = () => readGroups(pages, JSON.parse(asked));
  const found = useLoaded(shell, load, { follows: null, leastMs: 1000, of: `${pages} ${asked}` });
  const { groups: all, cursor } = found ?? NONE;
  const rows = useMemo(() => all.filter((g) => matches(g, terms, FIELDS, words)), [all, terms]);
  const none = all.length || text ? "No group matches the filter." : "No groups yet. POST /groups opens one.";
  const older = cursor === null ? "" : `; older ones exist${localOf(terms, INDEXED)}`;
  return html`
    <div class="bar">
      <h1>Groups</h1>
      <${Filter} label="Filter groups" value=${text} choose=${(q) => setQuery({ q })} fields=${FIELDS} indexed=${INDEXED} />
      <button type="button" hidden=${cursor === null} onclick=${() => setPages(pages + 1)}>Load older</button>
      <span class="sum" role="status">
        ${found ? `${count(rows.length)} of ${count(all.length)} loaded${states(all)}${older}` : "Loading…"}
      </span>
    </div>
    <${Selection} names=${[...selection.names]} of="groups" clear=${selection.clear} />
    <${Table} name="groups" label="Groups" columns=${COLUMNS} rows=${rows} selection=${selection}
      order=${[sort, (name) => setQuery({ sort: name })]} identity=${(g) => g.group_id}
      message=${found && rows.length === 0 ? none : null} href=${(g) => hash("group", g.group_id)}
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

/** Show a group and its rollouts. */
export function Group({ name, shell }) {
  const isRelevant = ({ rollout_id: id }) => !group || group.rollouts.some((rollout) => rollout.rollout_id === id);
  const group = useLoaded(shell, () => json(["groups", name]), { follows: null, isRelevant });
  const rows = useMemo(() => group?.rollouts.map((rollout) => ({ ...rollout, counts: rollout })) ?? [], [group]);
  const called = group?.rollouts.filter(({ steps }) => steps > 0).map(({ rollout_id: id }) => [id]) ?? [];
  useKeys({ Escape: () => { location.hash = hash("groups"); } });
  return html`
    <${Path} links=${[[hash("groups"), "Groups"]]} />
    <div class="bar">
      <h1>${line(name)}</h1>
      <a href=${`${hash("training")}?${new URLSearchParams({ at: hash("group", name) })}`}>In the charts of Training</a>
      ${called.length > 1 && html`
        <a href=${comparison(called.slice(0, MAX_COMPARED))}>Compare the replies of ${
          called.length > MAX_COMPARED ? `${MAX_COMPARED} of ` : ""}${count(called.length)} members</a>`}
    </div>
    ${group ? html`<${Facts} of=${factsOf(group)} />` : html`<p class="empty">Loading the group…</p>`}
    <${RolloutTable} label="Rollouts of this group" rows=${rows} isOfGroup=${true} />`;
}

/** Return the mean and the standard deviation of a group's rewards; null without rewards. */
function rewardOf(group) {
  const rewards = group.rewards.filter((reward) => reward !== null);
  if (rewards.length === 0) return { mean: null, deviation: null };
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
  const deviation = Math.sqrt(rewards.reduce((sum, reward) => sum + (reward - mean) ** 2, 0) / rewards.length);
  return { mean, deviation };
}

function factsOf(group) {
  const { mean, deviation } = rewardOf(group);
  return [
    ["Status", html`<${Status} of=${group.status} />${group.why && ` ${line(group.why, 300)}`}`],
    ...(group.consumer ? [["Consumer", line(group.consumer, 100)]] : []),
    ["Finished", `${group.finished} of ${group.size ?? group.members}`],
    ["Reward", mean === null ? "none yet" : `mean ${decimal(mean)}, standard deviation ${decimal(deviation)}`],
    ["Policy version", line(versionOf(group) ?? "–")],
    ["Opened", clock(group.created_ms)],
    ["Metadata", line(JSON.stringify(group.metadata ?? {}), 400)],
  ];
}
