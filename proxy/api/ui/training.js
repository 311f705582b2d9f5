// Training: rewards, advantages, lengths and staleness of the newest groups of a policy, live, from one request.

import { json } from "./api.js";
import { Chart } from "./charts.js";
import { clock, count, decimal, hash, line } from "./format.js";
import { Facts, html, useMemo, useQuery } from "./html.js";
import { useLoaded } from "./live.js";
import { Mismatch } from "./mismatch.js";
import { RewardPlot } from "./plots.js";

const CHOICES = ["100", "200", "500", "1000"];
const NONE = []; // the same at each rendering
const AGE = "minutes before the newest group";

export function Training({ shell }) {
  const [{ policy = null, limit = "200" }, setQuery] = useQuery();
  const chosen = useMemo(() => ({ policy, limit }), [policy, limit]);
  const load = async () => ({ ...(await json(["training"], chosen)), chosen });
  const found = useLoaded(shell, load, { follows: null, leastMs: 2000, of: chosen });
  const pick = (name) => (event) => setQuery({ [name]: event.target.value });
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
      <span class="sum" role="status">${found?.chosen === chosen ? coveredBy(found) : "Loading…"}</span>
    </div>
    ${found && html`<${Facts} of=${factsOf(found)} />`}
    <${Charts} groups=${found?.groups ?? NONE} empty=${found ? undefined : "Loading…"} />
    ${found && html`<${Mismatch} of=${found.mismatch} />`}`;
}

const coveredBy = ({ covered, older }) =>
  `${count(covered.groups)} groups, ${count(covered.rollouts)} rollouts${older ? "; older ones exist" : ""}`;

const named = (counts) => Object.entries(counts).map(([name, n]) => `${line(name, 40)} ${count(n)}`).join(", ") || "none";

/** Show counts by name, each with a link to its groups: those with this value of a field. */
const linked = (counts, field) => {
  const where = (name) => `${hash("groups")}?${new URLSearchParams({ q: `${field}:${name}` })}`;
  const links = Object.entries(counts).map(([name, n], at) => html`
    ${at > 0 && ", "}<a href=${where(name)}>${line(name, 40)} ${count(n)}</a>`);
  return links.length ? links : "none";
};

const factsOf = ({ policy, version, epoch, statuses, dropped, refused, warnings, equal, interrupted }) => [
  ["Policy", line(policy, 60)],
  ["Version", line(version ?? "not announced", 60)],
  ...(epoch ? [["Epoch", count(epoch)]] : []),
  ["Groups", linked(statuses, "status")],
  ["Groups with equal rewards", equal === null ? "–" : `${decimal(100 * equal, 1)} %`],
  ["Dropped, by reason", linked(dropped, "dropped")],
  ["Refused by claims since the start, by reason", named(refused)],
  ["Claimed tokens with wrong importance ratios since the start, by warning", named(warnings)],
  ["Interrupted calls of all policies since the start, by result", named(interrupted.calls)],
  ["Not resumed, by reason", named(interrupted.reasons)],
  ["Sampled tokens of interrupted calls", named(interrupted.tokens)],
  ["Their mean wait", interrupted.waits ? `${decimal(interrupted.waited_s / interrupted.waits, 2)} s` : "–"],
];

/** Show the charts; `empty` is their text without groups. */
function Charts({ groups, empty }) {
  const rewarded = useMemo(() => groups.filter((g) => g.reward !== null), [groups]);
  const found = useMemo(() => rewarded.map(rewardOf), [rewarded]);
  const over = (title, label, value, of = groups) =>
    html`<${OverTime} title=${title} label=${label} value=${value} groups=${of} empty=${empty} />`;
  return html`
    <div class="plots">
      <${RewardPlot} found=${found} empty=${empty}
        axes=${{ x: "oldest policy version of the group (line: means)", y: "mean reward" }} />
      ${over("Reward", "mean reward", (g) => g.reward, rewarded)}
      ${over("Spread of rewards in a group", "standard deviation", (g) => g.spread, rewarded)}
      ${over("Largest advantage (grpo)", "advantage", (g) => g.advantages?.[1] ?? null)}
      ${over("Length", "tokens per rollout", (g) => g.tokens, rewarded)}
      ${over("Staleness", "versions behind", (g) => g.staleness)}
    </div>`;
}

/** Show a value of each group by the time at which the group was complete or, before, opened. */
function OverTime({ title, label, value, groups, empty }) {
  const marks = useMemo(() => {
    const known = groups.filter((g) => value(g) !== null);
    const newest = Math.max(...known.map(timeOf));
    const x = (g) => (timeOf(g) - newest) / 60_000;
    return known.map((g) => ({ x: x(g), y: value(g), label: labelOf(g, label, value(g)), href: hash("group", g.group_id) }));
  }, [groups]);
  return html`<${Chart} title=${title} marks=${marks} axes=${{ x: AGE, y: label }} empty=${empty} />`;
}

const timeOf = (g) => g.complete_ms ?? g.created_ms;
const rewardOf = ({ group_id: id, version, epoch, reward }) =>
  ({ version, epoch, reward, label: `${line(id, 60)}: mean reward ${decimal(reward)}`, href: hash("group", id) });
const labelOf = (g, what, value) => `${line(g.group_id, 60)} at ${clock(timeOf(g))}: ${what} ${decimal(value)}`;
