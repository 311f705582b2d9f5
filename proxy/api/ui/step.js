// A step: its facts, its messages, and beside them its tokens with their kinds, spans and drift.

import { text } from "./api.js";
import { Histogram } from "./charts.js";
import { clock, count, decimal, duration, hash, line, versionOf } from "./format.js";
import { Facts, html, Path, useEffect, useKeys, useMemo, useState } from "./html.js";
import { Conversation } from "./messages.js";
import { Status } from "./parts.js";
import { Branches, branchesAt, readTree, Sampled } from "./playback.js";
import { logprobCounts } from "./plots.js";
import { Raw } from "./raw.js";
import { TokenView } from "./tokens.js";
import { continuationText, layout, order } from "./tree.js";

/** The tree that was shown last: it has the neighbours and the drift of a step. */
export const memory = { rolloutId: null, tree: null };

export function Step({ rolloutId, stepId, shell }) {
  const [loaded, setLoaded] = useState(null);
  const [tree, setTree] = useState(null);
  useEffect(() => {
    let isOver = false;
    const load = async () => {
      const source = await text(["rollouts", rolloutId, "steps", stepId]);
      if (isOver) return;
      setLoaded({ source, step: JSON.parse(source) });
      if (memory.rolloutId !== rolloutId || !order(layout(memory.tree)).includes(stepId))
        Object.assign(memory, { rolloutId, tree: await readTree(rolloutId) });
      if (!isOver) setTree(memory.tree);
    };
    load().catch((error) => !isOver && shell.fail(error));
    return () => {
      isOver = true;
    };
  }, []);
  const steps = useMemo(() => (tree === null ? null : order(layout(tree))), [tree]);
  const at = steps?.indexOf(stepId);
  const target = (by) => steps?.[at + by];
  const go = (by) => () => {
    if (target(by) !== undefined) location.hash = hash("rollout", rolloutId, "step", target(by));
  };
  useKeys({ Escape: () => { location.hash = hash("rollout", rolloutId); }, "[": go(-1), "]": go(1) });
  return html`
    <${Path} links=${[[hash("rollouts"), "Rollouts"], [hash("rollout", rolloutId), line(rolloutId)]]} />
    <div class="bar">
      <h1>Step <small>${line(stepId)}</small></h1>
      <span class="buttons">
        ${steps && html`
          <button type="button" disabled=${target(-1) === undefined} title="[" onclick=${go(-1)}>← earlier</button>
          <button type="button" disabled=${target(1) === undefined} title="]" onclick=${go(1)}>later →</button>
          <span class="dim">${count(at + 1)} of ${count(steps.length)} by time</span>`}
      </span>
    </div>
    ${loaded === null ? html`<p class="empty">Loading the step…</p>` : html`<${Loaded} ...${loaded} tree=${tree} />`}`;
}

/** Show a step; its drift and its continuation are shown once the tree is loaded. */
function Loaded({ step, source, tree }) {
  const { step_id: stepId, rollout_id: rolloutId } = step;
  const drift = tree?.drift.filter((entry) => entry.step_id === stepId || entry.earlier_step_id === stepId) ?? [];
  const { continuation, fork } = (tree && [...tree.nodes, ...tree.unplaced].find((node) => node.step_id === stepId)) ?? {};
  const branches = branchesAt(tree?.playbacks ?? [], stepId);
  const rows = useMemo(() => step.choices.map((choice) => rowOf(step, choice, drift)), [step, tree]);
  return html`
    <${Facts} of=${factsOf(step)} />
    ${continuation && html`<${Continued} continuation=${continuation} rolloutId=${rolloutId} />`}
    ${fork && html`<${Forked} fork=${fork} rolloutId=${rolloutId} />`}
    ${branches.length > 0 && html`<${Branches} branches=${branches} stepId=${stepId} />`}
    ${drift.length > 0 && html`<${Drifts} drift=${drift} rolloutId=${rolloutId} stepId=${stepId} />`}
    <${Raw} text=${source} name=${`step-${stepId}`} />
    <div class="beside">
      <div><h2>Messages</h2><${Conversation} step=${step} /></div>
      <div>
        ${step.choices.map((choice, at) => html`
          <h2>${rows.length > 1 ? `Tokens of choice ${at}` : "Tokens"}</h2>
          <${TokenView} label=${`Tokens of choice ${choice.index}`} row=${rows[at]} hasKeys=${at === 0}
            of=${{ rolloutId, stepId, choice: choice.index }} />`)}
        ${rows.length === 0 && html`<p class="empty">The engine returned no token ids for this call.</p>`}
      </div>
    </div>
    <h2>Logprobs</h2>
    <${Histogram} ...${logprobCounts(step.choices.map((choice) => choice.logprobs))} />`;
}

