// Plots over the newest rollouts: reward by policy version, tokens per second, logprobs. They are redrawn as trees arrive.

import { json } from "./api.js";
import { Histogram } from "./charts.js";
import { count, decimal, keep, kept, line, versionOf } from "./format.js";
import { html, useEffect, useMemo, useState } from "./html.js";
import { RewardPlot, SpeedPlot } from "./plots.js";

const CONCURRENCY = 3;
const CHOICES = ["50", "100", "300", "1000"];
const DRAW_INTERVAL_MS = 500;

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
  const rows = useMemo(() => found.flatMap(({ tree }) => [...tree.nodes, ...tree.unplaced]), [found]);
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
  return { version: first ? versionOf(first) : null, reward, label: `${line(id, 60)}: reward ${decimal(reward)}` };
}
