// A table with filters, sorting and keyboard navigation; only the rows in view are in the document.
//
// A column has `key`, `title`, `cell(row)` (a node or a text), `sort(row)` (a number, a text or null; without it the column is
// not sortable) and `first` ("down": sort in descending order first).

import { el, put } from "./dom.js";
import { Rows } from "./virtual.js";

const PAGE = 12;

export class Table {
  constructor({ name, label, columns, height, identity, open, href }) {
    Object.assign(this, { name, columns, height, identity, open, href });
    this.all = [];
    this.rows = [];
    this.matches = () => true;
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

  /** Sort by a column: in its first order, then in the reverse order, then not at all. */
  sortBy(column) {
    const first = column.first === "down";
    if (this.sorted.key !== column.key) this.sorted = { key: column.key, down: first };
    else if (this.sorted.down === first) this.sorted = { key: column.key, down: !first };
    else this.sorted = { key: null, down: false };
    this.drawHead();
    this.refresh();
  }

  filter(matches) {
    this.matches = matches;
    this.refresh();
  }

  fill(all) {
    this.all = all;
    this.refresh();
  }

  refresh() {
    this.rows = this.all.filter(this.matches);
    const column = this.columns.find((candidate) => candidate.key === this.sorted.key);
    if (column) this.rows.sort(comparing(column.sort, this.sorted.down));
    this.element.setAttribute("aria-rowcount", String(this.rows.length));
    this.list.update(this.rows.length);
    this.mark();
  }

  /** Show a message in place of rows; null hides it. */
  showMessage(message) {
    this.empty.textContent = message ?? "";
    this.empty.hidden = !message;
  }

  row(index) {
    const row = this.rows[index];
    const isCurrent = this.identity(row) === this.current;
    const cells = this.columns.map((column, position) => {
      const inner = column.cell(row);
      const link = position === 0 && this.href ? el("a", { href: this.href(row), tabindex: "-1" }, inner) : inner;
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
          if (event.metaKey || event.ctrlKey || event.shiftKey) return; // the browser opens the link in a new tab
          event.preventDefault();
          this.go(index);
          this.open(row);
        },
      },
      cells,
    );
  }

  currentIndex() {
    return this.rows.findIndex((row) => this.identity(row) === this.current);
  }

  mark() {
    const index = this.currentIndex();
    if (index < 0) this.element.removeAttribute("aria-activedescendant");
    else this.element.setAttribute("aria-activedescendant", `${this.name}-${index}`);
  }

  /** Make a row the current one and scroll it into view. */
  go(wantedIndex) {
    if (this.rows.length === 0) return;
    const before = this.currentIndex();
    const index = Math.max(0, Math.min(this.rows.length - 1, wantedIndex));
    this.current = this.identity(this.rows[index]);
    if (before >= 0) this.list.redraw(before);
    this.list.reveal(index);
    this.list.redraw(index);
    this.mark();
  }

  /** Handle a key; return whether it had an effect. */
  key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return false;
    if (event.key === "Enter" && event.target.closest("button, a")) return false; // the element handles it
    const index = this.currentIndex();
    const moves = {
      j: index + 1,
      ArrowDown: index + 1,
      k: Math.max(index - 1, 0),
      ArrowUp: Math.max(index - 1, 0),
      Home: 0,
      End: this.rows.length - 1,
      PageDown: index + PAGE,
      PageUp: index - PAGE,
    };
    if (event.key in moves) this.go(moves[event.key]);
    else if (event.key === "Enter" && index >= 0) this.open(this.rows[index]);
    else return false;
    event.preventDefault();
    event.stopPropagation();
    return true;
  }
}

/** Compare rows by a value; rows without one come last in both orders. */
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
