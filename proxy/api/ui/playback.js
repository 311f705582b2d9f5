// Playbacks: where inherited steps were sampled, what a rollout plays back, and the branches at a step with their rewards.

import { json } from "./api.js";
import { comparison, MAX_COMPARED } from "./compare.js";
import { count, decimal, hash, line } from "./format.js";
import { html } from "./html.js";

const MAX_SHOWN = 100; // branches of a step
const MAX_NAMED = 6; // groups and rollouts that play a rollout back

/** Read the tree of a rollout, with the rollouts that play it back. */
export async function readTree(rolloutId) {
  const parts = [json(["rollouts", rolloutId, "tree"]), json(["rollouts", rolloutId, "branches"])];
  const [tree, { branches }] = await Promise.all(parts);
  return { ...tree, playbacks: branches };
}

/** Return the playbacks that branch at a step: before it, or after its reply. */
export const branchesAt = (playbacks, stepId) => playbacks.filter((one) => (one.before ?? one.through) === stepId);

/** Return a text with the number of branches and the mean and the standard deviation of their rewards, and a short mark. */
export function sumOf(branches) {
  const rewards = branches.filter((one) => one.branched && one.reward !== null).map((one) => one.reward);
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
  const spread = Math.sqrt(rewards.reduce((sum, reward) => sum + (reward - mean) ** 2, 0) / rewards.length);
  const earned = `mean reward ${decimal(mean)}, standard deviation ${decimal(spread)} of ${count(rewards.length)}`;
  const name = branches.length > 1 ? "branches" : "branch";
  return {
    text: `${count(branches.length)} ${name}: ${rewards.length ? earned : "no rewards"}`,
    mark: `⋔ ${count(branches.length)}${rewards.length ? ` · ${decimal(mean)}` : ""}`,
  };
}

const stepLink = (rolloutId, stepId) => html`
  <a href=${hash("rollout", rolloutId, "step", stepId)}>${line(stepId, 60)}</a>`;

/** Show where an inherited step was sampled. */
export const Sampled = ({ rolloutId, stepId }) => html`
  step ${stepLink(rolloutId, stepId)} of rollout <a href=${hash("rollout", rolloutId)}>${line(rolloutId, 60)}</a>`;

/** Show a mark that is a link to a step of a source. */
const sourceMark = ({ rollout_id: id, step_id: stepId }, text, about) => html`
  <a class="inherited" href=${hash("rollout", id, "step", stepId)} tabindex="-1"
    title=${`${about} step ${line(stepId)} of rollout ${line(id)}`} onclick=${(event) => event.stopPropagation()}>${text}</a>`;

/** Show the mark of an inherited step, a link to the step that was sampled. */
export const InheritedMark = ({ of }) => sourceMark(of, "▷ inherited", "inherited: sampled as");

/** Show the mark of a live step that repeats the call of a recorded one, a link to that step. */
export const RepeatedMark = ({ of }) =>
  sourceMark(of, "⋔ branch", of.ids ? "sent with the prompt ids of" : "rendered again, with the messages of");

/** Show that a rollout is a playback, before its name in a list. */
export const PlayedMark = ({ of }) => html`
  <span class="inherited" title=${`playback of ${line(of.of)}: ${progressOf(of)}`}>▷</span>`;

const progressOf = ({ answered, live }) => `${count(answered)} answered, ${count(live)} live`;

/** Show the source of a playback, where it branches, and how many calls were answered. */
export function Played({ of: playback }) {
  const { of, before, through, unanswerable, mismatches } = playback;
  const stepId = before ?? through;
  return html`
    of <a href=${hash("rollout", of)}>${line(of, 80)}</a>
    ${stepId !== undefined && html`, ${before === undefined ? "through" : "before"} step ${stepLink(of, stepId)}`}:
    ${" "}${progressOf(playback)}
    ${unanswerable > 0 && `, ${count(unanswerable)} cannot be answered`}
    ${mismatches > 0 && html`, <span class="flagged">${count(mismatches)} refused</span>`}`;
}

/** Show how many rollouts play a rollout back, and their groups; those without a group by themselves. */
export function Playbacks({ of }) {
  const kinds = of.map(({ group_id: group, rollout_id: id }) => (group === null ? ["rollout", id] : ["group", group]));
  const named = [...new Map(kinds.map((kind) => [hash(...kind), kind[1]]))];
  const links = named.slice(0, MAX_NAMED).map(([where, name]) => html` <a href=${where}>${line(name, 40)}</a>`);
  return html`${count(of.length)}: ${links}${named.length > MAX_NAMED && ` and ${count(named.length - MAX_NAMED)} more`}`;
}

/** Show how the first refused call of a playback differs from the nearest step of its tape. */
export function FirstMismatch({ of: { of, mismatches, first_mismatch: first } }) {
  const how = () => html`differs from step ${stepLink(of, first.step_id)} ${first.path === null && "in its dialect"}`;
  const late = "came after all steps were answered";
  return html`
    <p class="fork">
      <b>${count(mismatches)} refused</b>: the first call ${first.step_id === null ? late : how()}
      ${first.path !== null && html`
        at <code>${line(first.path)}</code><br />
        recorded <code>${line(first.recorded ?? "nothing", 500)}</code><br />
        here <code>${line(first.value ?? "nothing", 500)}</code>`}
    </p>`;
}

/** Show the branches at a step, with their rewards. */
export function Branches({ branches, stepId }) {
  const shown = branches.slice(0, MAX_SHOWN);
  const rest = branches.length - shown.length;
  const compared = branches.slice(0, MAX_COMPARED).map((one) => [one.rollout_id]);
  return html`
    <section class="branches">
      <h2>Branches</h2>
      <p>${sumOf(branches).text}</p>
      <ul>
        ${shown.map((one) => html`
          <li key=${one.rollout_id}>
            <a href=${hash("rollout", one.rollout_id)}>${line(one.rollout_id, 60)}</a>
            ${" "}${one.through === stepId ? "after this step, " : ""}${one.status}, reward ${decimal(one.reward)}
            ${!one.branched && html` <span class="dim">(not at this step yet)</span>`}
          </li>`)}
      </ul>
      ${rest > 0 && html`<p class="dim">and ${count(rest)} more</p>`}
      ${compared.length > 1 && html`<a href=${comparison(compared)}>Compare ${count(compared.length)} of them</a>`}
    </section>`;
}
