// Plots over the newest rollouts: reward by policy version, tokens per second, logprobs. They are redrawn as trees arrive.

import { json } from "./api.js";
import { histogram, pointPlot } from "./charts.js";
import { count, decimal, el, keep, kept, line, put } from "./dom.js";
import { callsOf, speedPlot } from "./plots.js";

const CONCURRENCY = 3;
const CHOICES = ["50", "100", "300", "1000"];
const DRAW_INTERVAL_MS = 500;
const UNKNOWN = "unknown";

export function show(main, { fail }) {
  let isEnded = false;
  const sum = el("span", { class: "sum", role: "status" });
  const place = el("div", { class: "plots" });
  const how = el(
    "select",
    {
      "aria-label": "How many rollouts",
      onchange: () => {
        keep("tokentape.plots", how.value);
        void load();
      },
    },
    CHOICES.map((number) =>
      el("option", { value: number, selected: number === (kept("tokentape.plots") ?? "100") }, `newest ${number}`),
    ),
  );
  main.append(
    el(
      "div",
      { class: "bar" },
      el("h1", {}, "Plots"),
      how,
      el("button", { type: "button", onclick: () => load() }, "Reload"),
      sum,
    ),
    place,
  );
  let run = 0;
  void load();
  return {
    end() {
      isEnded = true;
    },
  };

  async function load() {
    const own = ++run;
    const isOver = () => isEnded || own !== run;
    const found = [];
    let drawn = 0;
    try {
      const { rollouts } = await json(["rollouts"], { limit: how.value });
      const waiting = rollouts.filter((rollout) => rollout.counts.steps > 0);
      const total = waiting.length;
      const draw = (isLast) => {
        if (isOver() || (!isLast && performance.now() - drawn < DRAW_INTERVAL_MS)) return;
        drawn = performance.now();
        sum.textContent = `${count(found.length)} of ${count(total)} rollouts with steps`;
        put(place, plots(found));
      };
      const readTrees = async () => {
        for (let next = waiting.shift(); next !== undefined && !isOver(); next = waiting.shift()) {
          const tree = await json(["rollouts", next.rollout_id, "tree"], { texts: "false" }).catch(gone);
          if (tree) found.push({ rollout: next, tree });
          draw(false);
        }
      };
      await Promise.all(Array.from({ length: CONCURRENCY }, readTrees));
      draw(true);
    } catch (error) {
      if (!isOver()) fail(error);
    }
  }
}

/** Return null for a rollout that was deleted meanwhile. */
function gone(error) {
  if (error.status === 404) return null;
  throw error;
}

function plots(found) {
  const calls = found.flatMap(({ tree }) => callsOf([...tree.nodes, ...tree.unplaced]));
  const from = calls.reduce((least, call) => Math.min(least, call.started_ms), Infinity);
  const counts = found.reduce(
    (sums, { tree }) => sums.map((sum, at) => sum + tree.logprobs.counts[at]),
    new Array(21).fill(0),
  );
  return [rewards(found), speedPlot(calls, from), histogram({ width: 0.5, counts })];
}

/** Plot rewards by the policy version of each rollout's first reply, with their means. */
function rewards(found) {
  const rewarded = found
    .filter(({ rollout }) => rollout.reward !== null)
    .map(({ rollout, tree }) => ({ rollout, version: tree.nodes[0]?.policy_version ?? UNKNOWN }));
  const names = [...new Set(rewarded.map(({ version }) => version))].sort(byNumber);
  const points = rewarded.map(({ rollout, version }, at) => ({
    x: names.indexOf(version) + (((at * 0.618) % 1) - 0.5) * 0.4, // spread out, at the same place after each redraw
    y: rollout.reward,
    label: `${line(rollout.rollout_id, 60)}: reward ${decimal(rollout.reward)} at version ${line(version, 40)}`,
  }));
  const means = names
    .filter((name) => name !== UNKNOWN)
    .map((name) => {
      const x = names.indexOf(name);
      const own = rewarded.filter(({ version }) => version === name).map(({ rollout }) => rollout.reward);
      return { x, y: own.reduce((sum, reward) => sum + reward, 0) / own.length };
    });
  return pointPlot(
    "Reward by policy version",
    { x: "policy version of the first reply (line: means)", y: "reward" },
    points,
    { names: names.map((name) => line(name, 12)), means },
  );
}

function byNumber(one, other) {
  const [a, b] = [Number(one), Number(other)];
  return Number.isNaN(a) || Number.isNaN(b) ? one.localeCompare(other) : a - b;
}
