// Lists that keep only the part in view in the document: rows of equal height, and blocks that are measured when shown.

import { useEffect, useLayoutEffect, useRef, useState } from "./html.js";

const SPARE_PX = 300; // shown beyond either edge, so that scrolling finds rows there

/** Render a list again when its host is scrolled or resized. `place` returns what is shown, as text that can be compared. */
function usePlaced(place) {
  const host = useRef(null);
  const [, setShown] = useState("");
  const newest = useRef(place);
  newest.current = place;
  const update = () => host.current && setShown(newest.current(host.current));
  useEffect(() => {
    const watch = new ResizeObserver(update);
    watch.observe(host.current);
    host.current.addEventListener("scroll", update, { passive: true });
    return () => watch.disconnect();
  }, []);
  return [host, update];
}

/** Rows of equal height: return the host's ref, the range in view, the style of its parts, and `reveal(index)`. */
export function useRows(size, height) {
  const range = (host) => {
    const [top, bottom] = host ? [host.scrollTop, host.scrollTop + host.clientHeight] : [0, 900];
    const from = Math.max(0, Math.min(size, Math.floor((top - SPARE_PX) / height)));
    return [from, Math.max(from, Math.min(size, Math.ceil((bottom + SPARE_PX) / height)))];
  };
  const [host, update] = usePlaced((element) => range(element).join());
  const [from, to] = range(host.current);
  useLayoutEffect(update, [size]);
  const reveal = (index) => {
    const element = host.current;
    const top = index * height;
    if (top < element.scrollTop) element.scrollTop = top;
    else element.scrollTop = Math.max(element.scrollTop, top + height - element.clientHeight);
    update();
  };
  const styles = { whole: `height: ${size * height}px`, part: `transform: translateY(${from * height}px)` };
  return { host, from, to, ...styles, reveal };
}

/** Blocks of any height, one below the other: return the same as `useRows`, and `inner`, the ref of their element. */
export function useBlocks(size, guess) {
  const heights = useRef(null);
  if (heights.current?.length !== size) heights.current = new Float64Array(size); // 0: not measured yet
  const inner = useRef(null);
  const width = useRef(0);
  const height = (index) => heights.current[index] || guess;
  const sum = (from, to) => {
    let total = 0;
    for (let index = from; index < to; index += 1) total += height(index);
    return total;
  };
  const range = (element) => {
    const [view, inside] = element ? [element.scrollTop, element.clientHeight] : [0, 600];
    let [from, top] = [0, 0];
    while (from < size - 1 && top + height(from) < view - SPARE_PX) top += height(from++);
    let [to, end] = [from, top];
    while (to < size && (end < view + inside + SPARE_PX || to === from)) end += height(to++);
    return [from, to, top];
  };
  const [host, update] = usePlaced((element) => {
    if (element.clientWidth !== width.current) heights.current.fill(0); // lines break elsewhere
    width.current = element.clientWidth;
    return `${range(element)} ${sum(0, size)}`;
  });
  const [from, to, first] = range(host.current);
  useLayoutEffect(() => {
    let above = 0;
    let top = first;
    [...inner.current.children].forEach((block, at) => {
      const [known, found] = [height(from + at), block.offsetHeight];
      if (found && top + known <= host.current.scrollTop) above += found - known;
      if (found) heights.current[from + at] = found;
      top += known;
    });
    if (above) host.current.scrollTop += above; // keep what is visible in place
    update();
  });
  const reveal = (index) => {
    if (index < from || index >= to) host.current.scrollTop = sum(0, index);
    update();
  };
  return { host, inner, from, to, whole: `height: ${sum(0, size)}px`, part: `transform: translateY(${first}px)`, reveal };
}
