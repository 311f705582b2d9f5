// The tokens of a row: coloured, marked, inspected by pointer and keyboard. Only the tokens in view are in the document.
//
// `row` describes the tokens: `ids`, and functions of an index: `kind`, `logprob`, `version`, `span` (null or a text),
// `spanStarts`, `drift` (null or a text). `opening` is the index of the token at which the view opens.

import { bin, Colours, percent, useColours } from "./colours.js";
import { count, decimal, visible } from "./format.js";
import { html, useEffect, useKeys, useLayoutEffect, useMemo, useRef, useState } from "./html.js";
import { sourceOf, Texts } from "./texts.js";
import { useBlocks } from "./virtual.js";

const BLOCK = 100; // tokens per block, so that the numbers in the margin are round
const ABOVE_PX = 70; // shown above the token at which a view opens
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
  ];
}

/** Return the text of a token; a line break is shown as a sign, and breaks the line. */
function shown(text) {
  const head = text.length > MAX_SHOWN ? `${text.slice(0, MAX_SHOWN)}…` : text;
  return visible(head).replace(/\n/g, "↵\n").replace(/\t/g, "⇥\t");
}
