// The list of rollouts: its columns, its filters and its live updates. A rollout that changes is requested individually.

import { ApiError, json } from "./api.js";
import { count, decimal, duration, hash, line } from "./format.js";
import { html, useEffect, useKeys, useMemo, useRef, useState } from "./html.js";
import { follow, gently } from "./live.js";
import { driftOf, Ended, Fidelity, Since, Status } from "./parts.js";
import { PlayedMark } from "./playback.js";
import { Table } from "./table.js";

const PAGE = 500;
const MAX_INDIVIDUAL = 20; // changed rollouts requested individually; for more, the newest page is requested again
const STATUSES = ["open", "limited", "completed", "failed", "aborted", "truncated"];

const driftKinds = (rollout) =>
  Object.entries(rollout.drift ?? {})
    .map(([kind, n]) => `${kind}: ${n}`)
    .join(", ");

const drift = (r) => html`
  <span title=${driftKinds(r) || (r.drift ? "none" : "counted when the rollout finishes")}>${count(driftOf(r))}</span>`;

const number = (key, title, value) => ({ key, title, cell: (r) => count(value(r)), sort: value, first: "down" });

const task = (r) => (r.task === null ? "–" : line(r.task, 120));

/** Show the number of failed calls, and their HTTP statuses. */
function failed({ counts, errors }) {
  if (!counts.error) return counts.error === 0 ? "0" : "–";
  const statuses = Object.entries(errors).map(([status, n]) => `${n} × ${line(status, 3)}`);
  return html`
    <span class="flagged" title=${statuses.join(", ") || "no response"}>
      ${count(counts.error)}${statuses.length > 0 && ` (${Object.keys(errors).map((status) => line(status, 3)).join(", ")})`}
    </span>`;
}

/** Return the time from the first call of a rollout to its end, or to its last change. */
const tookOf = (r) => (r.began_ms === null ? null : Math.max(0, (r.finished_ms ?? r.touched_ms) - r.began_ms));

/** Show the ID of a rollout, with a mark if it is a playback. */
function named({ rollout_id: id, playback }) {
  if (!playback) return html`<${Ended} text=${id} />`;
  return html`<span class="played"><${PlayedMark} of=${playback} /><${Ended} text=${id} /></span>`;
}

const COLUMNS = [
  { key: "id", title: "Rollout", cell: named, sort: (r) => r.rollout_id },
  { key: "task", title: "Task", cell: (r) => html`<span title=${task(r)}>${task(r)}</span>`, sort: (r) => r.task },
  { key: "status", title: "Status", cell: (r) => html`<${Status} of=${r.status} />`, sort: (r) => r.status },
  { key: "reward", title: "Reward", cell: (r) => decimal(r.reward), sort: (r) => r.reward, first: "down" },
  number("steps", "Steps", (r) => r.counts.steps),
  { key: "failed", title: "Failed", cell: failed, sort: (r) => r.counts.error, first: "down" },
  number("tokens", "Tokens", (r) => r.counts.sampled_tokens),
  {
    key: "fidelity",
    title: "Exact / flagged",
    cell: ({ counts: { exact, flagged } }) => html`<${Fidelity} exact=${exact} flagged=${flagged} />`,
    sort: (r) => r.counts.flagged,
    first: "down",
  },
  { key: "drift", title: "Drift", cell: drift, sort: driftOf, first: "down" },
  { key: "took", title: "Took", cell: (r) => duration(tookOf(r)), sort: tookOf, first: "down" },
  {
    key: "group",
    title: "Group",
    cell: (r) => (r.group_id === null ? "–" : line(r.group_id, 60)),
    sort: (r) => r.group_id,
  },
  {
    key: "age",
    title: "Changed",
    cell: (r) => html`<${Since} ms=${r.touched_ms} />`,
    sort: (r) => r.touched_ms,
    first: "down",
  },
];
const OF_MEMBERS = COLUMNS.filter(({ key }) => !["group", "age"].includes(key)); // equal for all members, or unknown

/** Show a table of rollouts: all, or the members of a group. */
export const RolloutTable = ({ label, rows, message, isOfGroup = false }) => html`
  <${Table} name=${isOfGroup ? "members" : "rollouts"} label=${label} columns=${isOfGroup ? OF_MEMBERS : COLUMNS}
    rows=${rows} message=${message} identity=${(r) => r.rollout_id} href=${(r) => hash("rollout", r.rollout_id)}
    open=${(r) => { location.hash = hash("rollout", r.rollout_id); }} />`;

