// The tokens of a row: coloured, marked, inspected by pointer and keyboard. Only the tokens in view are in the document.
//
// `row` describes the tokens: `ids`, and functions of an index: `kind`, `logprob`, `version`, `span` (null or a text),
// `spanStarts`, `drift` (null or a text). `opening` is the index of the token at which the view opens.

import { bin, percent, switcher } from "./colours.js";
import { count, decimal, el, put, visible } from "./dom.js";
import { sourceOf, Texts } from "./texts.js";
import { Blocks } from "./virtual.js";

const BLOCK = 100; // tokens per block, so that the numbers in the margin are round
const ABOVE_PX = 70; // shown above the token at which a view opens
const MAX_SHOWN = 200; // characters of a token; a hostile one may have a million

export class TokenView {
  constructor(label, row, of) {
    this.row = row;
    this.current = -1; // the token that keys act on
    this.inspected = null; // the token that the inspector shows
    this.opening = row.opening < row.ids.length ? row.opening : null; // until the user scrolls elsewhere
    this.inspector = el(
      "div",
      { class: "inspector", "aria-live": "polite" },
      "Point at a token or use the arrow keys.",
    );
    this.source = el("span", { class: "source" });
    this.host = el("div", {
      class: "tokens",
      tabindex: "0",
      role: "listbox",
      "aria-label": label,
      onkeydown: (event) => this.key(event),
      onwheel: () => this.leave(),
      onpointerdown: () => this.leave(),
      onpointerover: (event) => this.point(event),
      onclick: (event) => this.point(event, true),
      onfocus: () => this.current < 0 && this.go(this.opening ?? 0, false),
    });
    const colours = switcher(this.host);
    this.turn = colours.turn;
    const jump = el("input", {
      type: "number",
      min: "0",
      max: String(row.ids.length - 1),
      class: "jump",
      placeholder: "go to token",
      "aria-label": "Go to token number",
      onchange: () => jump.value !== "" && this.go(Number(jump.value)),
    });
    const next = el(
      "button",
      { type: "button", title: "The next span or drift boundary (n)", onclick: () => this.next() },
      "next mark",
    );
    this.element = el(
      "section",
      { class: "tokenview" },
      colours.element,
      el("div", { class: "bar small" }, el("span", {}, `${count(row.ids.length)} tokens`), jump, next, this.source),
      this.inspector,
      this.host,
    );
    const changed = () => {
      this.blocks.redraw();
      this.open();
      if (this.inspected !== null) this.inspect(this.inspected);
    };
    const showSources = (sources) => {
      this.source.textContent = sourceOf(sources);
    };
    this.texts = new Texts(of, changed, showSources);
    this.blocks = new Blocks(this.host, Math.ceil(row.ids.length / BLOCK), 90, (index) => this.block(index));
    new ResizeObserver(() => this.open()).observe(this.host); // after the blocks have measured their heights again
  }

  /** Scroll to the token at which the view opens: the first sampled one, after a prompt that may be long. */
  open() {
    if (this.opening === null) return;
    const token = this.blocks.reveal(Math.floor(this.opening / BLOCK))?.querySelector(`#t-${this.opening}`);
    const top = (element) => element.getBoundingClientRect().top;
    if (token) this.host.scrollTop += top(token) - top(this.host) - ABOVE_PX;
  }

  leave() {
    this.opening = null;
  }

  block(index) {
    const from = index * BLOCK;
    const to = Math.min(from + BLOCK, this.row.ids.length);
    this.texts.need(from, to);
    const tokens = [];
    for (let at = from; at < to; at += 1) tokens.push(this.token(at));
    return el(
      "div",
      { class: "block", role: "presentation" },
      el("span", { class: "gutter", "aria-hidden": "true" }, String(from)),
      el("div", { class: "line", role: "presentation" }, tokens),
    );
  }

  token(at) {
    const { row } = this;
    const text = this.texts.at(at);
    const isText = typeof text === "string" && text !== "";
    const place = bin(row.logprob(at));
    const classes = ["t", `k-${row.kind(at)}`];
    if (place !== null) classes.push(`l-${place}`);
    if (row.spanStarts(at)) classes.push("span-start");
    if (row.drift(at)) classes.push("drift");
    if (!isText) classes.push("noid");
    if (at === this.current) classes.push("current");
    return el(
      "span",
      {
        id: `t-${at}`,
        class: classes.join(" "),
        "data-i": at,
        role: "option",
        "aria-selected": String(at === this.current),
      },
      isText ? shown(text) : String(row.ids[at]),
    );
  }

  point(event, isChosen = false) {
    const token = event.target.closest("[data-i]");
    if (token === null) return;
    if (isChosen) this.go(Number(token.dataset.i));
    else this.inspect(Number(token.dataset.i));
  }

  /** Show all facts of one token. */
  inspect(at) {
    const { row } = this;
    this.inspected = at;
    const text = this.texts.at(at);
    const logprob = row.logprob(at);
    const facts = [
      ["token", count(at)],
      ["id", String(row.ids[at])],
      ["text", typeof text === "string" ? JSON.stringify(visible(text.slice(0, 500))) : "unknown"],
      ["logprob", decimal(logprob, 4)],
      ["probability", typeof logprob === "number" ? percent(Math.exp(logprob)) : "–"],
      ["policy version", visible(String(row.version(at) ?? "–"))],
      ["mask", row.kind(at)],
      ["span", row.span(at) ?? "–"],
    ];
    const drift = row.drift(at);
    if (drift) facts.push(["drift", drift]);
    put(
      this.inspector,
      facts.map(([term, value]) =>
        el("span", { class: "fact", "data-fact": term }, el("b", {}, term), " ", el("bdi", {}, value)),
      ),
    );
  }

  /** Make a token the current one and, with `reveal`, scroll it into view. */
  go(index, reveal = true) {
    const at = Math.max(0, Math.min(this.row.ids.length - 1, Math.trunc(index)));
    if (!Number.isFinite(at) || this.row.ids.length === 0) return;
    this.mark(this.current, false);
    this.current = at;
    this.leave();
    if (reveal) {
      const token = this.blocks.reveal(Math.floor(at / BLOCK))?.querySelector(`#t-${at}`);
      token?.scrollIntoView({ block: "nearest", inline: "nearest" });
    }
    this.mark(at, true);
    this.host.setAttribute("aria-activedescendant", `t-${at}`);
    this.inspect(at);
  }

  mark(at, isCurrent) {
    const token = this.host.querySelector(`#t-${at}`);
    token?.classList.toggle("current", isCurrent);
    token?.setAttribute("aria-selected", String(isCurrent));
  }

  /** Go to the next token where a span begins or drift is; after the last one, start again. */
  next() {
    const size = this.row.ids.length;
    for (let step = 1; step <= size; step += 1) {
      const at = (this.current + step) % size;
      if (this.row.spanStarts(at) || this.row.drift(at)) return this.go(at);
    }
  }

  key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const at = this.current;
    const moves = {
      ArrowRight: at + 1,
      ArrowLeft: at - 1,
      ArrowDown: at + 10,
      ArrowUp: at - 10,
      PageDown: at + BLOCK,
      PageUp: at - BLOCK,
      Home: 0,
      End: this.row.ids.length - 1,
    };
    if (event.key in moves) this.go(moves[event.key]);
    else if (event.key === "n") this.next();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

/** Return the text of a token; a line break is shown as a sign, and breaks the line. */
function shown(text) {
  const head = text.length > MAX_SHOWN ? `${text.slice(0, MAX_SHOWN)}…` : text;
  return visible(head).replace(/\n/g, "↵\n").replace(/\t/g, "⇥\t");
}
