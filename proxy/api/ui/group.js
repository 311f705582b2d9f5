// One group: its facts, its rollouts with their totals, and its live updates.

import { json } from "./api.js";
import { clock, decimal, el, hash, line, put } from "./dom.js";
import { driftOf, rolloutTable, status } from "./list.js";
import { follow, gently } from "./live.js";

/** Show a group and its rollouts. */
export function show(main, name, { fail, showState }) {
  const facts = el("dl", { class: "facts" });
  const table = rolloutTable("Rollouts of this group", true);
  main.append(
    el("p", { class: "path" }, el("a", { href: "#/groups" }, "Groups"), " / "),
    el("div", { class: "bar" }, el("h1", {}, line(name))),
    facts,
    table.element,
  );
  const members = new Set();
  const update = gently(async () => {
    try {
      const group = await json(["groups", name]);
      for (const rollout of group.rollouts) members.add(rollout.rollout_id);
      put(
        facts,
        factsOf(group).map(([term, value]) => el("div", {}, el("dt", {}, term), el("dd", {}, value))),
      );
      table.fill(group.rollouts.map((rollout) => ({ ...rollout, counts: rollout })));
    } catch (error) {
      fail(error);
    }
  });
  update();
  const changed = (change) => {
    if (change === null || members.has(change.rollout_id)) update();
  };
  return { end: follow(null, changed, showState), table, back: "#/groups" };
}

/** Return the totals of a group's rollouts. The reward is their mean; drift is null until it is counted for one. */
export function sumsOf(group) {
  const sum = (name) => group.rollouts.reduce((total, rollout) => total + rollout[name], 0);
  const rewards = group.rewards.filter((reward) => reward !== null);
  const counted = group.rollouts.filter((rollout) => rollout.drift !== null);
  return {
    reward: rewards.length ? rewards.reduce((total, reward) => total + reward, 0) / rewards.length : null,
    steps: sum("steps"),
    sampled_tokens: sum("sampled_tokens"),
    exact: sum("exact"),
    flagged: sum("flagged"),
    drift: counted.length ? counted.reduce((total, rollout) => total + driftOf(rollout), 0) : null,
  };
}

function factsOf(group) {
  const rewards = group.rewards.filter((reward) => reward !== null);
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
  const spread = Math.sqrt(rewards.reduce((sum, reward) => sum + (reward - mean) ** 2, 0) / rewards.length);
  return [
    ["Status", status(group.status)],
    ["Finished", `${group.finished} of ${group.size ?? group.members}`],
    ["Reward", rewards.length ? `mean ${decimal(mean)}, standard deviation ${decimal(spread)}` : "none yet"],
    ["Policy version", line(String(group.policy_version ?? "–"))],
    ["Opened", clock(group.created_ms)],
    ["Metadata", line(JSON.stringify(group.metadata ?? {}), 400)],
  ];
}
