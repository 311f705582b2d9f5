// Training: rewards, advantages, lengths and staleness of the newest groups of a policy, live, from one request.

import { json } from "./api.js";
import { Chart } from "./charts.js";
import { clock, count, decimal, line } from "./format.js";
import { Facts, html, useMemo, useState } from "./html.js";
import { useLoaded } from "./live.js";
import { Mismatch } from "./mismatch.js";
import { RewardPlot } from "./plots.js";

const CHOICES = ["100", "200", "500", "1000"];
const AGE = "minutes before the newest group";

export function Training({ shell }) {
  const [chosen, setChosen] = useState({ policy: null, limit: "200" });
  return html`<${Loaded} key=${JSON.stringify(chosen)} shell=${shell} chosen=${chosen} choose=${setChosen} />`;
}

function Loaded({ shell, chosen, choose }) {
  const found = useLoaded(shell, () => json(["training"], chosen), { follows: null, leastMs: 2000 });
  const pick = (name) => (event) => choose({ ...chosen, [name]: event.target.value });
  const covered = found && `${count(found.covered.groups)} groups, ${count(found.covered.rollouts)} rollouts`;
  return html`
    <div class="bar">
      <h1>Training</h1>
      ${found?.policies.length > 1 && html`
        <select aria-label="Policy" value=${found.policy} onchange=${pick("policy")}>
          ${found.policies.map((name) => html`<option value=${name}>${line(name, 40)}</option>`)}
        </select>`}
      <select aria-label="How many groups" value=${chosen.limit} onchange=${pick("limit")}>
        ${CHOICES.map((number) => html`<option value=${number}>newest ${number} groups</option>`)}
      </select>
      <span class="sum" role="status">${found && `${covered}${found.older ? "; older ones exist" : ""}`}</span>
    </div>
    ${found && html`<${Facts} of=${factsOf(found)} /><${Charts} groups=${found.groups} />
      <${Mismatch} of=${found.mismatch} />`}`;
}

const named = (counts) => Object.entries(counts).map(([name, n]) => `${line(name, 40)} ${count(n)}`).join(", ") || "none";

const factsOf = ({ policy, version, epoch, statuses, dropped, refused, warnings, equal, interrupted }) => [
  ["Policy", line(policy, 60)],
  ["Version", line(version ?? "not announced", 60)],
  ...(epoch ? [["Epoch", count(epoch)]] : []),
  ["Groups", named(statuses)],
  ["Groups with equal rewards", equal === null ? "–" : `${decimal(100 * equal, 1)} %`],
  ["Dropped, by reason", named(dropped)],
  ["Refused by claims since the start, by reason", named(refused)],
  ["Claimed tokens with wrong importance ratios since the start, by warning", named(warnings)],
  ["Interrupted calls of all policies since the start, by result", named(interrupted.calls)],
  ["Not resumed, by reason", named(interrupted.reasons)],
  ["Sampled tokens of interrupted calls", named(interrupted.tokens)],
  ["Their mean wait", interrupted.waits ? `${decimal(interrupted.waited_s / interrupted.waits, 2)} s` : "–"],
];

function Charts({ groups }) {
  const rewarded = useMemo(() => groups.filter((g) => g.reward !== null), [groups]);
  const found = useMemo(() => rewarded.map(rewardOf), [rewarded]);
  const over = (title, label, value, of = groups) =>
    html`<${OverTime} title=${title} label=${label} value=${value} groups=${of} />`;
  return html`
    <div class="plots">
      <${RewardPlot} found=${found} axes=${{ x: "oldest policy version of the group (line: means)", y: "mean reward" }} />
      ${over("Reward", "mean reward", (g) => g.reward, rewarded)}
      ${over("Spread of rewards in a group", "standard deviation", (g) => g.spread, rewarded)}
      ${over("Largest advantage (grpo)", "advantage", (g) => g.advantages?.[1] ?? null)}
      ${over("Length", "tokens per rollout", (g) => g.tokens, rewarded)}
      ${over("Staleness", "versions behind", (g) => g.staleness)}
    </div>`;
}

/** Show a value of each group by the time at which the group was complete or, before, opened. */
function OverTime({ title, label, value, groups }) {
  const marks = useMemo(() => {
    const known = groups.filter((g) => value(g) !== null);
    const newest = Math.max(...known.map(timeOf));
    return known.map((g) => ({ x: (timeOf(g) - newest) / 60_000, y: value(g), label: labelOf(g, label, value(g)) }));
  }, [groups]);
  return html`<${Chart} title=${title} marks=${marks} axes=${{ x: AGE, y: label }} />`;
}

const timeOf = (g) => g.complete_ms ?? g.created_ms;
const rewardOf = ({ group_id: id, version, epoch, reward }) =>
  ({ version, epoch, reward, label: `${line(id, 60)}: mean reward ${decimal(reward)}` });
const labelOf = (g, what, value) => `${line(g.group_id, 60)} at ${clock(timeOf(g))}: ${what} ${decimal(value)}`;
