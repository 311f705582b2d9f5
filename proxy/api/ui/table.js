// A table that is filtered, sorted and walked through by keys, of which only the rows in view are in the document.
//
// Holds the grid and its keyboard; what the columns are is its user's. A column: `key`, `title`, `cell(row)` (a node or a
// text), `sort(row)` (a number, a text or null; without it the column does not sort), `first` ("down": large ones first).

import { el, put } from "./dom.js";
import { Rows } from "./virtual.js";

const PAGE = 12;

export class Table {
  constructor({ name, label, columns, height, identity, open, href }) {
    Object.assign(this, { name, columns, height, identity, open, href });
    this.all = [];
    this.rows = [];
    this.wanted = () => true;
    this.sorted = { key: null, down: false };
    this.current = null; // the identity of the row that keys act on
    this.head = el("div", { class: `row head g-${name}`, role: "row" });
    this.scroller = el("div", { class: "scroller", role: "rowgroup" });
    this.empty = el("p", { class: "empty", hidden: true });
    const whole = { class: "table", tabindex: "0", role: "grid", "aria-label": label };
    this.element = el("div", { ...whole, onkeydown: (event) => this.key(event) }, this.head, this.scroller, this.empty);
    this.list = new Rows(this.scroller, height, (index) => this.row(index));
    this.drawHead();
  }

  drawHead() {
    put(
      this.head,
      this.columns.map((column) => {
        const on = this.sorted.key === column.key;
        const order = on ? (this.sorted.down ? "descending" : "ascending") : null;
        const mark = on ? (this.sorted.down ? " ▼" : " ▲") : "";
        const inner = column.sort
          ? el("button", { type: "button", onclick: () => this.sortBy(column) }, column.title + mark)
          : column.title;
        return el("div", { class: `cell c-${column.key}`, role: "columnheader", "aria-sort": order }, inner);
      }),
    );
  }

  /** Sort by a column: its own first order, then the other, then not at all. */
  sortBy(column) {
    const first = column.first === "down";
    if (this.sorted.key !== column.key) this.sorted = { key: column.key, down: first };
    else if (this.sorted.down === first) this.sorted = { key: column.key, down: !first };
    else this.sorted = { key: null, down: false };
    this.drawHead();
    this.refresh();
  }

  filter(wanted) {
    this.wanted = wanted;
    this.refresh();
  }

  fill(all) {
    this.all = all;
    this.refresh();
  }

  refresh() {
    this.rows = this.all.filter(this.wanted);
    const column = this.columns.find((one) => one.key === this.sorted.key);
    if (column) this.rows.sort(comparing(column.sort, this.sorted.down));
    this.element.setAttribute("aria-rowcount", String(this.rows.length));
    this.list.update(this.rows.length);
    this.mark();
  }

  /** What stands there while there are no rows. */
  say(sentence) {
    this.empty.textContent = sentence ?? "";
    this.empty.hidden = !sentence;
  }

  row(index) {
    const row = this.rows[index];
    const isCurrent = this.identity(row) === this.current;
    const cells = this.columns.map((column, at) => {
      const inner = column.cell(row);
      const link = at === 0 && this.href ? el("a", { href: this.href(row), tabindex: "-1" }, inner) : inner;
      return el("div", { class: `cell c-${column.key}`, role: "gridcell" }, link);
    });
    return el(
      "div",
      {
        id: `${this.name}-${index}`,
        class: `row g-${this.name}${isCurrent ? " current" : ""}`,
        role: "row",
        "aria-rowindex": index + 1,
        "aria-selected": String(isCurrent),
        onclick: (event) => {
          if (event.metaKey || event.ctrlKey || event.shiftKey) return; // a tab of its own: the link's business
          event.preventDefault();
          this.go(index);
          this.open(row);
        },
      },
      cells,
    );
  }

  place() {
    return this.rows.findIndex((row) => this.identity(row) === this.current);
  }

  mark() {
    const at = this.place();
    if (at < 0) this.element.removeAttribute("aria-activedescendant");
    else this.element.setAttribute("aria-activedescendant", `${this.name}-${at}`);
  }

  /** Make a row the current one and have it in view. */
  go(index) {
    if (this.rows.length === 0) return;
    const before = this.place();
    const at = Math.max(0, Math.min(this.rows.length - 1, index));
    this.current = this.identity(this.rows[at]);
    if (before >= 0) this.list.redraw(before);
    this.list.reveal(at);
    this.list.redraw(at);
    this.mark();
  }

  /** What a key does; whether it did anything. */
  key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return false;
    if (event.key === "Enter" && event.target.closest("button, a")) return false; // theirs
    const at = this.place();
    const moves = {
      j: at + 1,
      ArrowDown: at + 1,
      k: Math.max(at - 1, 0),
      ArrowUp: Math.max(at - 1, 0),
      Home: 0,
      End: this.rows.length - 1,
      PageDown: at + PAGE,
      PageUp: at - PAGE,
    };
    if (event.key in moves) this.go(moves[event.key]);
    else if (event.key === "Enter" && at >= 0) this.open(this.rows[at]);
    else return false;
    event.preventDefault();
    event.stopPropagation();
    return true;
  }
}

/** By a value of each row; what has none comes last, whichever way. */
function comparing(value, down) {
  return (one, other) => {
    const [a, b] = [value(one), value(other)];
    if (a === b) return 0;
    if (a === null || a === undefined) return 1;
    if (b === null || b === undefined) return -1;
    const order = typeof a === "string" ? a.localeCompare(b) : a - b;
    return down ? -order : order;
  };
}
