// A table with sorting and keyboard navigation; only the rows in view are in the document.
//
// A column has `key`, `title`, `cell(row)` (a node or a text), `sort(row)` (a number, a text or null; without it the column is
// not sortable), `first` ("down": sort in descending order first) and `from` ("desk" or "tablet": the least screen with it).

import { line } from "./format.js";
import { html, useKeys, useLayoutEffect, useMemo, useRef, useState } from "./html.js";
import { useRows } from "./virtual.js";

const PAGE = 12;

/** Return the identities of selected rows, and the functions that change them. */
export function useSelected() {
  const [names, setNames] = useState(new Set());
  const choose = (some, isOn) =>
    setNames((before) => (isOn ? new Set([...before, ...some]) : new Set([...before].filter((name) => !some.includes(name)))));
  return { names, choose, clear: () => setNames(new Set()) };
}

/** `rows` are shown in their order unless a column is sorted. `keepsEnd`: at its end the list follows new rows.
 *
 * `order`: the sorted column, `key` or `-key`, and the function that changes it; by default the table keeps it. `selection`: of
 * `useSelected`, if rows can be selected.
 */
export function Table(properties) {
  const { name, label, columns, rows, height = 34, identity, open, href, message, keepsEnd = false, style } = properties;
  const own = useState("");
  const [order, setOrder] = properties.order ?? own;
  const { selection } = properties;
  const sorted = useMemo(() => ({ key: order.replace(/^-/, "") || null, down: order.startsWith("-") }), [order]);
  const [current, setCurrent] = useState(null); // the identity of the row that keys act on
  const column = columns.find(({ key }) => key === sorted.key);
  const shown = useMemo(() => (column ? [...rows].sort(comparing(column.sort, sorted.down)) : rows), [rows, sorted]);
  const list = useRows(shown.length, height);
  const element = useRef(null);
  const at = shown.findIndex((row) => identity(row) === current);
  useFollowing(list.host, keepsEnd, rows);

  function go(wanted) {
    if (shown.length === 0) return;
    const index = Math.max(0, Math.min(shown.length - 1, wanted));
    setCurrent(identity(shown[index]));
    list.reveal(index);
  }
  const moving = (wanted) => () => {
    element.current.focus({ preventScroll: true });
    go(wanted());
  };
  const next = moving(() => at + 1);
  const previous = moving(() => Math.max(at - 1, 0));
  useKeys({
    j: next,
    ArrowDown: next,
    k: previous,
    ArrowUp: previous,
    Home: moving(() => 0),
    End: moving(() => shown.length - 1),
    PageDown: moving(() => at + PAGE),
    PageUp: moving(() => at - PAGE),
    Enter: () => at >= 0 && open(shown[at]),
    ...(selection && { x: () => at >= 0 && selection.choose([current], !selection.names.has(current)) }),
  });
  const visible = shown.slice(list.from, list.to).map((row, offset) => {
    const index = list.from + offset;
    const isCurrent = index === at;
    return html`
      <div key=${identity(row)} id=${`${name}-${index}`} class=${`row g-${name}${isCurrent ? " current" : ""}`}
        role="row" aria-rowindex=${index + 1} aria-selected=${String(isCurrent)} style=${`height: ${height}px`}
        onclick=${(event) => {
          if (event.metaKey || event.ctrlKey || event.shiftKey) return; // the browser opens the link in a new tab
          event.preventDefault();
          go(index);
          open(row);
        }}>
        ${selection && html`
          <div class="cell c-select from-tablet" role="gridcell" onclick=${(event) => event.stopPropagation()}>
            <label><input type="checkbox" tabindex="-1" aria-label=${`Select ${line(String(identity(row)), 60)}`}
              checked=${selection.names.has(identity(row))}
              onchange=${(event) => selection.choose([identity(row)], event.target.checked)} /></label>
          </div>`}
        ${columns.map(({ key, cell, from }, position) => {
          const inner = cell(row);
          const link = position === 0 && href ? html`<a href=${href(row)} tabindex="-1">${inner}</a>` : inner;
          return html`<div key=${key} class=${`cell c-${key} from-${from}`} role="gridcell">${link}</div>`;
        })}
      </div>`;
  });
  const isAll = selection && shown.length > 0 && shown.every((row) => selection.names.has(identity(row)));
  return html`
    <div class=${selection ? "table selects" : "table"} tabindex="0" role="grid" style=${style} ref=${element}
      aria-label=${label} aria-rowcount=${shown.length}
      aria-activedescendant=${at < 0 ? null : `${name}-${at}`}>
      <div class=${`row head g-${name}`} role="row">
        ${selection && html`
          <div class="cell c-select from-tablet" role="columnheader">
            <label><input type="checkbox" aria-label=${`Select all ${shown.length} rows`} checked=${isAll}
              onchange=${(event) => selection.choose(shown.map(identity), event.target.checked)} /></label>
          </div>`}
        ${columns.map((each) => html`<${Head} key=${each.key} column=${each} sorted=${sorted} choose=${setOrder} />`)}
      </div>
      <div class="scroller" role="rowgroup" ref=${list.host}>
        <div class="virtual" role="presentation" style=${list.whole}>
          <div role="presentation" style=${list.part}>${visible}</div>
        </div>
      </div>
      <p class="empty" hidden=${!message}>${message}</p>
    </div>`;
}

function Head({ column: { key, title, sort, first, from }, sorted, choose }) {
  const order = sorted.key === key ? (sorted.down ? "descending" : "ascending") : null;
  return html`
    <div class=${`cell c-${key} from-${from}`} role="columnheader" aria-sort=${order}>
      ${
        sort
          ? html`<button type="button" onclick=${() => choose(nextOrder(key, first === "down", sorted))}>
              ${typeof title === "string" ? `${title}${{ descending: " ▼", ascending: " ▲" }[order] ?? ""}` : title}
            </button>`
          : title
      }
    </div>`;
}

/** Return the next order of a column: its first one, then the reverse, then none. */
function nextOrder(key, isFirstDown, sorted) {
  const [first, second] = isFirstDown ? [`-${key}`, key] : [key, `-${key}`];
  if (sorted.key !== key) return first;
  return sorted.down === isFirstDown ? second : "";
}

/** Keep a list at its end while rows are added, if it was there. */
function useFollowing(host, keepsEnd, rows) {
  const height = useRef(0); // of the rows before
  useLayoutEffect(() => {
    const { scrollTop, clientHeight, scrollHeight } = host.current;
    if (keepsEnd && scrollTop > 0 && scrollTop + clientHeight >= height.current - 4) host.current.scrollTop = scrollHeight;
    height.current = scrollHeight;
  }, [rows]);
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
