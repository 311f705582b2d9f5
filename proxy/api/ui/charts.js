// Bar charts and point charts as SVG: axes with units, marks whose values are shown by pointer and by arrow keys.

import { el, svg } from "./dom.js";

const HEIGHT = 260;
const EDGE = { left: 78, right: 12, top: 12, bottom: 46 };
const MAX_POINTS = 1500; // of more, an even selection is drawn

/** Return about `number` round numbers from `low` to `high`. */
export function ticks(low, high, number = 5) {
  const rough = (high - low) / number || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at += 1)
    found.push(Number((at * step).toPrecision(12)));
  return found;
}

/** Return the available width, so that the text is not scaled down with the drawing. */
function room() {
  return Math.max(300, Math.min(640, document.documentElement.clientWidth - 50));
}

function scale(from, to, start, end) {
  const size = to - from || 1;
  return (value) => start + ((value - from) / size) * (end - start);
}

/** Draw a figure around marks. `axes`: `{x, y}`, each `{label, ticks: [{at, text}]}` with `at` in pixels. */
function figure(title, width, axes, marks, values) {
  const output = el("output", { class: "value" }, marks.length ? "Point at a mark or use the arrow keys." : "");
  let current = -1;
  const bottom = HEIGHT - EDGE.bottom;
  const drawing = svg(
    "svg",
    {
      viewBox: `0 0 ${width} ${HEIGHT}`,
      role: "img",
      "aria-label": title,
      tabindex: "0",
      onpointerover: (event) => {
        if (event.target.dataset.mark) showValue(Number(event.target.dataset.mark));
      },
      onkeydown: (event) => {
        const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (!by || marks.length === 0) return;
        event.preventDefault();
        event.stopPropagation();
        showValue(Math.max(0, Math.min(marks.length - 1, current + by)));
      },
    },
    axes.y.ticks
      .map(({ at, text }) => [
        svg("line", { class: "gridline", x1: EDGE.left, x2: width - EDGE.right, y1: at, y2: at }),
        svg("text", { class: "tick", x: EDGE.left - 6, y: at + 4, "text-anchor": "end" }, text),
      ])
      .flat(),
    axes.x.ticks.map(({ at, text }) =>
      svg("text", { class: "tick", x: at, y: bottom + 16, "text-anchor": "middle" }, text),
    ),
    svg("line", { class: "axis", x1: EDGE.left, x2: width - EDGE.right, y1: bottom, y2: bottom }),
    svg("line", { class: "axis", x1: EDGE.left, x2: EDGE.left, y1: EDGE.top, y2: bottom }),
    svg(
      "text",
      { class: "label", x: (EDGE.left + width - EDGE.right) / 2, y: HEIGHT - 8, "text-anchor": "middle" },
      axes.x.label,
    ),
    svg(
      "text",
      {
        class: "label",
        x: 14,
        y: (EDGE.top + bottom) / 2,
        transform: `rotate(-90 14 ${(EDGE.top + bottom) / 2})`,
        "text-anchor": "middle",
      },
      axes.y.label,
    ),
    marks,
  );
  function showValue(at) {
    marks[current]?.classList.remove("current");
    current = at;
    marks[at].classList.add("current");
    output.textContent = values[at];
  }
  return el("figure", { class: "plot" }, el("figcaption", {}, title), drawing, output);
}

