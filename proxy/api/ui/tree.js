// The layout of a rollout's tree as rows of a timeline: their order, depth and times.
//
// Only a branch increases the depth, so that a conversation of thousands of turns is one column.

/** Return the rows of a tree: nodes below their parents, in recording order; steps outside of the tree come last. */
export function layout(tree) {
  const children = new Map();
  for (const node of tree.nodes) {
    if (!children.has(node.parent)) children.set(node.parent, []);
    children.get(node.parent).push(node);
  }
  const byNode = new Map(tree.nodes.map((node) => [node.node, node]));
  const drift = new Map();
  for (const entry of tree.drift) drift.set(entry.step_id, [...(drift.get(entry.step_id) ?? []), entry]);
  const rows = [];
  const waiting = (children.get(null) ?? []).map((node) => ({ node, depth: 0, begins: true })).reverse();
  while (waiting.length) {
    const { node, depth, begins } = waiting.pop();
    const parent = byNode.get(node.parent);
    rows.push({
      ...node,
      key: `${node.step_id}/${node.choice}`,
      depth,
      begins, // a branch: other nodes have the same parent
      prompt: node.start,
      fresh: node.start - (parent?.end ?? 0),
      drift: drift.get(node.step_id) ?? [],
    });
    const below = children.get(node.node) ?? [];
    const parts = below.length > 1;
    for (const child of below.slice().reverse()) waiting.push({ node: child, depth: depth + parts, begins: parts });
  }
  for (const step of tree.unplaced)
    rows.push({ ...step, key: `${step.step_id}/-`, depth: 0, unplaced: true, drift: [] });
  return rows;
}

/** Return when the first call was sent and when the last one ended, in unix milliseconds. */
export function range(rows) {
  let [from, to] = [Infinity, -Infinity];
  for (const row of rows) {
    from = Math.min(from, row.started_ms);
    to = Math.max(to, row.ended_ms ?? row.started_ms);
  }
  return rows.length ? { from, to: Math.max(to, from + 1) } : { from: 0, to: 1 };
}

/** Return the position and the width of a call's bar in that range, in percent. */
export function bar(row, { from, to }) {
  const left = (100 * (row.started_ms - from)) / (to - from);
  const width = (100 * ((row.ended_ms ?? row.started_ms) - row.started_ms)) / (to - from);
  return { left, width: Math.max(width, 0.4) };
}

/** Return how a call continues an earlier step by token ids, or the reason why it does not, as in `tokentape show`. */
export function continuationText({ kept, bridge, why }) {
  if (kept === undefined) return `not continued: ${why}`;
  return `continued: ${kept} ids kept, ${bridge} ids rendered${why === undefined ? "" : `. ${why}`}`;
}

/** Return the step ids in the order of the rows, each once. */
export function order(rows) {
  return [...new Set(rows.map((row) => row.step_id))];
}
