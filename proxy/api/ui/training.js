// Training: rewards, advantages, lengths and staleness of the newest groups of a policy, live, from one request.

import { json } from "./api.js";
import { Chart } from "./charts.js";
import { clock, count, decimal, line } from "./format.js";
import { Facts, html, useMemo, useState } from "./html.js";
import { useLoaded } from "./live.js";

const CHOICES = ["100", "200", "500", "1000"];
const AGE = "minutes before the newest group";
const UNKNOWN = "unknown";

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
    ${found && html`<${Facts} of=${factsOf(found)} /><${Charts} groups=${found.groups} />`}`;
}

const named = (counts) => Object.entries(counts).map(([name, n]) => `${line(name, 40)} ${count(n)}`).join(", ") || "none";

const factsOf = ({ policy, version, epoch, statuses, dropped, refused, equal }) => [
  ["Policy", line(policy, 60)],
  ["Version", line(version ?? "not announced", 60)],
  ...(epoch ? [["Epoch", count(epoch)]] : []),
  ["Groups", named(statuses)],
  ["Groups with equal rewards", equal === null ? "–" : `${decimal(100 * equal, 1)} %`],
  ["Dropped, by reason", named(dropped)],
  ["Refused by claims since the start, by reason", named(refused)],
];

function Charts({ groups }) {
  const { rewarded, versions, means, marks } = useMemo(() => byVersion(groups), [groups]);
  const over = (title, label, value, of = groups) =>
    html`<${OverTime} title=${title} label=${label} value=${value} groups=${of} />`;
  return html`
    <div class="plots">
      <${Chart} title="Reward by policy version" marks=${marks} line=${means} names=${versions} isFromZero=${false}
        axes=${{ x: "oldest policy version of the group (line: means)", y: "mean reward" }} />
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
const labelOf = (g, what, value) => `${line(g.group_id, 60)} at ${clock(timeOf(g))}: ${what} ${decimal(value)}`;

function byVersion(groups) {
  const rewarded = groups.filter((g) => g.reward !== null);
  const nameOf = (g) => (g.epoch ? `${g.epoch}:${g.version ?? UNKNOWN}` : (g.version ?? UNKNOWN)); // of a later epoch: 1:104
  const compare = (a, b) => (Number.isNaN(a - b) ? a.localeCompare(b) : a - b);
  const order = (a, b) => (a.epoch ?? 0) - (b.epoch ?? 0) || compare(a.version ?? UNKNOWN, b.version ?? UNKNOWN);
  const versions = [...new Map(rewarded.map((g) => [nameOf(g), g])).values()].sort(order).map(nameOf);
  const marks = rewarded.map((g, at) => ({
    x: versions.indexOf(nameOf(g)) + (((at * 0.618) % 1) - 0.5) * 0.4, // spread out, at the same place after each redraw
    y: g.reward,
    label: `${line(g.group_id, 60)}: mean reward ${decimal(g.reward)} at version ${line(nameOf(g), 40)}`,
  }));
  const means = versions.map((version, x) => {
    const own = rewarded.filter((g) => nameOf(g) === version).map((g) => g.reward);
    return { x, y: own.reduce((sum, reward) => sum + reward, 0) / own.length };
  });
  return { rewarded, versions: versions.map((name) => line(name, 12)), means, marks };
}
