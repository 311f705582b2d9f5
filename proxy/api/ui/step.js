// A step: its facts, its messages, and its tokens.
//
// Holds what a step's JSON means to the view of tokens: which were given and which sampled, the spans, and where drift is.

import { json, text } from "./api.js";
import { histogram } from "./charts.js";
import { count, decimal, duration, clock, el, hash, line, put } from "./dom.js";
import { status } from "./list.js";
import { conversation } from "./messages.js";
import { logprobCounts } from "./plots.js";
import { raw } from "./raw.js";
import { TokenView } from "./tokens.js";
import { layout, order } from "./tree.js";

/** The tree that was looked at last: a step's neighbours and its drift are in it. */
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
      const spelt = await text(["rollouts", rolloutId, "steps", stepId]);
      if (!main.contains(place)) return;
      const step = JSON.parse(spelt);
      const mark = draw(step, spelt);
      if (memory.rolloutId !== rolloutId || !order(layout(memory.tree)).includes(stepId)) {
        Object.assign(memory, { rolloutId, tree: await json(["rollouts", rolloutId, "tree"]) });
      }
      mark(memory.tree.drift.filter((one) => one.step_id === stepId || one.earlier_step_id === stepId));
      neighbours(order(layout(memory.tree)));
    } catch (error) {
      fail(error);
    }
  }

  function neighbours(steps) {
    const at = steps.indexOf(stepId);
    context.go = (by) => {
      if (steps[at + by] !== undefined) location.hash = hash("rollout", rolloutId, "step", steps[at + by]);
    };
    put(
      around,
      el("button", { type: "button", disabled: at <= 0, title: "[", onclick: () => context.go(-1) }, "← earlier"),
      el(
        "button",
        { type: "button", disabled: at + 1 >= steps.length, title: "]", onclick: () => context.go(1) },
        "later →",
      ),
    );
  }

  /** Show the step; gives what marks drift in it, which is known later: it takes the tree. */
  function draw(step, spelt) {
    const places = step.choices.map(() => new Map());
    const views = step.choices.map((choice, at) => tokenView(step, choice, places[at]));
    const told = el("div");
    context.next = () => {
      views[0]?.next();
      views[0]?.host.focus();
    };
    context.turn = () => views.forEach((view) => view.turn());
    put(
      place,
      facts(step),
      told,
      raw(spelt, `step-${stepId}`),
      el("h2", {}, "Messages"),
      conversation(step),
      views
        .map((view, at) => [el("h2", {}, views.length > 1 ? `Tokens of choice ${at}` : "Tokens"), view.element])
        .flat(),
      views.length ? null : el("p", { class: "empty" }, "The engine told no token ids for this call."),
      el("h2", {}, "Logprobs"),
      histogram(logprobCounts(step.choices.map((choice) => choice.logprobs))),
    );
    return (drift) => {
      if (drift.length) put(told, drifts(drift, rolloutId, stepId));
      step.choices.forEach((choice, at) => {
        for (const one of drift) {
          const isOther = one.step_id !== stepId && one.earlier_choice !== choice.index;
          if (!isOther) places[at].set(one.index, one.kind);
        }
        if (places[at].size) views[at].blocks.redraw();
      });
    };
  }
}

/** The row of a choice: its prompt, then what was sampled. `places`: kinds of drift by place, as they become known. */
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
    kind: (at) => (at < from ? "given" : isFlagged ? "flagged" : "sampled"),
    logprob: (at) => (at < from ? null : (choice.logprobs[at - from] ?? null)),
    version: (at) => (at < from ? null : (spanAt(at)?.policy_version ?? step.policy_version)),
    span: (at) => {
      const span = at < from ? null : spanAt(at);
      return span ? `${from + span.start}–${from + span.end} (sampled)` : `0–${from} (prompt)`;
    },
    spanStarts: (at) => starts.has(at),
    drift: (at) => (places.has(at) ? `${places.get(at)}: ids part here` : null),
  };
}

function tokenView(step, choice, places) {
  const of = { rolloutId: step.rollout_id, stepId: step.step_id, choice: choice.index };
  return new TokenView(`Tokens of choice ${choice.index}`, rowOf(step, choice, places), of);
}

function facts(step) {
  const { timing } = step;
  const ms = (one) => (timing[one] === null ? null : 1000 * timing[one]);
  const took = (until) => (timing[until] === null ? null : ms(until) - (ms("sent") ?? ms("received")));
  const sampled = step.choices.reduce((sum, choice) => sum + choice.ids.length, 0);
  const versions = [...new Set([step.policy_version, step.policy_version_end])].filter((one) => one !== null);
  const prompts = step.prompts ?? [step.prompt_ids ?? []];
  const told = [
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
    ...(step.late ? [["Late", el("span", { class: "flagged" }, "it ended after the rollout was finished")]] : []),
    ["Tokens", `${count(prompts.reduce((sum, one) => sum + one.length, 0))} given, ${count(sampled)} sampled`],
    ["Took", `${duration(took("last_byte"))}, first byte after ${duration(took("first_byte"))}`],
    ["Speed", took("last_byte") ? `${decimal((1000 * sampled) / took("last_byte"), 1)} tokens/s` : "–"],
    ["Policy version", line(versions.join(" → ") || "–")],
    ["Reward", Array.isArray(step.reward) ? `${step.reward.length} rewards, one a token` : decimal(step.reward)],
    ["Engine", line(`${step.engine.name} (${step.engine.kind} ${step.engine.version ?? ""})`)],
    ["Model", line(`${step.model.served ?? step.model.asked ?? "–"}`)],
    ["Dialect", `${line(step.dialect, 40)}, index ${count(step.index)}`],
    ["Received", `${clock(ms("received"))} UTC`],
  ];
  return el(
    "dl",
    { class: "facts" },
    told.map(([term, value]) => el("div", {}, el("dt", {}, term), el("dd", {}, value))),
  );
}

function drifts(drift, rolloutId, stepId) {
  return el(
    "section",
    { class: "drifts" },
    el("h2", {}, "Drift"),
    drift.map((one) => {
      const other = one.step_id === stepId ? one.earlier_step_id : one.step_id;
      return el(
        "p",
        {},
        el("b", {}, `◆ ${line(one.kind, 40)}`),
        ` at token ${count(one.index)}, against `,
        el("a", { href: hash("rollout", rolloutId, "step", other) }, line(other, 60)),
        el("br"),
        "expected ",
        el("code", {}, told(one, "expected")),
        el("br"),
        "found ",
        el("code", {}, told(one, "found")),
      );
    }),
  );
}

/** The text at a boundary; its ids where there is none, and below it where the ids alone differ. */
const told = (one, name) => {
  const [text, ids] = [one[`${name}_text`], one[`${name}_ids`].join(" ")];
  if (typeof text !== "string") return line(ids, 400);
  return line(one.kind === "retokenized" ? `${JSON.stringify(text)} as ${ids}` : JSON.stringify(text), 400);
};
