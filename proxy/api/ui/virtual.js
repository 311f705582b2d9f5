// Lists of which only the part in view is in the document: rows of equal height, and blocks that are measured when shown.

import { el } from "./dom.js";

const SPARE_PX = 300; // shown beyond either edge, so that scrolling finds rows there

/** Rows of equal height. `render(index)` creates a row. */
export class Rows {
  constructor(host, height, render) {
    this.host = host;
    this.height = height;
    this.render = render;
    this.size = 0;
    this.shown = new Map();
    this.inner = el("div", { class: "virtual", role: "presentation" });
    host.append(this.inner);
    host.addEventListener("scroll", () => this.draw(), { passive: true });
    this.watch = new ResizeObserver(() => this.draw());
    this.watch.observe(host);
  }

  /** Set the number of rows and render them again. */
  update(size) {
    this.size = size;
    this.inner.style.height = `${size * this.height}px`;
    for (const row of this.shown.values()) row.remove();
    this.shown.clear();
    this.draw();
  }

  draw() {
    const top = this.host.scrollTop - SPARE_PX;
    const bottom = this.host.scrollTop + this.host.clientHeight + SPARE_PX;
    const from = Math.max(0, Math.floor(top / this.height));
    const to = Math.min(this.size, Math.ceil(bottom / this.height));
    for (const [index, row] of this.shown) {
      if (index < from || index >= to) {
        row.remove();
        this.shown.delete(index);
      }
    }
    for (let index = from; index < to; index += 1) {
      if (this.shown.has(index)) continue;
      const row = this.render(index);
      row.style.transform = `translateY(${index * this.height}px)`;
      row.style.height = `${this.height}px`;
      this.shown.set(index, row);
      this.inner.append(row);
    }
  }

  /** Render one row again if it is in view. */
  redraw(index) {
    const row = this.shown.get(index);
    if (row === undefined) return;
    row.remove();
    this.shown.delete(index);
    this.draw();
  }

  /** Scroll a row into view, by the shortest way. */
  reveal(index) {
    const top = index * this.height;
    const { scrollTop, clientHeight } = this.host;
    if (top < scrollTop) this.host.scrollTop = top;
    else if (top + this.height > scrollTop + clientHeight) this.host.scrollTop = top + this.height - clientHeight;
    this.draw();
  }
}

/** Blocks of any height, one below the other. `render(index)` creates a block. */
export class Blocks {
  constructor(host, size, guess, render) {
    this.host = host;
    this.size = size;
    this.guess = guess;
    this.render = render;
    this.heights = new Float64Array(size); // 0: not measured yet
    this.shown = new Map();
    this.inner = el("div", { class: "virtual", role: "presentation" });
    host.append(this.inner);
    host.addEventListener("scroll", () => this.draw(), { passive: true });
    this.watch = new ResizeObserver(() => {
      if (host.clientWidth !== this.width) this.heights.fill(0); // lines break elsewhere
      this.width = host.clientWidth;
      this.draw();
    });
    this.watch.observe(host);
  }

  height(index) {
    return this.heights[index] || this.guess;
  }

  draw() {
    for (let round = 0; round < 4; round += 1) {
      if (!this.place()) return;
    }
  }

  /** Show and place the blocks in view; return whether measured heights differ, so that it must be repeated. */
  place() {
    const view = this.host.scrollTop;
    const bottom = view + this.host.clientHeight + SPARE_PX;
    let top = 0;
    let from = 0;
    while (from < this.size - 1 && top + this.height(from) < view - SPARE_PX) top += this.height(from++);
    const first = top;
    let to = from;
    for (; to < this.size && (top < bottom || to === from); to += 1) {
      if (!this.shown.has(to)) {
        const block = this.render(to);
        this.shown.set(to, block);
        this.inner.append(block);
      }
      top += this.height(to);
    }
    for (const [index, block] of this.shown) {
      if (index < from || index >= to) {
        block.remove();
        this.shown.delete(index);
      }
    }
    return this.settle(from, to, first, view);
  }

  settle(from, to, first, view) {
    let changed = false;
    let above = 0;
    let top = first;
    for (let index = from; index < to; index += 1) {
      const known = this.height(index);
      const found = this.shown.get(index).offsetHeight;
      if (found && found !== this.heights[index]) {
        if (top + known <= view) above += found - known;
        changed ||= found !== known;
        this.heights[index] = found;
      }
      top += known;
    }
    top = first;
    for (let index = from; index < to; index += 1) {
      this.shown.get(index).style.transform = `translateY(${top}px)`;
      top += this.height(index);
    }
    let whole = 0;
    for (let index = 0; index < this.size; index += 1) whole += this.height(index);
    this.inner.style.height = `${whole}px`;
    if (above) this.host.scrollTop = view + above; // keep what is visible in place
    return changed;
  }

  /** Render the blocks in view again. */
  redraw() {
    for (const [index, block] of this.shown) {
      const rendered = this.render(index);
      block.replaceWith(rendered);
      this.shown.set(index, rendered);
      this.heights[index] = 0;
    }
    this.draw();
  }

  /** Scroll a block to the top if it is not in view, and return it. */
  reveal(index) {
    if (!this.shown.has(index)) {
      let top = 0;
      for (let before = 0; before < index; before += 1) top += this.height(before);
      this.host.scrollTop = top;
      this.draw();
    }
    return this.shown.get(index);
  }
}