/** Return the row of a choice: its prompt, then its completion. */
function rowOf(step, choice, drift) {
  const places = new Map();
  for (const entry of drift)
    if (entry.step_id === step.step_id || entry.earlier_choice === choice.index) places.set(entry.index, entry.kind);
  const prompt = step.prompts ? step.prompts[choice.prompt] : (step.prompt_ids ?? []);
  const ids = [...prompt, ...choice.ids];
  const from = prompt.length;
  const isFlagged = !step.fidelity.exact || !step.delivered || step.late || step.status !== "complete";
  const spans = choice.spans.length
    ? choice.spans
    : [{ start: 0, end: choice.ids.length, policy_version: step.policy_version }];
  const starts = new Set(spans.filter((span) => span.end > span.start).map((span) => from + span.start));
  const likely = likelyOf(step, choice);
  const spanAt = (at) => spans.find((span) => at - from >= span.start && at - from < span.end);
  return {
    ids,
    opening: from,
    kind: (at) => (at < from ? "prompt" : isFlagged ? "flagged" : step.inherited ? "context" : "sampled"),
    logprob: (at) => (at < from ? null : (choice.logprobs[at - from] ?? null)),
    version: (at) => (at < from ? null : versionOf({ ...step, ...spanAt(at) })),
    span: (at) => {
      const span = at < from ? null : spanAt(at);
      return span ? `${from + span.start}–${from + span.end} (completion)` : `0–${from} (prompt)`;
    },
    spanStarts: (at) => starts.has(at),
    likely: (at) => (at < from ? null : likely(at - from)),
    drift: (at) => (places.has(at) ? `${places.get(at)}: token ids differ from here` : null),
  };
}

/** Return a function of an index: the most likely tokens that the client requested, `[[text, logprob], …]`, or null. */
function likelyOf({ response }, { index, ids }) {
  const answers = Array.isArray(response?.choices) ? response.choices : [];
  const recorded = answers.find((answer) => (answer?.index ?? 0) === index)?.logprobs;
  const lists = recorded?.content?.map?.((entry) => entry?.top_logprobs) ?? recorded?.top_logprobs;
  if (!Array.isArray(lists) || lists.length !== ids.length) return () => null; // they cannot be assigned to ids
  return (at) => {
    const of = lists[at] ?? [];
    const pairs = Array.isArray(of) ? of.map((one) => [one?.token, one?.logprob]) : Object.entries(of);
    const known = pairs.filter(([text, logprob]) => typeof text === "string" && typeof logprob === "number");
    return known.length ? known.sort(([, a], [, b]) => b - a) : null;
  };
}

