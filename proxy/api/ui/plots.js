// The plots of the pages: rewards by policy version; of calls, tokens per second and logprobs.

import { Chart, Histogram } from "./charts.js";
import { count, decimal, duration, line } from "./format.js";
import { html, useMemo } from "./html.js";

const WIDTH = 0.5; // as in the histogram of the tree
const BINS = 20;
const UNKNOWN = "unknown";

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

/** Show the speed of calls over time; `rows` are choices of calls. */
export function SpeedPlot({ rows }) {
  const marks = useMemo(() => {
    const calls = [...new Map(rows.map((row) => [row.step_id, row])).values()];
    const from = calls.reduce((least, call) => Math.min(least, call.started_ms), Infinity);
    return calls
      .filter((call) => speed(call) !== null)
      .map((call) => ({ x: (call.started_ms - from) / 1000, y: speed(call), label: paceOf(call) }));
  }, [rows]);
  return html`
    <${Chart} title="Completion tokens per second of each call" marks=${marks}
      axes=${{ x: "seconds since the first call was sent", y: "tokens/s" }} />`;
}

export const RolloutPlots = ({ tree, rows }) => html`
  <div class="plots"><${SpeedPlot} rows=${rows} /><${Histogram} ...${tree.logprobs} /></div>`;

/** Show rewards by policy version. `found`: `{version, epoch, reward, label}`, with the version null if it is unknown. */
export function RewardPlot({ found, axes }) {
  const { names, marks, means } = useMemo(() => byVersion(found), [found]);
  return html`
    <${Chart} title="Reward by policy version" marks=${marks} line=${means} names=${names} axes=${axes} isFromZero=${false} />`;
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
