// The layout of a rollout's tree as rows of a timeline: their order, depth and times.
//
// Rows are in the order in which the calls were sent. Only a branch increases the depth, so that a conversation of thousands
// of turns is one column.

/** Return the rows of a tree, also of steps outside of it, in the order of time. */
export function layout(tree) {
  const children = Map.groupBy(tree.nodes, (node) => node.parent);
  const drift = Map.groupBy(tree.drift, (entry) => entry.step_id);
  const depths = new Map([[null, 0]]);
  const byNode = new Map(tree.nodes.map((node) => [node.node, node]));
  const playbacks = Map.groupBy(tree.playbacks ?? [], (one) => one.before ?? one.through);
  const threads = new Map(tree.threads.map((thread) => [thread.name, thread]));
  const rows = tree.nodes.map((node) => {
    const begins = node.parent === null || children.get(node.parent).length > 1; // other nodes have the same parent
    const depth = depths.get(node.parent) + (node.parent !== null && begins);
    depths.set(node.node, depth); // nodes come after their parents
    return {
      ...node,
      key: `${node.step_id}/${node.choice}`,
      depth,
      begins,
      fresh: node.start - (byNode.get(node.parent)?.end ?? 0),
      drift: drift.get(node.step_id) ?? [],
      thread: threads.get(node.thread),
    };
  });
  for (const step of tree.unplaced)
    rows.push({ ...step, key: `${step.step_id}/-`, depth: 0, unplaced: true, drift: [], thread: threads.get(step.thread) });
  for (const row of rows) row.playbacks = playbacks.get(row.step_id) ?? [];
  return rows.sort((a, b) => a.started_ms - b.started_ms || a.index - b.index || a.choice - b.choice);
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

/** Return the position of a time in that range, in percent. */
export const position = (ms, { from, to }) => (100 * (ms - from)) / (to - from);

/** Return how a call continues an earlier step by token ids, or the reason why it does not, as in `tokentape show`. */
export function continuationText({ kept, bridge, why }) {
  if (kept === undefined) return `not continued: ${why}`;
  return `continued: ${kept} ids kept, ${bridge} ids rendered${why === undefined ? "" : `. ${why}`}`;
}

/** Return the step ids in the order of the rows, each once. */
export const order = (rows) => [...new Set(rows.map((row) => row.step_id))];
