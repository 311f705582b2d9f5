// The difference of two lists: turns that are aligned, and tokens that are equal, removed or added.

import { count, decimal } from "./format.js";

const MAX_CELLS = 4_000_000; // of the table of common subsequences: 8 MB, some 20 ms

/** Return the pairs of indexes of a longest common subsequence of two lists; null if they are too long. */
function common(a, b) {
  const width = b.length + 1;
  if ((a.length + 1) * width > MAX_CELLS) return null;
  const best = new Uint16Array((a.length + 1) * width); // of the rests from i and j on
  for (let i = a.length - 1; i >= 0; i -= 1)
    for (let j = b.length - 1; j >= 0; j -= 1)
      best[i * width + j] =
        a[i] === b[j] ? best[(i + 1) * width + j + 1] + 1 : Math.max(best[(i + 1) * width + j], best[i * width + j + 1]);
  const pairs = [];
  for (let [i, j] = [0, 0]; i < a.length && j < b.length; )
    if (a[i] === b[j]) pairs.push([i++, j++]);
    else if (best[(i + 1) * width + j] >= best[i * width + j + 1]) i += 1;
    else j += 1;
  return pairs;
}

/** Return rows of turns, one of each list or null. Of two lists, turns with the same text are in one row. */
export function align(lists) {
  if (lists.length !== 2) {
    const size = Math.max(0, ...lists.map((list) => list.length));
    return Array.from({ length: size }, (_, at) => lists.map((list) => list[at] ?? null));
  }
  const [a, b] = lists;
  const anchors = common(a.map(({ text }) => text), b.map(({ text }) => text)) ?? [];
  const rows = [];
  let [i, j] = [0, 0];
  for (const [nextI, nextJ] of [...anchors, [a.length, b.length]]) {
    for (; i < nextI || j < nextJ; i += 1, j += 1) rows.push([i < nextI ? a[i] : null, j < nextJ ? b[j] : null]);
    [i, j] = [nextI + 1, nextJ + 1];
    if (nextI < a.length) rows.push([a[nextI], b[nextJ]]);
  }
  return rows;
}

/** Compare the tokens of two choices, `{ids, logprobs, prompt, version}`: return their `runs`, and `notes` about them.
 *
 * A run has `one` and `other`, the ranges of the sampled tokens, and whether it `isSame`.
 */
export function difference(one, other) {
  const runs = runsOf(one.ids, other.ids);
  const same = runs.filter(({ isSame }) => isSame);
  const equal = same.reduce((sum, { one: [from, to] }) => sum + to - from, 0);
  const at = runs[0]?.isSame ? runs[0].one[1] : 0;
  const gaps = same.flatMap(({ one: [from, to], other: [start] }) =>
    Array.from({ length: to - from }, (_, index) => gap(one.logprobs[from + index], other.logprobs[start + index])),
  ).filter((value) => value !== null);
  const prompts = prefix(one.prompt, other.prompt);
  const isSamePrompt = prompts === one.prompt.length && prompts === other.prompt.length;
  const apart = (token) => `, different from token ${count(token)} on`;
  const mean = gaps.reduce((sum, value) => sum + value, 0) / gaps.length;
  return {
    runs,
    notes: [
      `prompts: ${sizes(one.prompt, other.prompt)}${isSamePrompt ? ", equal" : apart(prompts)}`,
      `replies: ${sizes(one.ids, other.ids)}, ${count(equal)} equal${runs.some(({ isSame }) => !isSame) ? apart(at) : ""}`,
      gaps.length > 0 && `logprobs of equal tokens: mean difference ${decimal(mean, 4)}`,
      one.version !== other.version && `versions: ${one.version ?? "–"} and ${other.version ?? "–"}`,
    ].filter(Boolean),
  };
}

const sizes = (one, other) => `${count(one.length)} and ${count(other.length)} tokens`;

const gap = (one, other) => (typeof one === "number" && typeof other === "number" ? Math.abs(one - other) : null);

function prefix(a, b) {
  let at = 0;
  while (at < a.length && at < b.length && a[at] === b[at]) at += 1;
  return at;
}

/** Return the runs of equal and of different tokens. */
function runsOf(a, b) {
  const start = prefix(a, b);
  let end = 0; // equal tokens at the ends
  while (end < Math.min(a.length, b.length) - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end += 1;
  const pairs = common(a.slice(start, a.length - end), b.slice(start, b.length - end)) ?? [];
  const runs = [];
  const add = (isSame, one, other) => {
    if (one[0] === one[1] && other[0] === other[1]) return;
    const last = runs.at(-1);
    if (last?.isSame === isSame) [last.one[1], last.other[1]] = [one[1], other[1]];
    else runs.push({ isSame, one, other });
  };
  add(true, [0, start], [0, start]);
  let [i, j] = [start, start];
  for (const [nextI, nextJ] of pairs.map(([x, y]) => [start + x, start + y])) {
    add(false, [i, nextI], [j, nextJ]);
    add(true, [nextI, nextI + 1], [nextJ, nextJ + 1]);
    [i, j] = [nextI + 1, nextJ + 1];
  }
  add(false, [i, a.length - end], [j, b.length - end]);
  add(true, [a.length - end, a.length], [b.length - end, b.length]);
  return runs;
}
