// Plots: rewards by policy version, tokens per second, logprobs; of a rollout, and of the newest ones, as their trees arrive.

import { json } from "./api.js";
import { Chart, Histogram } from "./charts.js";
import { count, decimal, duration, hash, keep, kept, line, versionOf } from "./format.js";
import { html, useEffect, useMemo, useState } from "./html.js";

const WIDTH = 0.5; // as in the histogram of the tree
const BINS = 20;
const UNKNOWN = "unknown";
const CONCURRENCY = 3;
const CHOICES = ["50", "100", "300", "1000"];
const DRAW_INTERVAL_MS = 500;


/** Count logprobs in the bins of the tree's histogram. */
export function logprobCounts(lists) {
  const counts = new Array(BINS + 1).fill(0);
  for (const list of lists) {
    for (const value of list) {
      if (value !== null) counts[Math.min(BINS, Math.floor(Math.max(-value, 0) / WIDTH))] += 1;
    }
  }
  return { width: WIDTH, counts };
}

/** Return the completion tokens per second of a call, from the request to the last byte; null if none were sampled. */
export function speed(row) {
  return row.ended_ms > row.started_ms && row.sampled > 0 && !row.inherited
    ? (1000 * row.sampled) / (row.ended_ms - row.started_ms)
    : null;
}

function paceOf(call) {
  const took = duration(call.ended_ms - call.started_ms);
  return `${line(call.step_id, 40)}: ${decimal(speed(call), 1)} tokens/s (${count(call.sampled)} tokens in ${took})`;
}

/** Show the speed of calls over time; `rows` are choices of calls, with the rollout of each or of all. */
export function SpeedPlot({ rows, rolloutId }) {
  const linkOf = (call) => hash("rollout", call.rollout_id ?? rolloutId, "step", call.step_id);
  const marks = useMemo(() => {
    const calls = [...new Map(rows.map((row) => [row.step_id, row])).values()];
    const from = calls.reduce((least, call) => Math.min(least, call.started_ms), Infinity);
    return calls
      .filter((call) => speed(call) !== null)
      .map((call) => ({ x: (call.started_ms - from) / 1000, y: speed(call), label: paceOf(call), href: linkOf(call) }));
  }, [rows]);
  return html`
    <${Chart} title="Completion tokens per second of each call" marks=${marks}
      axes=${{ x: "seconds since the first call was sent", y: "tokens/s" }} />`;
}

export const RolloutPlots = ({ tree, rows }) => html`
  <div class="plots"><${SpeedPlot} rows=${rows} rolloutId=${tree.rollout_id} /><${Histogram} ...${tree.logprobs} /></div>`;

/** Show rewards by policy version. `found`: `{version, epoch, reward, label, href}`, with the version null if it is unknown. */
export function RewardPlot({ found, axes, empty }) {
  const { names, marks, means } = useMemo(() => byVersion(found), [found]);
  return html`
    <${Chart} title="Reward by policy version" marks=${marks} line=${means} names=${names} axes=${axes} isFromZero=${false}
      empty=${empty} />`;
}

const nameOf = ({ version, epoch }) => (epoch && version !== null ? `${epoch}:${version}` : version); // of a later epoch: 1:104
const inOrder = (one, other) => (one.epoch ?? 0) - (other.epoch ?? 0) || byNumber(one.version, other.version);

/** Return the names of the versions in order, the marks, and the means of the line, which ends before unknown versions. */
export function byVersion(found) {
  const sorted = found.filter(({ version }) => version !== null).sort(inOrder);
  const known = [...new Set(sorted.map(nameOf))];
  const versions = found.some(({ version }) => version === null) ? [...known, null] : known;
  const marks = found.map((one, at) => ({
    x: versions.indexOf(nameOf(one)) + (((at * 0.618) % 1) - 0.5) * 0.4, // spread out, at the same place after each redraw
    y: one.reward,
    label: `${one.label} at version ${line(nameOf(one) ?? UNKNOWN, 40)}`,
    href: one.href,
  }));
  const means = known.map((name, x) => {
    const own = found.filter((one) => nameOf(one) === name).map(({ reward }) => reward);
    return { x, y: own.reduce((sum, reward) => sum + reward, 0) / own.length };
  });
  return { names: versions.map((name) => line(name ?? UNKNOWN, 12)), marks, means };
}