/** Show the field that filters a list; `/` focuses it. */
export function Filter({ label, value, choose }) {
  const field = useRef(null);
  useKeys({ "/": () => field.current.focus() });
  return html`<input type="search" id="filter" placeholder="Filter ( / )" aria-label=${label} spellcheck="false"
    ref=${field} value=${value} oninput=${(event) => choose(event.target.value)} />`;
}

/** Return the text that the filter searches. */
function searched({ rollout_id: id, task, group_id: group, model, playback, metadata }) {
  return [id, task, group, model, playback?.of, JSON.stringify(metadata)].join(" ").toLowerCase();
}

export function Rollouts({ shell }) {
  const [list, setList] = useState({ all: [], cursor: null, isLoaded: false });
  const [text, setText] = useState("");
  const [status, setStatus] = useState("");
  const [isLoading, setLoading] = useState(false);
  const known = useRef(new Map());
  const { all, cursor, isLoaded } = list;
  const filter = status ? { status } : {};

  const show = (change) =>
    setList((before) => ({
      ...before,
      ...change,
      isLoaded: true,
      all: [...known.current.values()].sort((a, b) => b.created_ms - a.created_ms),
    }));

  async function older() {
    setLoading(true);
    try {
      const of = known.current;
      const page = await json(["rollouts"], { limit: PAGE, cursor, ...filter });
      for (const rollout of of === known.current ? page.rollouts : [])
        if (!known.current.has(rollout.rollout_id)) known.current.set(rollout.rollout_id, rollout);
      if (of === known.current) show({ cursor: page.cursor }); // else the status was changed meanwhile
    } catch (error) {
      shell.fail(error);
    }
    setLoading(false);
  }
  useEffect(() => {
    known.current = new Map();
    return following(known.current, filter, show, shell);
  }, [status]);

  const rows = useMemo(() => {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    return all.filter((r) => (!status || r.status === status) && words.every((word) => searched(r).includes(word)));
  }, [all, text, status]);
  const of = rows.length === all.length ? "" : `${count(rows.length)} of `;
  const rest = cursor === null ? "" : "; older ones exist";
  const none = all.length
    ? "No rollout matches the filter."
    : "No rollouts yet. Rollouts appear here when an agent calls this proxy.";
  return html`
    <div class="bar">
      <h1>Rollouts</h1>
      <${Filter} label="Filter by id, task, group, model, source or metadata" value=${text} choose=${setText} />
      <select aria-label="Status" value=${status} onchange=${(event) => setStatus(event.target.value)}>
        <option value="">any status</option>${STATUSES.map((word) => html`<option value=${word}>${word}</option>`)}
      </select>
      <button type="button" hidden=${cursor === null} disabled=${isLoading} onclick=${older}>Load older</button>
      <span class="sum" role="status">${isLoaded && `${of}${count(all.length)} loaded${rest}`}</span>
    </div>
    <${RolloutTable} label="Rollouts" rows=${rows} message=${isLoaded && rows.length === 0 ? none : null} />`;
}

/**
 * Keep the newest rollouts that match the filter of the route in `known` current, and `show` them after each change. Return the
 * function that ends it.
 */
function following(known, filter, show, shell) {
  let isOver = false;
  let isFirst = true;
  let [changes, isLost] = [new Set(), true];

  async function newest() {
    const page = await json(["rollouts"], { limit: PAGE, ...filter });
    const oldest = page.cursor === null ? 0 : Math.min(...page.rollouts.map((rollout) => rollout.created_ms));
    const listed = new Set(page.rollouts.map((rollout) => rollout.rollout_id));
    for (const { rollout_id: name, created_ms: created } of known.values())
      if (created > oldest && !listed.has(name)) known.delete(name); // deleted meanwhile
    for (const rollout of page.rollouts) known.set(rollout.rollout_id, rollout);
    const cursor = isFirst ? { cursor: page.cursor } : {};
    isFirst = false;
    return cursor;
  }
  async function reload(name) {
    try {
      known.set(name, await json(["rollouts", name]));
    } catch (error) {
      if (!(error instanceof ApiError && error.status === 404)) throw error;
      known.delete(name);
    }
  }
  const update = gently(async () => {
    const names = changes;
    const isAll = isLost || names.size > MAX_INDIVIDUAL;
    [changes, isLost] = [new Set(), false];
    try {
      const cursor = isAll ? await newest() : {};
      await Promise.all([...names].slice(0, MAX_INDIVIDUAL).map(reload));
      if (!isOver) show(cursor);
    } catch (error) {
      if (!isOver) shell.fail(error);
    }
  });
  update();
  const changed = (change) => {
    if (change === null) isLost = true;
    else changes.add(change.rollout_id);
    update();
  };
  const end = follow(null, changed, shell.showState);
  return () => {
    isOver = true;
    end();
  };
}
