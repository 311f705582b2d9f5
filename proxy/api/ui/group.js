// One group with its rollouts.
//
// Holds its facts, what its rollouts come to, and how both follow what happens.

import { json } from "./api.js";
import { clock, decimal, el, hash, line, put } from "./dom.js";
import { driftOf, rolloutTable, status } from "./list.js";
import { follow, gently } from "./live.js";

/** One group: how it stands, and its rollouts. */
export function show(main, name, { fail, told }) {
  const facts = el("dl", { class: "facts" });
  const table = rolloutTable("Rollouts of this group", true);
  main.append(
    el("p", { class: "path" }, el("a", { href: "#/groups" }, "Groups"), " / "),
    el("div", { class: "bar" }, el("h1", {}, line(name))),
    facts,
    table.element,
  );
  const members = new Set();
  const look = gently(async () => {
    try {
      const group = await json(["groups", name]);
      for (const one of group.rollouts) members.add(one.rollout_id);
      put(
        facts,
        factsOf(group).map(([term, value]) => el("div", {}, el("dt", {}, term), el("dd", {}, value))),
      );
      table.fill(group.rollouts.map((one) => ({ ...one, counts: one })));
    } catch (error) {
      fail(error);
    }
  });
  look();
  const changed = (change) => {
    if (change === null || members.has(change.rollout_id)) look();
  };
  return { end: follow(null, changed, told), table, back: "#/groups" };
}

/** What the rollouts of a group come to. The reward is their mean; drift is null while none is counted. */
export function sumsOf(group) {
  const sum = (name) => group.rollouts.reduce((total, one) => total + one[name], 0);
  const rewards = group.rewards.filter((reward) => reward !== null);
  const counted = group.rollouts.filter((one) => one.drift !== null);
  return {
    reward: rewards.length ? rewards.reduce((total, one) => total + one, 0) / rewards.length : null,
    steps: sum("steps"),
    sampled_tokens: sum("sampled_tokens"),
    exact: sum("exact"),
    flagged: sum("flagged"),
    drift: counted.length ? counted.reduce((total, one) => total + driftOf(one), 0) : null,
  };
}

function factsOf(group) {
  const rewards = group.rewards.filter((reward) => reward !== null);
  const mean = rewards.reduce((sum, one) => sum + one, 0) / rewards.length;
  const spread = Math.sqrt(rewards.reduce((sum, one) => sum + (one - mean) ** 2, 0) / rewards.length);
  return [
    ["Status", status(group.status)],
    ["Finished", `${group.finished} of ${group.size ?? group.members}`],
    ["Reward", rewards.length ? `mean ${decimal(mean)}, deviation ${decimal(spread)}` : "none yet"],
    ["Policy version", line(String(group.policy_version ?? "–"))],
    ["Opened", clock(group.created_ms)],
    ["Metadata", line(JSON.stringify(group.metadata ?? {}), 400)],
  ];
}
