// A step: its facts, its messages, and its tokens with their kinds, spans and drift.

import { json, text } from "./api.js";
import { histogram } from "./charts.js";
import { count, decimal, duration, clock, el, hash, line, put } from "./dom.js";
import { status } from "./list.js";
import { conversation } from "./messages.js";
import { logprobCounts } from "./plots.js";
import { raw } from "./raw.js";
import { TokenView } from "./tokens.js";
import { continuationText, layout, order } from "./tree.js";

/** The tree that was shown last: it has the neighbours and the drift of a step. */
export const memory = { rolloutId: null, tree: null };

export function showStep(main, rolloutId, stepId, { fail }) {
  const place = el("div", {}, el("p", { class: "empty" }, "Loading the step…"));
  const around = el("span", { class: "buttons" });
  const context = { back: hash("rollout", rolloutId), end() {}, turn() {}, go() {}, next() {} };
  main.append(
    el(
      "p",
      { class: "path" },
      el("a", { href: "#/rollouts" }, "Rollouts"),
      " / ",
      el("a", { href: hash("rollout", rolloutId) }, line(rolloutId)),
      " / ",
    ),
    el("div", { class: "bar" }, el("h1", {}, "Step ", el("small", {}, line(stepId))), around),
    place,
  );
  void load();
  return context;

  async function load() {
    try {
      const source = await text(["rollouts", rolloutId, "steps", stepId]);
      if (!main.contains(place)) return;
      const step = JSON.parse(source);
      const mark = draw(step, source);
      if (memory.rolloutId !== rolloutId || !order(layout(memory.tree)).includes(stepId)) {
        Object.assign(memory, { rolloutId, tree: await json(["rollouts", rolloutId, "tree"]) });
      }
      const { nodes, unplaced } = memory.tree;
      mark(
        memory.tree.drift.filter((entry) => entry.step_id === stepId || entry.earlier_step_id === stepId),
        [...nodes, ...unplaced].find((node) => node.step_id === stepId)?.continuation,
      );
      neighbours(order(layout(memory.tree)));
    } catch (error) {
      fail(error);
    }
  }

  function neighbours(steps) {
    const index = steps.indexOf(stepId);
    context.go = (by) => {
      if (steps[index + by] !== undefined) location.hash = hash("rollout", rolloutId, "step", steps[index + by]);
    };
    put(
      around,
      el("button", { type: "button", disabled: index <= 0, title: "[", onclick: () => context.go(-1) }, "← earlier"),
      el(
        "button",
        { type: "button", disabled: index + 1 >= steps.length, title: "]", onclick: () => context.go(1) },
        "later →",
      ),
    );
  }

  /** Show the step; return the function that marks its drift and its continuation once the tree is loaded. */
  function draw(step, source) {
    const places = step.choices.map(() => new Map());
    const views = step.choices.map((choice, at) => tokenView(step, choice, places[at]));
    const continuationPlace = el("div");
    const driftPlace = el("div");
    context.next = () => {
      views[0]?.next();
      views[0]?.host.focus();
    };
    context.turn = () => views.forEach((view) => view.turn());
    put(
      place,
      facts(step),
      continuationPlace,
      driftPlace,
      raw(source, `step-${stepId}`),
      el("h2", {}, "Messages"),
      conversation(step),
      views
        .map((view, at) => [el("h2", {}, views.length > 1 ? `Tokens of choice ${at}` : "Tokens"), view.element])
        .flat(),
      views.length ? null : el("p", { class: "empty" }, "The engine returned no token ids for this call."),
      el("h2", {}, "Logprobs"),
      histogram(logprobCounts(step.choices.map((choice) => choice.logprobs))),
    );
    return (drift, continuation) => {
      if (continuation) put(continuationPlace, continued(continuation, rolloutId));
      if (drift.length) put(driftPlace, drifts(drift, rolloutId, stepId));
      step.choices.forEach((choice, at) => {
        for (const entry of drift) {
          const isOther = entry.step_id !== stepId && entry.earlier_choice !== choice.index;
          if (!isOther) places[at].set(entry.index, entry.kind);
        }
        if (places[at].size) views[at].blocks.redraw();
      });
    };
  }
}

/** Return the row of a choice: its prompt, then its completion. `places` has the kinds of drift by index, once loaded. */
function rowOf(step, choice, places) {
  const prompt = step.prompts ? step.prompts[choice.prompt] : (step.prompt_ids ?? []);
  const ids = [...prompt, ...choice.ids];
  const from = prompt.length;
  const isFlagged = !step.fidelity.exact || !step.delivered || step.late || step.status !== "complete";
  const spans = choice.spans.length
    ? choice.spans
    : [{ start: 0, end: choice.ids.length, policy_version: step.policy_version }];
  const starts = new Set(spans.filter((span) => span.end > span.start).map((span) => from + span.start));
  const spanAt = (at) => spans.find((span) => at - from >= span.start && at - from < span.end);
  return {
    ids,
    opening: from,
    kind: (at) => (at < from ? "prompt" : isFlagged ? "flagged" : "sampled"),
    logprob: (at) => (at < from ? null : (choice.logprobs[at - from] ?? null)),
    version: (at) => (at < from ? null : (spanAt(at)?.policy_version ?? step.policy_version)),
    span: (at) => {
      const span = at < from ? null : spanAt(at);
      return span ? `${from + span.start}–${from + span.end} (completion)` : `0–${from} (prompt)`;
    },
    spanStarts: (at) => starts.has(at),
    drift: (at) => (places.has(at) ? `${places.get(at)}: token ids differ from here` : null),
  };
}

