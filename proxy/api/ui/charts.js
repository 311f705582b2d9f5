// Charts of points, bars and lines, drawn by uPlot: values are shown by pointer and by arrow keys, and listed on request.

import { html, useEffect, useMemo, useQuery, useRef, useState } from "./html.js";
import uPlot from "./vendor/uplot.js";

const HEIGHT = 260;
const MAX_POINTS = 1500; // of more, an even selection is drawn
const NONE = []; // the same at each rendering
const FONT = "12px system-ui, sans-serif";

/** Show a chart. `axes`: `{x, y}`, their labels with units. `marks`: `{x, y, label, href}`. `line`: `{x, y}` in order of x.
 *
 * `kind` of the marks: points or bars; `names`: the labels of whole numbers of x; `range`: of x; `isFromZero`: of y; `empty`:
 * the text without marks. A mark with `href` opens it; the query of the hash keeps which one, so that the way back leads to it.
 */
export function Chart(properties) {
  const { title, axes, marks, line = NONE, kind = "points", names = null, range = null, isFromZero = true } = properties;
  const { empty = "No data yet." } = properties;
  const host = useRef(null);
  const plot = useRef(null);
  const forced = useRef(null); // the mark that was chosen by a key
  const [current, setCurrent] = useState(null);
  const [{ at: opened }, setQuery] = useQuery();
  const every = Math.ceil(marks.length / MAX_POINTS);
  const rows = useMemo(() => {
    const drawn = marks.filter((_, at) => at % every === 0).map((mark) => ({ ...mark, mark }));
    return [...drawn, ...line.map((point) => ({ x: point.x, mean: point.y }))].sort((a, b) => a.x - b.x);
  }, [marks, line]);
  const shown = useMemo(() => rows.flatMap(({ mark }, at) => (mark ? [at] : [])), [rows]);

  useEffect(() => {
    if (shown.length === 0) return;
    const element = host.current;
    const nearest = (u, at) => forced.current ?? (kind === "bars" ? at : closest(u, rows, shown));
    const chart = new uPlot(
      {
        width: element.clientWidth,
        height: HEIGHT,
        legend: { show: false },
        cursor: {
          drag: { x: false, y: false },
          y: kind !== "bars",
          dataIdx: (u, series, at) => (series ? nearest(u, at) : at),
        },
        scales: {
          x: { time: false, range: range ?? (names ? [-0.5, names.length - 0.5] : padded) },
          y: { range: (u, low, high) => widened(isFromZero ? Math.min(0, low) : low, high, 0) },
        },
        axes: [axisOf(element, axes.x, true, names), axisOf(element, axes.y, false)],
        series: [{}, seriesOf(element, kind), { stroke: colour(element, "mean"), width: 2, spanGaps: true }],
        hooks: { setCursor: [(u) => setCurrent(u.cursor.left < 0 ? null : u.cursor.idxs[1])] },
      },
      [rows.map(({ x }) => x), rows.map(({ y }) => y ?? null), rows.map(({ mean }) => mean ?? null)],
      element,
    );
    plot.current = chart;
    const watch = new ResizeObserver(() => chart.setSize({ width: element.clientWidth, height: HEIGHT }));
    watch.observe(element);
    const repaint = () => chart.redraw(false);
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    addEventListener("theme", repaint);
    scheme.addEventListener("change", repaint);
    const before = opened ? rows.findIndex(({ mark }) => mark?.href === opened) : -1;
    const drawn = setTimeout(() => before >= 0 && point(before)); // after the first drawing
    return () => {
      clearTimeout(drawn);
      watch.disconnect();
      removeEventListener("theme", repaint);
      scheme.removeEventListener("change", repaint);
      chart.destroy();
    };
  }, [rows]);

  const point = (at) => {
    const { valToPos } = plot.current;
    forced.current = at;
    plot.current.setCursor({ left: valToPos(rows[at].x, "x"), top: valToPos(rows[at].y, "y") });
    forced.current = null;
  };
  const open = (event) => {
    const href = rows[current]?.mark?.href;
    if (!href) return;
    event.preventDefault();
    event.stopPropagation();
    setQuery({ at: href });
    location.hash = href;
  };
  const key = (event) => {
    if (event.key === "Enter") return open(event);
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by || shown.length === 0) return;
    event.preventDefault();
    event.stopPropagation();
    point(shown[Math.max(0, Math.min(shown.length - 1, shown.indexOf(current) + by))]);
  };
  const mark = current === null ? null : rows[current]?.mark;
  const isOpening = marks.some(({ href }) => href);
  const how = `Point at a mark or use the arrow keys${isOpening ? "; a click or Enter opens it" : ""}.`;
  return html`
    <figure class="plot">
      <figcaption>${title}</figcaption>
      ${shown.length === 0 && html`<p class="empty">${empty}</p>`}
      <div class="canvas" hidden=${shown.length === 0} role="img" tabindex="0" onkeydown=${key} onclick=${open} ref=${host}
        aria-label=${`${title}. Across: ${axes.x}. Up: ${axes.y}. Arrow keys show the values.`} />
      ${shown.length > 0 && html`
        <output class="value">${mark ? linked(mark) : how}</output>
        ${every > 1 && html`<p class="dim">${shown.length} of ${marks.length} points are drawn.</p>`}
        <${Values} marks=${shown.map((at) => rows[at].mark)} />`}
    </figure>`;
}

