// A rollout's tree, laid out as rows of a time line.
//
// Holds the order and the depth of rows, and the scale of time. It makes no elements. Only a branching goes deeper, so that a
// conversation of thousands of turns is one column.

/** Rows of an outline: nodes under their parents, in the order of recording, and what has no place at the end. */
export function layout(tree) {
  const children = new Map();
  for (const node of tree.nodes) {
    if (!children.has(node.parent)) children.set(node.parent, []);
    children.get(node.parent).push(node);
  }
  const byPlace = new Map(tree.nodes.map((node) => [node.node, node]));
  const drift = new Map();
  for (const one of tree.drift) drift.set(one.step_id, [...(drift.get(one.step_id) ?? []), one]);
  const rows = [];
  const waiting = (children.get(null) ?? []).map((node) => ({ node, depth: 0, begins: true })).reverse();
  while (waiting.length) {
    const { node, depth, begins } = waiting.pop();
    const parent = byPlace.get(node.parent);
    rows.push({
      ...node,
      key: `${node.step_id}/${node.choice}`,
      depth,
      begins, // a branch: others go on from where it does
      prompt: node.start,
      fresh: node.start - (parent?.end ?? 0),
      drift: drift.get(node.step_id) ?? [],
    });
    const below = children.get(node.node) ?? [];
    const parts = below.length > 1;
    for (const child of below.slice().reverse()) waiting.push({ node: child, depth: depth + parts, begins: parts });
  }
  for (const one of tree.unplaced) rows.push({ ...one, key: `${one.step_id}/-`, depth: 0, unplaced: true, drift: [] });
  return rows;
}

/** When the first call was sent and the last one ended, in milliseconds. */
export function range(rows) {
  let [from, to] = [Infinity, -Infinity];
  for (const row of rows) {
    from = Math.min(from, row.started_ms);
    to = Math.max(to, row.ended_ms ?? row.started_ms);
  }
  return rows.length ? { from, to: Math.max(to, from + 1) } : { from: 0, to: 1 };
}

/** Where a call stands in it: per cent. */
export function bar(row, { from, to }) {
  const left = (100 * (row.started_ms - from)) / (to - from);
  const width = (100 * ((row.ended_ms ?? row.started_ms) - row.started_ms)) / (to - from);
  return { left, width: Math.max(width, 0.4) };
}

/** The ids of steps in the order in which the rows show them, each once. */
export function order(rows) {
  return [...new Set(rows.map((row) => row.step_id))];
}
