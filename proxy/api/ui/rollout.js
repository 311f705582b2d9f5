// A rollout: its facts and its tabs (steps on a timeline, sequences, plots), with live updates.

import { json } from "./api.js";
import { comparison } from "./compare.js";
import { clock, count, decimal, duration, hash, line } from "./format.js";
import { Facts, html, Path, useKeys, useMemo } from "./html.js";
import { useLoaded } from "./live.js";
import { driftOf, Fidelity, Status } from "./parts.js";
import { FirstMismatch, Played, Playbacks, readTree } from "./playback.js";
import { RolloutPlots } from "./plots.js";
import { Raw } from "./raw.js";
import { Sequences } from "./sequences.js";
import { memory } from "./step.js";
import { Steps } from "./steps.js";
import { layout } from "./tree.js";

const TABS = { steps: "Steps", sequences: "Sequences", plots: "Plots" };

export function Rollout({ rolloutId, tab, shell }) {
  const load = async () => {
    const parts = [json(["rollouts", rolloutId]), tab === "sequences" ? null : readTree(rolloutId)];
    const [rollout, tree] = await Promise.all(parts);
    if (tree !== null) Object.assign(memory, { rolloutId, tree });
    return { rollout, tree };
  };
  const { rollout = null, tree = null } = useLoaded(shell, load, { follows: rolloutId }) ?? {};
  const rows = useMemo(() => (tree === null ? null : layout(tree)), [tree]);
  useKeys({ Escape: () => { location.hash = hash("rollouts"); } });
  const shown = tab in TABS ? tab : "steps";
  const where = (name) => (name === "steps" ? hash("rollout", rolloutId) : hash("rollout", rolloutId, name));
  return html`
    <${Path} links=${[[hash("rollouts"), "Rollouts"]]} />
    <div class="bar">
      <h1>${line(rolloutId)}</h1>
      <nav class="tabs" aria-label="Views of this rollout">
        ${Object.entries(TABS).map(([name, title]) => html`
          <a href=${where(name)} aria-current=${name === shown ? "page" : null}>${title}</a>`)}
      </nav>
      ${rollout?.playback && html`<a href=${comparison([[rollout.playback.of], [rolloutId]])}>Compare with its source</a>`}
    </div>
    ${rollout && html`
      <${Facts} of=${[...factsOf(rollout), ...threadsOf(tree), ...playbacksOf(tree)]} />
      ${rollout.playback?.mismatches > 0 && html`<${FirstMismatch} of=${rollout.playback} />`}
      <${Raw} text=${JSON.stringify(rollout)} name=${`rollout-${rolloutId}`} />`}
    ${shown === "steps" && html`<${Steps} rolloutId=${rolloutId} rows=${rows} />`}
    ${shown === "sequences" && html`<${Sequences} rolloutId=${rolloutId} shell=${shell} />`}
    ${shown === "plots" && rows && html`<${RolloutPlots} tree=${tree} rows=${rows} />`}`;
}

/** Return the threads of a rollout that has several. */
function threadsOf(tree) {
  if (tree === null || tree.threads.length < 2) return [];
  const rewarded = (reward) => (reward === undefined ? "" : `, reward ${decimal(reward)}`);
  const named = tree.threads.map(({ name, steps, reward }) => `${name} (${count(steps)}${rewarded(reward)})`);
  return [["Threads", line(named.join(" · "), 400)]];
}

const playbacksOf = (tree) => (tree?.playbacks.length ? [["Playbacks", html`<${Playbacks} of=${tree.playbacks} />`]] : []);

const also = (number, what) => (number ? `, ${count(number)} ${what}` : "");

function factsOf(rollout) {
  const { counts, drift } = rollout;
  const failed = also(counts.error, "failed") + also(counts.undelivered, "undelivered") + also(counts.late, "late");
  const cached = counts.cached_tokens === undefined ? "" : ` (${count(counts.cached_tokens)} cached)`;
  const prompted = count(counts.prompt_tokens);
  const inherited = also(counts.inherited_tokens, "inherited");
  const kinds = Object.entries(drift ?? {}).map(([kind, n]) => ` · ${kind} ${n}`);
  const reason = rollout.reason ? ` (${rollout.reason})` : "";
  const after = duration(rollout.finished_ms - rollout.created_ms);
  return [
    ["Status", html`<${Status} of=${rollout.status} />`],
    ["Reward", decimal(rollout.reward)],
    ["Steps", count(counts.steps) + also(counts.inherited, "inherited") + failed],
    ["Exact / flagged", html`<${Fidelity} exact=${counts.exact} flagged=${counts.flagged} />`],
    ["Tokens", `${prompted} prompt tokens${cached}, ${count(counts.sampled_tokens)} completion tokens${inherited}`],
    ["Drift", drift ? `${count(driftOf(rollout))}${kinds.join("")}` : "counted when the rollout finishes"],
    ["Group", rollout.group_id && html`<a href=${hash("group", rollout.group_id)}>${line(rollout.group_id, 80)}</a>`],
    ...(rollout.playback ? [["Playback", html`<${Played} of=${rollout.playback} />`]] : []),
    ["Opened", `${clock(rollout.created_ms)} UTC`],
    ["Finished", rollout.finished_ms ? `after ${after}${reason}` : "–"],
    ["Metadata", line(JSON.stringify(rollout.metadata ?? {}), 400)],
  ].map(([term, value]) => [term, value ?? "–"]);
}
