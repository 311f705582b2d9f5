// The plots of one rollout: tokens per second, and logprobs.

import { histogram, pointPlot } from "./charts.js";
import { count, decimal, duration, el, line } from "./dom.js";

const WIDTH = 0.5; // as in the histogram of the tree
const BINS = 20;

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

/** Return the completion tokens per second of a call, from the request to the last byte; null if they are unknown. */
export function speed(row) {
  return row.ended_ms > row.started_ms && row.sampled > 0
    ? (1000 * row.sampled) / (row.ended_ms - row.started_ms)
    : null;
}

/** Return each call once, from rows of choices. */
export function callsOf(rows) {
  return [...new Map(rows.map((row) => [row.step_id, row])).values()];
}

function paceOf(call) {
  const took = duration(call.ended_ms - call.started_ms);
  return `${line(call.step_id, 40)}: ${decimal(speed(call), 1)} tokens/s (${count(call.sampled)} tokens in ${took})`;
}

export function speedPlot(calls, from) {
  const points = calls
    .filter((call) => speed(call) !== null)
    .map((call) => ({
      x: (call.started_ms - from) / 1000,
      y: speed(call),
      label: paceOf(call),
    }));
  return pointPlot(
    "Completion tokens per second of each call",
    { x: "seconds since the first call was sent", y: "tokens/s" },
    points,
  );
}

export function rolloutPlots(tree, rows) {
  const calls = callsOf(rows);
  const from = calls.reduce((least, call) => Math.min(least, call.started_ms), Infinity);
  return el("div", { class: "plots" }, speedPlot(calls, from), histogram(tree.logprobs));
}