function factsOf(step) {
  const { timing, fidelity } = step;
  const ms = (name) => (timing[name] === null ? null : 1000 * timing[name]);
  const took = (until) => (timing[until] === null ? null : ms(until) - (ms("sent") ?? ms("received")));
  const sampled = step.choices.reduce((sum, choice) => sum + choice.ids.length, 0);
  const versions = [...new Set([step.policy_version, step.policy_version_end])].filter((version) => version !== null);
  const prompted = (step.prompts ?? [step.prompt_ids ?? []]).reduce((sum, ids) => sum + ids.length, 0);
  const flagged = (words) => html`<span class="flagged">${words}</span>`;
  const problems = () => flagged(`⚑ ${line(fidelity.why.join(" ") || fidelity.problems.join(", "), 600)}`);
  const stepOf = (of) => html`<${Sampled} rolloutId=${of.rollout_id} stepId=${of.step_id} />`;
  const repeated = !step.inherited && step.extra.branched_from;
  return [
    ["Status", html`<${Status} of=${step.status} />${step.reason && ` ${line(step.reason, 200)}`}`],
    ["Fidelity", fidelity.exact ? html`<span class="exact">exact ✓</span>` : problems()],
    ...(step.inherited ? [["Inherited from", stepOf(step.inherited)]] : []),
    ...(repeated ? [["Branches from", stepOf(repeated)]] : []),
    ["Delivered", step.delivered ? "yes" : flagged("no")],
    ...(step.late ? [["Late", flagged("the call ended after the rollout finished")]] : []),
    ["Tokens", `${count(prompted)} prompt tokens${cachedOf(step)}, ${count(sampled)} completion tokens`],
    ...(typeof step.usage?.cost === "number" ? [["Cost, as the engine reports it", decimal(step.usage.cost, 6)]] : []),
    ["Took", `${duration(took("last_byte"))}, first byte after ${duration(took("first_byte"))}`],
    ["Speed", took("last_byte") && !step.inherited ? `${decimal((1000 * sampled) / took("last_byte"), 1)} tokens/s` : "–"],
    ...(step.policy === undefined ? [] : [["Policy", line(step.policy)]]),
    ["Policy version", line(versions.join(" → ") || "–")],
    ...(step.policy_epoch ? [["Policy epoch", count(step.policy_epoch)]] : []),
    ["Reward", Array.isArray(step.reward) ? `${step.reward.length} rewards, one per token` : decimal(step.reward)],
    ["Engine", line(`${step.engine.name} (${step.engine.kind} ${step.engine.version ?? ""})`)],
    ["Model", line(`${step.model.served ?? step.model.asked ?? "–"}`)],
    ["Dialect", `${line(step.dialect, 40)}, index ${count(step.index)}`],
    ["Received", `${clock(ms("received"))} UTC`],
  ];
}

/** Return how many tokens of the prompt the engine had cached, if it reports it. */
function cachedOf({ usage, extra }) {
  const cached = usage?.prompt_tokens_details?.cached_tokens ?? extra.cached_tokens;
  return typeof cached === "number" ? ` (${count(cached)} cached)` : "";
}

function Continued({ continuation, rolloutId }) {
  const { kept, step_id: earlier } = continuation;
  const link = () => html` (<a href=${hash("rollout", rolloutId, "step", earlier)}>earlier step</a>)`;
  return html`
    <p class=${kept === undefined ? "continuation forked" : "continuation"}
      >${line(continuationText(continuation), 400)}${earlier !== undefined && link()}</p>`;
}

/** Show why a step is a fork: its kind, the earlier step, and the texts of the first message that differs. */
const Forked = ({ fork, rolloutId }) => html`
  <p class="fork">
    <b>↳ ${fork.kind}</b>: ${fork.why}, compared with <a href=${hash("rollout", rolloutId, "step", fork.step_id)}
      >${line(fork.step_id, 60)}</a>
    ${fork.message !== undefined && html`
      <br />message ${count(fork.message)} before <code>${line(fork.expected ?? "no message", 240)}</code>
      <br />here <code>${line(fork.found ?? "no message", 240)}</code>`}
  </p>`;

const Drifts = ({ drift, rolloutId, stepId }) => html`
  <section class="drifts">
    <h2>Drift</h2>
    ${drift.map((entry) => {
      const other = entry.step_id === stepId ? entry.earlier_step_id : entry.step_id;
      const isOther = entry.why !== undefined && entry.step_id !== stepId;
      return html`
        <p>
          <b>◆ ${line(entry.kind, 40)}</b> at token ${count(entry.index)}, compared with <a
            href=${hash("rollout", rolloutId, "step", other)}>${line(other, 60)}</a><br />
          expected <code>${boundaryText(entry, "expected")}</code><br />
          found <code>${boundaryText(entry, "found")}</code>
          ${isOther && html`<br />not continued: ${line(entry.why, 400)}`}
        </p>`;
    })}
  </section>`;

/** Return the text at a boundary; its ids if there is no text, and both if only the ids differ. */
function boundaryText(entry, name) {
  const [text, ids] = [entry[`${name}_text`], entry[`${name}_ids`].join(" ")];
  if (typeof text !== "string") return line(ids, 400);
  return line(entry.kind === "retokenized" ? `${JSON.stringify(text)} as ${ids}` : JSON.stringify(text), 400);
}