/** Draw bars. `bars`: `{from, to, value, label}` in order of x. */
export function barPlot(title, { x, y }, bars) {
  if (bars.every((bar) => bar.value === 0)) return nothing(title);
  const width = room();
  const across = scale(bars[0].from, bars.at(-1).to, EDGE.left, width - EDGE.right);
  const most = Math.max(...bars.map((bar) => bar.value));
  const up = scale(0, most, HEIGHT - EDGE.bottom, EDGE.top);
  const marks = bars.map((bar, at) =>
    svg(
      "rect",
      {
        class: `bar-mark${bar.mark ?? ""}`,
        "data-mark": at,
        x: across(bar.from) + 0.5,
        width: Math.max(1, across(bar.to) - across(bar.from) - 1),
        y: Math.min(up(bar.value), HEIGHT - EDGE.bottom - (bar.value ? 1 : 0)),
        height: Math.max(bar.value ? 1 : 0, HEIGHT - EDGE.bottom - up(bar.value)),
      },
      svg("title", {}, bar.label),
    ),
  );
  const axes = {
    x: {
      label: x,
      ticks: ticks(bars[0].from, bars.at(-1).to, width / 60).map((at) => ({ at: across(at), text: String(at) })),
    },
    y: { label: y, ticks: ticks(0, most).map((at) => ({ at: up(at), text: at.toLocaleString("en") })) },
  };
  return figure(
    title,
    width,
    axes,
    marks,
    bars.map((bar) => bar.label),
  );
}

/** Draw points and a line through `means`. `points`: `{x, y, label}`; `names` are the labels of whole numbers of x. */
export function pointPlot(title, { x, y }, points, { names = null, means = [] } = {}) {
  if (points.length === 0) return nothing(title);
  const every = Math.ceil(points.length / MAX_POINTS);
  const drawn = points.filter((_, at) => at % every === 0);
  const [left, right] = names
    ? [-0.5, names.length - 0.5]
    : reach(
        drawn.map((point) => point.x),
        false,
      );
  const [low, high] = reach(
    drawn.map((point) => point.y),
    !names,
  );
  const width = room();
  const across = scale(left, right, EDGE.left, width - EDGE.right);
  const up = scale(low, high, HEIGHT - EDGE.bottom, EDGE.top);
  const marks = drawn.map((point, at) =>
    svg(
      "circle",
      { class: "point-mark", "data-mark": at, cx: across(point.x), cy: up(point.y), r: 4 },
      svg("title", {}, point.label),
    ),
  );
  const line = means.map((point) => `${across(point.x)},${up(point.y)}`).join(" ");
  const thin = names ? Math.ceil((names.length * 60) / width) : 1;
  const axes = {
    x: {
      label: x,
      ticks: names
        ? names.map((name, at) => ({ at: across(at), text: name })).filter((_, at) => at % thin === 0)
        : ticks(left, right, width / 130).map((at) => ({ at: across(at), text: at.toLocaleString("en") })),
    },
    y: { label: y, ticks: ticks(low, high).map((at) => ({ at: up(at), text: at.toLocaleString("en") })) },
  };
  const made = figure(
    title,
    width,
    axes,
    marks,
    drawn.map((point) => point.label),
  );
  if (line) made.querySelector("svg").append(svg("polyline", { class: "mean", points: line }));
  if (every > 1) made.append(el("p", { class: "dim" }, `${drawn.length} of ${points.length} points are drawn.`));
  return made;
}

function reach(values, isFromZero) {
  const low = isFromZero ? 0 : Math.min(...values);
  const high = Math.max(...values);
  return low === high ? [low - (isFromZero ? 0 : 0.5), high + 0.5] : [low, high];
}

function nothing(title) {
  return el(
    "figure",
    { class: "plot" },
    el("figcaption", {}, title),
    el("p", { class: "empty" }, "No data yet."),
  );
}

/** Draw the histogram of logprobs from `{width, counts}`. */
export function histogram({ width, counts }) {
  const total = counts.reduce((sum, value) => sum + value, 0);
  const bars = counts.map((value, at) => {
    const isLast = at + 1 === counts.length;
    const [high, low] = [-width * at, -width * (at + 1)];
    const where = isLast ? `below ${high}` : `${high === 0 ? 0 : high} to ${low}`;
    const share = total ? ((100 * value) / total).toFixed(1) : 0;
    return { from: low, to: high, value, label: `logprob ${where}: ${value.toLocaleString("en")} tokens (${share} %)` };
  });
  return barPlot(
    `Logprobs of ${total.toLocaleString("en")} sampled tokens`,
    { x: "logprob (nats); first bar: all below", y: "tokens" },
    bars.reverse(),
  );
}