const linked = ({ label, href }) => (href ? html`<a href=${href}>${label}</a>` : label);

/** List the values of a chart once it is opened. */
function Values({ marks }) {
  const [isOpen, setOpen] = useState(false);
  return html`
    <details class="fold" ontoggle=${(event) => setOpen(event.target.open)}>
      <summary>Values</summary>
      ${isOpen && html`<ol class="values" tabindex="0">${marks.map((mark) => html`<li>${linked(mark)}</li>`)}</ol>`}
    </details>`;
}

/** Return a function that reads a colour of style.css at each drawing: the theme may have changed. */
function colour(host, name) {
  return () => {
    host.style.color = `var(--${name})`;
    return getComputedStyle(host).color;
  };
}

function axisOf(host, label, isAcross, names = null) {
  return {
    label,
    labelFont: FONT,
    font: FONT,
    stroke: colour(host, "dim"),
    grid: { stroke: colour(host, "edge"), width: 1 },
    ticks: { stroke: colour(host, "edge"), width: 1 },
    size: isAcross ? 40 : (u, values) => 26 + 7 * Math.max(3, ...(values ?? []).map((text) => String(text).length)),
    ...(names && {
      splits: (u) => names.flatMap((_, at) => (at % Math.ceil((names.length * 60) / u.width) === 0 ? [at] : [])),
      values: (u, splits) => splits.map((at) => names[at]),
    }),
  };
}

function seriesOf(host, kind) {
  const mark = colour(host, "mark");
  if (kind === "bars")
    return { fill: mark, stroke: mark, width: 0, paths: uPlot.paths.bars({ size: [0.92] }), points: { show: false } };
  return { stroke: mark, paths: () => null, points: { show: true, size: 7, stroke: mark, fill: mark } };
}

/** Return the mark that is nearest to the pointer. */
function closest(u, rows, shown) {
  const { left, top } = u.cursor;
  const far = (at) => (u.valToPos(rows[at].x, "x") - left) ** 2 + (u.valToPos(rows[at].y, "y") - top) ** 2;
  return shown.reduce((best, at) => (far(at) < far(best) ? at : best), shown[0]);
}

const widened = (low, high, below) =>
  low === high ? [low - 0.5, high + 0.5] : [low - (high - low) * below, high + (high - low) / 20];
const padded = (u, low, high) => widened(low, high, 0.05);

/** Show the histogram of logprobs from `{width, counts}`. */
export function Histogram({ width, counts }) {
  const total = counts.reduce((sum, value) => sum + value, 0);
  const marks = useMemo(() => (total ? counts.map((value, at) => binOf(width, counts, total, at)).reverse() : []), [
    counts.join(),
  ]);
  return html`
    <${Chart} kind="bars" title=${`Logprobs of ${total.toLocaleString("en")} sampled tokens`} marks=${marks}
      axes=${{ x: "logprob (nats); first bar: all below", y: "tokens" }} range=${[-width * counts.length, 0]} />`;
}

function binOf(width, counts, total, at) {
  const [high, low] = [-width * at, -width * (at + 1)];
  const where = at + 1 === counts.length ? `below ${high}` : `${high === 0 ? 0 : high} to ${low}`;
  const [number, share] = [counts[at].toLocaleString("en"), ((100 * counts[at]) / total).toFixed(1)];
  return { x: (high + low) / 2, y: counts[at], label: `logprob ${where}: ${number} tokens (${share} %)` };
}
