// Mismatch: how trainers' logprobs of the newest batches differ from recorded ones, over versions and by property of tokens.

import { Chart } from "./charts.js";
import { count, decimal, line } from "./format.js";
import { Facts, html, useMemo } from "./html.js";
import { byVersion } from "./plots.js";

const AXES = { x: "policy version of the trainer (line: means)", y: "mean |d| (nats)" };
const COLUMNS = [
  ["tokens", (cell) => count(cell.tokens)],
  ["mean |d|", (cell) => decimal(cell.abs_mean)],
  ["median |d|", (cell) => decimal(cell.abs_median)],
  ["mean d", (cell) => decimal(cell.mean)],
  ["% above 0.5", (cell) => decimal(100 * cell.tail)],
];

/** `of`: `mismatch` of GET /training. Without reports nothing is shown. */
export function Mismatch({ of: { batches, newest } }) {
  const { names, marks, means } = useMemo(() => byVersion(batches.filter(isScored).map(pointOf)), [batches]);
  if (newest === null) return null;
  return html`
    <section class="mismatch" aria-labelledby="mismatch">
      <h2 id="mismatch">Mismatch</h2>
      <${Facts} of=${factsOf(batches[0], newest.sequences)} />
      <div class="plots">
        <${Chart} title="Mismatch by policy version" marks=${marks} line=${means} names=${names} axes=${AXES} />
        <${Cells} of=${newest.cells} />
      </div>
    </section>`;
}

const isScored = (batch) => batch.abs_mean !== null;
const verdictsOf = ({ verdicts }) => verdicts.map((verdict) => line(verdict, 40)).join(", ");
const sizeOf = ({ abs_mean: mean, tokens }) => `mean |d| ${decimal(mean)} of ${count(tokens)} tokens`;
const pointOf = (batch) => ({
  version: batch.policy_version,
  reward: batch.abs_mean,
  label: `${line(batch.batch_id, 60)}: ${verdictsOf(batch)}, ${sizeOf(batch)}`,
});

const factsOf = (batch, sequences) => [
  ["Newest reported batch", line(batch.batch_id, 60)],
  ["Version of the trainer", line(batch.policy_version, 60)],
  ["Verdicts", verdictsOf(batch)],
  ["Rows", count(sequences.rows)],
  ["Log of their ratios: mean, mean of absolute values", `${decimal(sequences.mean)}, ${decimal(sequences.abs_mean)}`],
];

/** List the means of the newest batch by what is known of its tokens. */
const Cells = ({ of }) => html`
  <div class="compared cells" tabindex="0" role="region" aria-label="Mismatch of the newest batch by property of tokens">
    <table>
      <thead>
        <tr>${[["property"], ["value"], ...COLUMNS].map(([title]) => html`<th scope="col">${title}</th>`)}</tr>
      </thead>
      <tbody>${Object.entries(of).flatMap(([property, values]) => rowsOf(property, Object.entries(values)))}</tbody>
    </table>
  </div>`;

function rowsOf(property, values) {
  const sorted = values.sort(([, one], [, other]) => other.tokens - one.tokens);
  return sorted.map(([value, cell]) => html`
    <tr key=${`${property} ${value}`}>
      <td>${line(property, 40)}</td><th scope="row">${line(value, 64)}</th>
      ${COLUMNS.map(([, shown]) => html`<td>${shown(cell)}</td>`)}
    </tr>`);
}
