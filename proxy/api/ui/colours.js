// The two colour scales of tokens, mask and logprob, with their legend and the switch between them.
//
// Each scale has a second sign beside its colour (see tokens.css). The choice is kept for the tab.

import { el, keep, kept, put } from "./dom.js";

/** Upper ends of the bins, in nats: bin i holds logprobs above BINS[i + 1], up to BINS[i]. */
export const BINS = [0, -0.05, -0.2, -0.5, -1, -2, -4, -8];

export const KINDS = {
  sampled: "sampled here: trained",
  context: "sampled, trained in another row",
  flagged: "flagged: trained only with include=flagged",
  prompt: "prompt: not trained",
};

const WAYS = { mask: "by mask", logprob: "by logprob" };

/** Return the bin of a logprob; null for none. */
export function bin(logprob) {
  if (typeof logprob !== "number") return null;
  let at = 0;
  while (at + 1 < BINS.length && logprob <= BINS[at + 1]) at += 1;
  return at;
}

export function way() {
  const found = kept("tokentape.colours");
  return found in WAYS ? found : "mask";
}

/** Return the switch and the legend of an element that shows tokens. */
export function switcher(shown) {
  const legend = el("ul", { class: "legend", "aria-label": "Legend" });
  const buttons = Object.entries(WAYS).map(([name, title]) =>
    el("button", { type: "button", "data-way": name, onclick: () => choose(name) }, title),
  );
  function choose(name) {
    keep("tokentape.colours", name);
    shown.dataset.way = name;
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.way === name));
    put(legend, name === "mask" ? masks() : logprobs());
  }
  choose(way());
  const turn = () => choose(shown.dataset.way === "mask" ? "logprob" : "mask");
  const element = el(
    "div",
    { class: "switch" },
    el("span", { class: "buttons", role: "group", "aria-label": "Colour tokens (c)" }, buttons),
    legend,
  );
  return { element, turn };
}

function masks() {
  const kinds = Object.entries(KINDS).map(([kind, meaning]) =>
    el("li", {}, el("span", { class: `t k-${kind}` }, "token"), ` ${meaning}`),
  );
  return [
    ...kinds,
    el("li", {}, el("span", { class: "t k-sampled span-start" }, "token"), " a span begins"),
    el("li", {}, el("span", { class: "t k-prompt drift" }, "token"), " drift: token ids differ from here"),
  ];
}

function logprobs() {
  const ends = BINS.map((high, at) => {
    const low = BINS[at + 1];
    const text = low === undefined ? `≤ ${high}` : `${high} … ${low}`;
    const chance = `${percent(Math.exp(high))}`;
    return el("li", { title: `probability up to ${chance}` }, el("span", { class: `t k-sampled l-${at}` }, text));
  });
  return [
    el("li", { class: "unit" }, "logprob (nats), likely → unlikely:"),
    ...ends,
    el("li", {}, el("span", { class: "t k-prompt" }, "token"), " none: prompt"),
  ];
}

export function percent(value) {
  return `${Number((100 * value).toPrecision(3))} %`;
}
