// The two colour scales of tokens, mask and logprob, with their legend and the switch between them.
//
// Each scale has a second sign beside its colour (see tokens.css). The choice is kept for the tab.

import { keep, kept } from "./format.js";
import { html, useState } from "./html.js";

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
  return Math.max(0, BINS.findLastIndex((high) => logprob <= high));
}

/** Return the scale in use, and the function that switches to the other one. */
export function useColours() {
  const [way, setWay] = useState(kept("tokentape.colours") in WAYS ? kept("tokentape.colours") : "mask");
  const choose = (name) => {
    keep("tokentape.colours", name);
    setWay(name);
  };
  return { way, choose, turn: () => choose(way === "mask" ? "logprob" : "mask") };
}

/** Show the switch and the legend of a scale. */
export const Colours = ({ way, choose }) => html`
  <div class="switch">
    <span class="buttons" role="group" aria-label="Colour tokens (c)">
      ${Object.entries(WAYS).map(([name, title]) => html`
        <button type="button" aria-pressed=${String(name === way)} onclick=${() => choose(name)}>${title}</button>`)}
    </span>
    <ul class="legend" aria-label="Legend">${way === "mask" ? masks() : logprobs()}</ul>
  </div>`;

const masks = () => html`
  ${Object.entries(KINDS).map(([kind, meaning]) => html`<li><span class=${`t k-${kind}`}>token</span> ${meaning}</li>`)}
  <li><span class="t k-sampled span-start">token</span> a span begins</li>
  <li><span class="t k-prompt drift">token</span> drift: token ids differ from here</li>`;

const logprobs = () => html`
  <li class="unit">logprob (nats), likely → unlikely:</li>
  ${BINS.map((high, at) => {
    const text = at + 1 < BINS.length ? `${high} … ${BINS[at + 1]}` : `≤ ${high}`;
    return html`
      <li title=${`probability up to ${percent(Math.exp(high))}`}><span class=${`t k-sampled l-${at}`}>${text}</span></li>`;
  })}
  <li><span class="t k-prompt">token</span> none: prompt</li>`;

export function percent(value) {
  return `${Number((100 * value).toPrecision(3))} %`;
}
