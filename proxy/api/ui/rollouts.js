// The list of rollouts: its filter and its live updates. A rollout that changes is requested individually.

import { ApiError, json } from "./api.js";
import { Filter, localOf, matches, metadataOf, parse, queryOf, useSettled } from "./filter.js";
import { count } from "./format.js";
import { html, useEffect, useMemo, useQuery, useRef, useState } from "./html.js";
import { RolloutTable, tookOf } from "./list.js";
import { follow, gently } from "./live.js";
import { driftOf } from "./parts.js";

const PAGE = 500;
const CONCURRENCY = 3; // trees
const MAX_INDIVIDUAL = 20; // changed rollouts requested individually; for more, the newest page is requested again
const STATUSES = ["open", "limited", "completed", "failed", "aborted", "truncated"];

/** Return the text in which words of the filter are searched. */
const words = ({ rollout_id: id, task, group_id: group, model, playback, metadata }) =>
  [id, task, group, model, playback?.of, JSON.stringify(metadata)].join(" ");

const INDEXED = {
  status: ["status", STATUSES], group: ["group_id"], policy: ["policy"], since: ["since"], until: ["until"], time: [],
};
const OF_TREES = ["version", "thread"]; // of the steps, which are read for rollouts that match the rest
const FIELDS = {
  status: (r) => r.status,
  group: (r) => r.group_id,
  policy: (r) => r.policy,
  since: (r) => r.created_ms / 1000,
  until: (r) => r.created_ms / 1000,
  time: () => null,
  reward: (r) => r.reward,
  task: (r) => r.task,
  model: (r) => r.model,
  metadata: metadataOf,
  id: (r) => r.rollout_id,
  steps: (r) => r.counts.steps,
  tokens: (r) => r.counts.sampled_tokens,
  exact: (r) => [r.counts.exact, r.counts.exact > 0 && r.counts.flagged === 0 ? "yes" : "no"],
  flagged: (r) => r.counts.flagged,
  failed: (r) => [r.counts.error, ...Object.keys(r.errors)],
  drift: (r) => (r.drift === null ? [] : [driftOf(r), ...Object.keys(r.drift)]),
  took: (r) => (tookOf(r) === null ? null : tookOf(r) / 1000),
  version: (r) => r.ofTree?.versions,
  thread: (r) => r.ofTree?.threads,
};
const STATUS = /(^|\s)status:(\S*)/i;
/** Return a filter with another status. */
const withStatus = (text, status) => `${text.replace(STATUS, "").trim()}${status && ` status:${status}`}`.trim();

export function Rollouts({ shell }) {
  const [list, setList] = useState({ all: [], cursor: null, isLoaded: false });
  const [{ q: text = "", sort = "" }, setQuery] = useQuery();
  const terms = useMemo(() => parse(text, FIELDS), [text]);
  const asked = useSettled(JSON.stringify(queryOf(terms, INDEXED)));
  const [isLoading, setLoading] = useState(false);
  const known = useRef(new Map());
  const { all, cursor, isLoaded } = list;

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
      const page = await json(["rollouts"], { limit: PAGE, cursor, ...JSON.parse(asked) });
      for (const rollout of of === known.current ? page.rollouts : [])
        if (!known.current.has(rollout.rollout_id)) known.current.set(rollout.rollout_id, rollout);
      if (of === known.current) show({ cursor: page.cursor }); // else the filter was changed meanwhile
    } catch (error) {
      shell.fail(error);
    }
    setLoading(false);
  }
  useEffect(() => {
    known.current = new Map();
    return following(known.current, JSON.parse(asked), show, shell);
  }, [asked]);

  const [rows, reading] = useMatching(all, terms, shell);
  const of = rows.length === all.length ? "" : `${count(rows.length)} of `;
  const rest = cursor === null ? "" : "; older ones exist";
  const where = cursor === null ? "" : localOf(terms, INDEXED);
  const steps = reading > 0 ? `; reading the steps of ${count(reading)}…` : "";
  const none = all.length || text
    ? "No rollout matches the filter."
    : "No rollouts yet. Rollouts appear here when an agent calls this proxy.";
  return html`
    <div class="bar">
      <h1>Rollouts</h1>
      <${Filter} label="Filter rollouts" value=${text} choose=${(q) => setQuery({ q })}
        fields=${FIELDS} indexed=${INDEXED} />
      <select aria-label="Status" value=${STATUS.exec(text)?.[2] ?? ""}
        onchange=${(event) => setQuery({ q: withStatus(text, event.target.value) })}>
        <option value="">any status</option>${STATUSES.map((word) => html`<option value=${word}>${word}</option>`)}
      </select>
      <button type="button" hidden=${cursor === null} disabled=${isLoading} onclick=${older}>Load older</button>
      <span class="sum" role="status">
        ${isLoaded ? `${of}${count(all.length)} loaded${rest}${where}${steps}` : "Loading…"}
      </span>
    </div>
    <${RolloutTable} label="Rollouts" rows=${rows} order=${[sort, (name) => setQuery({ sort: name })]}
      message=${isLoaded && rows.length === 0 && !steps ? none : null} />`;
}

const NOTHING = { versions: [], threads: [] };

/** Return the rollouts that match, and how many have steps to be read for that. */
function useMatching(all, terms, shell) {
  const trees = useRef(new Map()); // what is known of the steps of rollouts, by id
  const inFlight = useRef(new Set());
  const [read, setRead] = useState(0);
  const [quick, ofTrees] = useMemo(() => {
    const isQuick = ({ field }) => !OF_TREES.includes(field);
    return [terms.filter(isQuick), terms.filter((term) => !isQuick(term))];
  }, [terms]);
  const found = useMemo(() => all.filter((r) => matches(r, quick, FIELDS, words)), [all, quick]);
  const isRead = (r) => r.counts.steps === 0 || trees.current.get(r.rollout_id)?.at === r.touched_ms;
  const unread = ofTrees.length ? found.filter((r) => !isRead(r)) : [];
  useEffect(() => {
    const waiting = unread.filter((r) => !inFlight.current.has(r.rollout_id));
    for (const next of waiting.slice(0, CONCURRENCY - inFlight.current.size)) {
      inFlight.current.add(next.rollout_id);
      const done = (known) => {
        inFlight.current.delete(next.rollout_id);
        trees.current.set(next.rollout_id, { at: next.touched_ms, ...known });
        setRead((before) => before + 1);
      };
      readSteps(next).then(done, (error) => {
        done(NOTHING);
        shell.fail(error);
      });
    }
  }, [found, ofTrees, read]);
  const rows = useMemo(() => {
    if (ofTrees.length === 0) return found;
    const known = found.map((r) => ({ ...r, ofTree: r.counts.steps === 0 ? NOTHING : trees.current.get(r.rollout_id) }));
    return known.filter((r) => r.ofTree && matches(r, ofTrees, FIELDS, words));
  }, [found, ofTrees, read]);
  return [rows, unread.length];
}

/** Return the versions and the threads of a rollout's steps; none of one that was deleted. */
async function readSteps({ rollout_id: name }) {
  try {
    const { nodes, unplaced, threads } = await json(["rollouts", name, "tree"], { texts: "false" });
    const versions = new Set([...nodes, ...unplaced].map(({ policy_version: version }) => version));
    const known = [...versions].filter((version) => version !== null);
    return { versions: known, threads: threads.flatMap(({ name, kind, agent }) => [name, kind, agent ?? ""]) };
  } catch (error) {
    if (!(error instanceof ApiError && error.status === 404)) throw error;
    return NOTHING;
  }
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
