// One group: its facts, its rollouts with their totals, and its live updates.

import { json } from "./api.js";
import { clock, decimal, hash, line, versionOf } from "./format.js";
import { Facts, html, Path, useKeys, useMemo } from "./html.js";
import { RolloutTable } from "./list.js";
import { SideBySide } from "./side_by_side.js";
import { useLoaded } from "./live.js";
import { driftOf, Status } from "./parts.js";

/** Show a group and its rollouts. */
export function Group({ name, shell }) {
  const isRelevant = ({ rollout_id: id }) => !group || group.rollouts.some((rollout) => rollout.rollout_id === id);
  const group = useLoaded(shell, () => json(["groups", name]), { follows: null, isRelevant });
  const rows = useMemo(() => group?.rollouts.map((rollout) => ({ ...rollout, counts: rollout })) ?? [], [group]);
  useKeys({ Escape: () => { location.hash = hash("groups"); } });
  return html`
    <${Path} links=${[[hash("groups"), "Groups"]]} />
    <div class="bar"><h1>${line(name)}</h1></div>
    ${group && html`<${Facts} of=${factsOf(group)} />`}
    <${RolloutTable} label="Rollouts of this group" rows=${rows} isOfGroup=${true} />
    ${group && html`<${SideBySide} members=${group.rollouts} shell=${shell} />`}`;
}

/** Return the totals of a group's rollouts. The reward is their mean; drift is null until it is counted for one. */
export function sumsOf(group) {
  const sum = (name) => group.rollouts.reduce((total, rollout) => total + rollout[name], 0);
  const counted = group.rollouts.filter((rollout) => rollout.drift !== null);
  return {
    reward: rewardOf(group).mean,
    steps: sum("steps"),
    sampled_tokens: sum("sampled_tokens"),
    exact: sum("exact"),
    flagged: sum("flagged"),
    drift: counted.length ? counted.reduce((total, rollout) => total + driftOf(rollout), 0) : null,
  };
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
    ["Status", html`<${Status} of=${group.status} />`],
    ["Finished", `${group.finished} of ${group.size ?? group.members}`],
    ["Reward", mean === null ? "none yet" : `mean ${decimal(mean)}, standard deviation ${decimal(deviation)}`],
    ["Policy version", line(versionOf(group) ?? "–")],
    ["Opened", clock(group.created_ms)],
    ["Metadata", line(JSON.stringify(group.metadata ?? {}), 400)],
  ];
}
