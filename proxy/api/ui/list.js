// The table of rollouts: its columns, and what is done with the rollouts that are selected.

import { count, decimal, duration, hash, line } from "./format.js";
import { html } from "./html.js";
import { driftOf, Ended, Fidelity, Since, Status } from "./parts.js";
import { PlayedMark } from "./playback.js";
import { Selection } from "./selection.js";
import { Table, useSelected } from "./table.js";

const driftKinds = (rollout) =>
  Object.entries(rollout.drift ?? {})
    .map(([kind, n]) => `${kind}: ${n}`)
    .join(", ");

const drift = (r) => html`
  <span title=${driftKinds(r) || (r.drift ? "none" : "counted when the rollout finishes")}>${count(driftOf(r))}</span>`;

const number = (key, title, value) =>
  ({ key, title, from: "tablet", cell: (r) => count(value(r)), sort: value, first: "down" });

const task = (r) => (r.task === null ? "–" : line(r.task, 120));

/** Show the number of failed calls, and their HTTP statuses. */
function failed({ counts, errors }) {
  if (!counts.error) return counts.error === 0 ? "0" : "–";
  const statuses = Object.entries(errors).map(([status, n]) => `${n} × ${line(status, 3)}`);
  return html`
    <span class="flagged" title=${statuses.join(", ") || "no response"}>
      ${count(counts.error)}${statuses.length > 0 && ` (${Object.keys(errors).map((status) => line(status, 3)).join(", ")})`}
    </span>`;
}

/** Return the time from the first call of a rollout to its end, or to its last change. */
export const tookOf = (r) => (r.began_ms === null ? null : Math.max(0, (r.finished_ms ?? r.touched_ms) - r.began_ms));

/** Show the ID of a rollout, with a mark if it is a playback. */
function named({ rollout_id: id, playback }) {
  if (!playback) return html`<${Ended} text=${id} />`;
  return html`<span class="played"><${PlayedMark} of=${playback} /><${Ended} text=${id} /></span>`;
}

const COLUMNS = [
  { key: "id", title: "Rollout", cell: named, sort: (r) => r.rollout_id },
  { key: "task", title: "Task", cell: (r) => html`<span title=${task(r)}>${task(r)}</span>`, sort: (r) => r.task },
  { key: "status", title: "Status", cell: (r) => html`<${Status} of=${r.status} />`, sort: (r) => r.status },
  { key: "reward", title: "Reward", cell: (r) => decimal(r.reward), sort: (r) => r.reward, first: "down" },
  number("steps", "Steps", (r) => r.counts.steps),
  { key: "failed", title: "Failed", from: "tablet", cell: failed, sort: (r) => r.counts.error, first: "down" },
  number("tokens", "Tokens", (r) => r.counts.sampled_tokens),
  {
    key: "fidelity",
    title: "Exact / flagged",
    from: "desk",
    cell: ({ counts: { exact, flagged } }) => html`<${Fidelity} exact=${exact} flagged=${flagged} />`,
    sort: (r) => r.counts.flagged,
    first: "down",
  },
  { key: "drift", title: "Drift", from: "desk", cell: drift, sort: driftOf, first: "down" },
  { key: "took", title: "Took", from: "desk", cell: (r) => duration(tookOf(r)), sort: tookOf, first: "down" },
  {
    key: "group",
    title: "Group",
    from: "desk",
    cell: (r) => (r.group_id === null ? "–" : line(r.group_id, 60)),
    sort: (r) => r.group_id,
  },
  {
    key: "age",
    title: "Changed",
    from: "desk",
    cell: (r) => html`<${Since} ms=${r.touched_ms} />`,
    sort: (r) => r.touched_ms,
    first: "down",
  },
];
const OF_MEMBERS = COLUMNS.filter(({ key }) => !["group", "age"].includes(key)); // equal for all members, or unknown

/** Show a table of rollouts, all or the members of a group, with what is done with those that are selected. */
export function RolloutTable({ label, rows, message, order, isOfGroup = false }) {
  const selection = useSelected();
  return html`
    <${Selection} names=${[...selection.names]} clear=${selection.clear} />
    <${Table} name=${isOfGroup ? "members" : "rollouts"} label=${label} columns=${isOfGroup ? OF_MEMBERS : COLUMNS}
      rows=${rows} message=${message} selection=${selection} order=${order} identity=${(r) => r.rollout_id}
      href=${(r) => hash("rollout", r.rollout_id)} open=${(r) => { location.hash = hash("rollout", r.rollout_id); }} />`;
}