function byNumber(one, other) {
  const [a, b] = [Number(one), Number(other)];
  return Number.isNaN(a) || Number.isNaN(b) ? one.localeCompare(other, undefined, { numeric: true }) : a - b;
}

export function Plots({ shell }) {
  const [limit, setLimit] = useState(CHOICES.find((number) => number === kept("tokentape.plots")) ?? "100");
  const [run, setRun] = useState(0);
  const [{ found, total }, setFound] = useState({ found: [], total: null });
  useEffect(() => {
    const stopped = new AbortController();
    readTrees(limit, setFound, stopped.signal).catch((error) => !stopped.signal.aborted && shell.fail(error));
    return () => stopped.abort();
  }, [limit, run]);
  const choose = ({ target: { value } }) => {
    keep("tokentape.plots", value);
    setLimit(value);
  };
  const rows = useMemo(() => found.flatMap(rowsOf), [found]);
  const counts = useMemo(
    () => found.reduce((sums, { tree }) => sums.map((sum, at) => sum + tree.logprobs.counts[at]), new Array(21).fill(0)),
    [found],
  );
  return html`
    <div class="bar">
      <h1>Plots</h1>
      <select aria-label="How many rollouts" value=${limit} onchange=${choose}>
        ${CHOICES.map((number) => html`<option value=${number}>newest ${number}</option>`)}
      </select>
      <button type="button" onclick=${() => setRun(run + 1)}>Reload</button>
      <span class="sum" role="status">
        ${total !== null && `${count(found.length)} of ${count(total)} rollouts with steps`}
      </span>
    </div>
    <div class="plots">
      <${Rewards} found=${found} /><${SpeedPlot} rows=${rows} /><${Histogram} width=${0.5} counts=${counts} />
    </div>`;
}

/** Return the calls of a tree, with the rollout of each. */
const rowsOf = ({ tree: { rollout_id, nodes, unplaced } }) => [...nodes, ...unplaced].map((row) => ({ ...row, rollout_id }));

/** Read the trees of the newest rollouts, CONCURRENCY at a time, and pass what was read so far to `show`. */
async function readTrees(limit, show, signal) {
  const { rollouts } = await json(["rollouts"], { limit }, { signal });
  const waiting = rollouts.filter((rollout) => rollout.counts.steps > 0);
  const total = waiting.length;
  const found = [];
  let drawn = 0;
  const read = async () => {
    for (let next = waiting.shift(); next !== undefined; next = waiting.shift()) {
      const tree = await json(["rollouts", next.rollout_id, "tree"], { texts: "false" }, { signal }).catch(gone);
      if (tree) found.push({ rollout: next, tree });
      if (performance.now() - drawn < DRAW_INTERVAL_MS) continue;
      drawn = performance.now();
      show({ found: [...found], total });
    }
  };
  await Promise.all(Array.from({ length: CONCURRENCY }, read));
  show({ found, total });
}

/** Return null for a rollout that was deleted meanwhile. */
function gone(error) {
  if (error.status === 404) return null;
  throw error;
}

/** Show rewards by the policy version of each rollout's first reply, with their means. */
function Rewards({ found }) {
  const rewarded = useMemo(() => found.filter(({ rollout }) => rollout.reward !== null).map(rewardOf), [found]);
  return html`
    <${RewardPlot} found=${rewarded} axes=${{ x: "policy version of the first reply (line: means)", y: "reward" }} />`;
}

function rewardOf({ rollout: { rollout_id: id, reward }, tree }) {
  const first = tree.nodes.find((node) => !node.inherited);
  const label = `${line(id, 60)}: reward ${decimal(reward)}`;
  return { version: first ? versionOf(first) : null, reward, label, href: hash("rollout", id) };
}
