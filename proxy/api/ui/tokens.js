// The tokens of a row: coloured, marked, inspected by pointer and keyboard. Only the tokens in view are in the document.
//
// `row` describes the tokens: `ids`, and functions of an index: `kind`, `logprob`, `version`, `span` (null or a text),
// `spanStarts`, `drift` (null or a text). `opening` is the index of the token at which the view opens.

import { json } from "./api.js";
import { bin, Colours, percent, useColours } from "./colours.js";
import { count, decimal, visible } from "./format.js";
import { html, useEffect, useKeys, useLayoutEffect, useMemo, useRef, useState } from "./html.js";
import { useBlocks } from "./virtual.js";

const BLOCK = 100; // tokens per block, so that the numbers in the margin are round
const ABOVE_PX = 70; // shown above the token at which a view opens
const WINDOW = 500; // texts that are requested at a time
const MAX_SHOWN = 200; // characters of a token; a hostile one may have a million

/** Show a row of tokens. `of` names the choice that provides the texts; `hasKeys`: shortcuts act on this view. */
export function TokenView({ label, row, of, hasKeys = true }) {
  const { way, choose, turn } = useColours();
  const [current, setCurrent] = useState(-1); // the token that keys act on
  const [inspected, setInspected] = useState(null);
  const [version, setVersion] = useState(0); // of the texts
  const texts = useMemo(() => new Texts(of, () => setVersion((before) => before + 1)), [of?.stepId, of?.choice]);
  const isOpening = useRef(row.opening < row.ids.length); // until the user scrolls elsewhere
  const goal = useRef(null); // the token to scroll to once it is in the document
  const list = useBlocks(Math.ceil(row.ids.length / BLOCK), 90);
  const { host, from, to } = list;
  useEffect(() => texts.need(from * BLOCK, Math.min(to * BLOCK, row.ids.length)), [from, to, texts]);
  useLayoutEffect(() => {
    const at = isOpening.current ? row.opening : goal.current;
    if (at === null) return;
    list.reveal(Math.floor(at / BLOCK));
    const token = host.current.querySelector(`#t-${at}`);
    if (token === null) return;
    const top = (element) => element.getBoundingClientRect().top;
    if (isOpening.current) host.current.scrollTop += top(token) - top(host.current) - ABOVE_PX;
    else token.scrollIntoView({ block: "nearest", inline: "nearest" });
    goal.current = null;
  });

  const leave = () => {
    isOpening.current = false;
  };
  const go = (index, isRevealed = true) => {
    const at = Math.max(0, Math.min(row.ids.length - 1, Math.trunc(index)));
    if (!Number.isFinite(at) || row.ids.length === 0) return;
    leave();
    if (isRevealed) goal.current = at;
    setCurrent(at);
    setInspected(at);
  };
  /** Go to the next token where a span begins or drift is; after the last one, start again. */
  const next = () => {
    const size = row.ids.length;
    host.current.focus({ preventScroll: true });
    for (let step = 1; step <= size; step += 1) {
      const at = (current + step) % size;
      if (row.spanStarts(at) || row.drift(at)) return go(at);
    }
  };
  const point = (isChosen) => (event) => {
    const token = event.target.closest("[data-i]");
    if (token !== null) (isChosen ? go : setInspected)(Number(token.dataset.i));
  };
  const key = (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const moves = {
      ArrowRight: current + 1,
      ArrowLeft: current - 1,
      ArrowDown: current + 10,
      ArrowUp: current - 10,
      PageDown: current + BLOCK,
      PageUp: current - BLOCK,
      Home: 0,
      End: row.ids.length - 1,
    };
    if (!(event.key in moves)) return;
    go(moves[event.key]);
    event.preventDefault();
    event.stopPropagation();
  };
  useKeys(hasKeys ? { c: turn, n: next } : {});
  const blocks = useMemo(
    () => Array.from({ length: to - from }, (_, at) => block(row, texts, from + at, current)),
    [row, texts, from, to, version, current],
  );
  return html`
    <section class="tokenview">
      <${Colours} way=${way} choose=${choose} />
      <div class="bar small">
        <span>${count(row.ids.length)} tokens</span>
        <input type="number" min="0" max=${row.ids.length - 1} class="jump" placeholder="go to token"
          aria-label="Go to token number" onchange=${({ target: { value } }) => value !== "" && go(Number(value))} />
        <button type="button" title="The next span or drift boundary (n)" onclick=${next}>next mark</button>
        <span class="source">${sourceOf(texts.sources)}</span>
      </div>
      <${Inspector} row=${row} texts=${texts} at=${inspected} />
      <div class="tokens" tabindex="0" role="listbox" aria-label=${label} data-way=${way} ref=${host}
        aria-activedescendant=${current < 0 ? null : `t-${current}`} onkeydown=${key} onwheel=${leave}
        onpointerdown=${leave} onpointerover=${point(false)} onclick=${point(true)}
        onfocus=${() => current < 0 && go(isOpening.current ? row.opening : 0, false)}>
        <div class="virtual" role="presentation" style=${list.whole}>
          <div role="presentation" style=${list.part} ref=${list.inner}>${blocks}</div>
        </div>
      </div>
    </section>`;
}