function tokenView(step, choice, places) {
  const of = { rolloutId: step.rollout_id, stepId: step.step_id, choice: choice.index };
  return new TokenView(`Tokens of choice ${choice.index}`, rowOf(step, choice, places), of);
}

function facts(step) {
  const { timing } = step;
  const ms = (name) => (timing[name] === null ? null : 1000 * timing[name]);
  const took = (until) => (timing[until] === null ? null : ms(until) - (ms("sent") ?? ms("received")));
  const sampled = step.choices.reduce((sum, choice) => sum + choice.ids.length, 0);
  const versions = [...new Set([step.policy_version, step.policy_version_end])].filter((version) => version !== null);
  const prompted = (step.prompts ?? [step.prompt_ids ?? []]).reduce((sum, ids) => sum + ids.length, 0);
  const terms = [
    ["Status", [status(step.status), step.reason ? ` ${line(step.reason, 200)}` : ""]],
    [
      "Fidelity",
      step.fidelity.exact
        ? el("span", { class: "exact" }, "exact ✓")
        : el(
            "span",
            { class: "flagged" },
            `⚑ ${line(step.fidelity.why.join(" ") || step.fidelity.problems.join(", "), 600)}`,
          ),
    ],
    ["Delivered", step.delivered ? "yes" : el("span", { class: "flagged" }, "no")],
    ...(step.late ? [["Late", el("span", { class: "flagged" }, "the call ended after the rollout finished")]] : []),
    ["Tokens", `${count(prompted)} prompt tokens, ${count(sampled)} completion tokens`],
    ["Took", `${duration(took("last_byte"))}, first byte after ${duration(took("first_byte"))}`],
    ["Speed", took("last_byte") ? `${decimal((1000 * sampled) / took("last_byte"), 1)} tokens/s` : "–"],
    ["Policy version", line(versions.join(" → ") || "–")],
    ["Reward", Array.isArray(step.reward) ? `${step.reward.length} rewards, one per token` : decimal(step.reward)],
    ["Engine", line(`${step.engine.name} (${step.engine.kind} ${step.engine.version ?? ""})`)],
    ["Model", line(`${step.model.served ?? step.model.asked ?? "–"}`)],
    ["Dialect", `${line(step.dialect, 40)}, index ${count(step.index)}`],
    ["Received", `${clock(ms("received"))} UTC`],
  ];
  return el(
    "dl",
    { class: "facts" },
    terms.map(([term, value]) => el("div", {}, el("dt", {}, term), el("dd", {}, value))),
  );
}

function continued(continuation, rolloutId) {
  const { kept, step_id: earlier } = continuation;
  return el(
    "p",
    { class: kept === undefined ? "continuation forked" : "continuation" },
    line(continuationText(continuation), 400),
    earlier === undefined
      ? null
      : [" (", el("a", { href: hash("rollout", rolloutId, "step", earlier) }, "earlier step"), ")"],
  );
}

function drifts(drift, rolloutId, stepId) {
  return el(
    "section",
    { class: "drifts" },
    el("h2", {}, "Drift"),
    drift.map((entry) => {
      const other = entry.step_id === stepId ? entry.earlier_step_id : entry.step_id;
      return el(
        "p",
        {},
        el("b", {}, `◆ ${line(entry.kind, 40)}`),
        ` at token ${count(entry.index)}, compared with `,
        el("a", { href: hash("rollout", rolloutId, "step", other) }, line(other, 60)),
        el("br"),
        "expected ",
        el("code", {}, boundaryText(entry, "expected")),
        el("br"),
        "found ",
        el("code", {}, boundaryText(entry, "found")),
        entry.why === undefined || entry.step_id === stepId ? null : [el("br"), `not continued: ${line(entry.why, 400)}`],
      );
    }),
  );
}

/** Return the text at a boundary; its ids if there is no text, and both if only the ids differ. */
const boundaryText = (entry, name) => {
  const [text, ids] = [entry[`${name}_text`], entry[`${name}_ids`].join(" ")];
  if (typeof text !== "string") return line(ids, 400);
  return line(entry.kind === "retokenized" ? `${JSON.stringify(text)} as ${ids}` : JSON.stringify(text), 400);
};
