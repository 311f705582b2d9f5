// Small components that several views share.

import { ago, clock, count, line } from "./format.js";
import { html, useEffect, useState } from "./html.js";

const TAIL = 6;

export const Status = ({ of }) => html`<span class=${`status s-${of}`}>${line(String(of), 20)}</span>`;

/** Show an ID with both ends visible where space is short: many IDs begin alike. */
export function Ended({ text }) {
  const shown = line(text, 120);
  if (shown.length <= 2 * TAIL) return shown;
  const [head, tail] = [shown.slice(0, -TAIL), shown.slice(-TAIL)];
  return html`<span class="ended" title=${shown}><span>${head}</span><span>${tail}</span></span>`;
}

/** Show the age of a unix time in milliseconds, and keep it current. */
export function Since({ ms }) {
  const [, tick] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => tick((before) => before + 1), 1000);
    return () => clearInterval(timer);
  }, []);
  return html`<time title=${clock(ms)}>${ago(ms)}</time>`;
}

/** Show the numbers of exact and flagged steps; a dash if no step is either. */
export function Fidelity({ exact, flagged }) {
  if (!exact && !flagged) return html`<span class="dim" title="no exact and no flagged step">–</span>`;
  return html`
    <span class=${flagged ? "flagged" : "exact"} title=${`${exact} exact, ${flagged} flagged`}>
      ${flagged ? `${count(exact)} / ⚑ ${count(flagged)}` : `${count(exact)} ✓`}
    </span>`;
}

/** Return the number of drift boundaries of a rollout; null until it is counted. */
export const driftOf = ({ drift }) => (drift ? Object.values(drift).reduce((sum, number) => sum + number, 0) : null);