function block(row, texts, index, current) {
  const from = index * BLOCK;
  const size = Math.min(BLOCK, row.ids.length - from);
  return html`
    <div key=${index} class="block" role="presentation">
      <span class="gutter" aria-hidden="true">${from}</span>
      <div class="line" role="presentation">
        ${Array.from({ length: size }, (_, at) => token(row, texts, from + at, from + at === current))}
      </div>
    </div>`;
}

function token(row, texts, at, isCurrent) {
  const text = texts.at(at);
  const isText = typeof text === "string" && text !== "";
  const place = bin(row.logprob(at));
  const classes = ["t", `k-${row.kind(at)}`];
  if (place !== null) classes.push(`l-${place}`);
  if (row.spanStarts(at)) classes.push("span-start");
  if (row.drift(at)) classes.push("drift");
  if (!isText) classes.push("noid");
  if (isCurrent) classes.push("current");
  return html`<span key=${at} id=${`t-${at}`} class=${classes.join(" ")} data-i=${at} role="option"
    aria-label=${isText && text.trim() === "" ? "space" : null}
    aria-selected=${String(isCurrent)}>${isText ? shown(text) : row.ids[at]}</span>`;
}

/** Show all facts of one token. */
function Inspector({ row, texts, at }) {
  const facts = at === null ? [] : factsOf(row, texts.at(at), at);
  return html`
    <div class="inspector" aria-live="polite">
      ${at === null && "Point at a token or use the arrow keys."}
      ${facts.map(([term, value]) => html`<span class="fact" data-fact=${term}><b>${term}</b> <bdi>${value}</bdi></span>`)}
    </div>`;
}

function factsOf(row, text, at) {
  const logprob = row.logprob(at);
  const drift = row.drift(at);
  return [
    ["token", count(at)],
    ["id", row.ids[at]],
    ["text", typeof text === "string" ? JSON.stringify(visible(text.slice(0, 500))) : "unknown"],
    ["logprob", decimal(logprob, 4)],
    ["probability", typeof logprob === "number" ? percent(Math.exp(logprob)) : "–"],
    ["policy version", visible(String(row.version(at) ?? "–"))],
    ["mask", row.kind(at)],
    ["span", row.span(at) ?? "–"],
    ...(drift ? [["drift", drift]] : []),
    ...likelyFacts(row.likely?.(at) ?? null),
  ];
}

const MAX_LIKELY = 20; // tokens that are listed

/** Return the most likely tokens at a place and the entropy; if they are not all there are, its least value. */
function likelyFacts(likely) {
  if (likely === null) return [];
  const named = ([text, logprob]) => `${JSON.stringify(visible(text.slice(0, 40)))} ${percent(Math.exp(logprob))}`;
  const mass = likely.reduce((sum, [, logprob]) => sum + Math.exp(logprob), 0);
  const entropy = likely.reduce((sum, [, logprob]) => sum - Math.exp(logprob) * Math.max(logprob, -1e9), 0);
  return [
    ["entropy", `${mass < 0.999 ? "at least " : ""}${decimal(entropy, 3)} nats`],
    [`top ${likely.length}`, likely.slice(0, MAX_LIKELY).map(named).join(", ")],
  ];
}

/** Return the text of a token; a line break is shown as a sign, and breaks the line. */
export function shown(text) {
  const head = text.length > MAX_SHOWN ? `${text.slice(0, MAX_SHOWN)}…` : text;
  return visible(head).replace(/\n/g, "↵\n").replace(/\t/g, "⇥\t");
}

/** The texts of the whole row of a choice: `of` is `{rolloutId, stepId, choice}`, or null for a row without a choice. */
class Texts {
  constructor(of, changed) {
    this.of = of;
    this.changed = changed;
    this.known = new Map();
    this.requested = new Set();
    this.sources = new Set();
  }

  /** Return the text at an index: null if there is none, undefined if it is not loaded. */
  at(index) {
    return this.known.get(index);
  }

  /** Request the texts of the tokens from `from` to `to`. */
  need(from, to) {
    if (this.of === null) return;
    for (let start = from - (from % WINDOW); start < to; start += WINDOW) void this.load(start);
  }

  async load(start) {
    if (this.requested.has(start)) return;
    this.requested.add(start);
    const { rolloutId, stepId, choice } = this.of;
    try {
      const found = await json(["rollouts", rolloutId, "steps", stepId, "texts"], { choice, start, limit: WINDOW });
      found.texts.forEach((text, offset) => this.known.set(start + offset, text));
      for (const source of found.sources) this.sources.add(source);
    } catch {
      this.sources.add("none"); // the ids are shown instead
    }
    this.changed();
  }
}

const MEANINGS = {
  recorded: "recorded by the engine with the logprobs",
  tokenizer: "from the configured tokenizer",
  engine: "from the engine's detokenizer",
  none: "not available; token ids are shown",
};

/** Return a sentence that names the sources of the texts. */
function sourceOf(sources) {
  return sources.size ? `Texts: ${[...sources].map((source) => MEANINGS[source] ?? source).join("; ")}.` : "";
}
