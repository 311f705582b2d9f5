// Rollouts or branches side by side: their turns, aligned, their rewards, and of two of them the tokens that differ.

import { json } from "./api.js";
import { align, difference } from "./difference.js";
import { count, decimal, hash, line, versionOf } from "./format.js";
import { html, Path, useEffect, useKeys, useMemo, useState } from "./html.js";
import { Status } from "./parts.js";
import { shown } from "./tokens.js";
import { layout } from "./tree.js";

export const MAX_COMPARED = 8; // each is two requests
const MAX_TURNS = 500;
const MAX_TEXTS = 2000; // tokens of a reply
const NEAR = 30; // equal tokens that are shown beside different ones
const WHOLE = "all"; // in the place of the last step of a branch

/** Return the link to a comparison. `of`: `[rollout]`, or `[rollout, step]` for the branch that ends with a step. */
export const comparison = (of) => hash("compare", ...of.flatMap(([name, stepId]) => [name, stepId ?? WHOLE]));

/** Show a comparison. `of`: the names of rollouts, each followed by a step or WHOLE. */
export function Compare({ of, shell }) {
  const [columns, setColumns] = useState(null);
  const size = Math.min(MAX_COMPARED, Math.ceil(of.length / 2));
  const pairs = Array.from({ length: size }, (_, at) => [of[2 * at], of[2 * at + 1]]);
  useEffect(() => {
    let isOver = false;
    Promise.all(pairs.map(readColumn)).then((found) => isOver || setColumns(found), (error) => isOver || shell.fail(error));
    return () => {
      isOver = true;
    };
  }, []);
  useKeys({ Escape: () => history.back() });
  return html`
    <${Path} links=${[[hash("rollouts"), "Rollouts"]]} />
    <div class="bar"><h1>Compared</h1></div>
    ${columns ? html`<${Turns} columns=${columns} />` : html`<p class="empty">Loading ${pairs.length} rollouts…</p>`}`;
}

async function readColumn([name, stepId = WHOLE]) {
  const [rollout, tree] = await Promise.all([
    json(["rollouts", name]),
    json(["rollouts", name, "tree"], { texts: "false" }),
  ]);
  const rows = stepId === WHOLE ? layout(tree) : branchOf(layout(tree), stepId);
  const turns = [...Map.groupBy(rows, (row) => row.step_id)].slice(0, MAX_TURNS).map(turnOf);
  return { name, stepId: stepId === WHOLE ? null : stepId, rollout, turns };
}

/** Return the rows from the root of a tree to a step. */
function branchOf(rows, stepId) {
  const byNode = new Map(rows.map((row) => [row.node, row]));
  const found = [];
  for (let row = rows.find((each) => each.step_id === stepId); row; row = row.parent === null ? null : byNode.get(row.parent))
    found.unshift(row);
  return found;
}

/** Return a call: its choices, the beginnings of their texts, and `whole`, which is equal for calls that seem to be equal. */
function turnOf([stepId, choices]) {
  const texts = choices.map(({ opening, unplaced, why }) => opening ?? (unplaced ? `not in the tree: ${why}` : ""));
  const sizes = choices.map(({ sampled, start, end }) => (end === undefined ? sampled : end - start));
  return { stepId, choices, texts, text: texts.join("\n"), whole: JSON.stringify([texts, sizes]) };
}

function Turns({ columns }) {
  const rows = useMemo(() => align(columns.map(({ turns }) => turns)), [columns]);
  const isSame = (row) => row.every((turn) => turn?.whole === row[0]?.whole);
  const parting = rows.findIndex((row) => !isSame(row));
  const [opened, setOpened] = useState(columns.length === 2 && rows[parting]?.every(Boolean) ? parting : -1);
  const first = columns[0].rollout.reward;
  return html`
    ${parting < 0 && html`<p class="sum">No reply differs in its beginning or its number of tokens.</p>`}
    ${rows.length >= MAX_TURNS && html`<p class="sum">The first ${MAX_TURNS} turns of each are compared.</p>`}
    <div class="compared" tabindex="0" role="region" aria-label="Replies">
      <table>
        <thead>
          <tr>
            <th scope="col">Reply</th>
            ${columns.map((column, at) => html`
              <th scope="col"><${Heading} of=${column} first=${at > 0 ? first : null} /></th>`)}
          </tr>
        </thead>
        <tbody>
          ${rows.map((row, at) => html`
            <tr key=${at} class=${at === parting ? "parting" : isSame(row) ? "same" : ""}>
              <th scope="row">
                ${at}${at === parting && " ↳ they part here"}
                ${row.length === 2 && row.every(Boolean) && html`
                  <button type="button" aria-expanded=${String(at === opened)}
                    onclick=${() => setOpened(at === opened ? -1 : at)}>Tokens</button>`}
              </th>
              ${row.map((turn, column) => html`
                <td>${turn && html`<${Turn} name=${columns[column].name} of=${turn} />`}</td>`)}
            </tr>
            ${at === opened && html`
              <tr key=${`tokens-${at}`}><${Tokens} key=${at} names=${columns.map(({ name }) => name)} turns=${row} /></tr>`}`)}
        </tbody>
      </table>
    </div>`;
}

function Heading({ of: { name, stepId, rollout, turns }, first }) {
  const { reward, status, counts } = rollout;
  const by = first !== null && reward !== null ? ` (${reward < first ? "−" : "+"}${decimal(Math.abs(reward - first))})` : "";
  return html`
    <a href=${hash("rollout", name)}>${line(name, 40)}</a>${stepId && html`<br />to step ${line(stepId, 40)}`}<br />
    <${Status} of=${status} /> reward ${decimal(reward)}${by}<br />
    <span class="dim">${count(turns.length)} turns, ${count(counts.sampled_tokens)} completion tokens</span>`;
}

/** Show the replies of a call: one for each choice. */
const Turn = ({ name, of: { stepId, choices, texts } }) => html`
  <a href=${hash("rollout", name, "step", stepId)}>${choices.map(({ choice }, at) => html`
    <span class="reply">${choices.length > 1 && html`<b>choice ${choice}</b> `}${said(texts[at])}</span>`)}</a>`;

const RAW_CALL = /^\s*<tool_call>\s*\{\s*"name"\s*:\s*"([^"]*)"\s*,\s*"arguments"\s*:\s*/; // of an engine without a tool parser

/** Return the beginning of a reply on one line; a tool call in its text is named. */
const said = (text) => line(text.replace(RAW_CALL, "calls $1 ") || "no text", 80);

/** Show the tokens of two calls, choice by choice, with those that differ. */
function Tokens({ names, turns }) {
  const [sides, setSides] = useState(null);
  const [problem, setProblem] = useState(null);
  useEffect(() => {
    const read = turns.map(({ stepId, choices }, at) => readSide(names[at], stepId, choices));
    Promise.all(read).then(setSides, (error) => setProblem(error.message));
  }, []);
  if (sides === null) return html`<th scope="row">tokens</th><td colspan="2" role="status">${problem ?? "Loading…"}</td>`;
  const found = sides[0].flatMap((one) => {
    const other = sides[1].find(({ index }) => index === one.index);
    return other ? [{ one, other, ...difference(one, other) }] : [];
  });
  if (found.length === 0) return html`<th scope="row">tokens</th><td colspan="2">The engine returned no token ids.</td>`;
  return html`
    <th scope="row">tokens${found.map(({ notes }) => notes.map((note) => html`<p class="dim">${note}</p>`))}</th>
    ${["one", "other"].map((side) => html`
      <td>${found.map((each) => html`
        ${found.length > 1 && html`<b>choice ${each.one.index}</b>`}
        <div class="line">${each.runs.map((run) => spansOf(each[side], run, side))}</div>`)}</td>`)}`;
}

/** Read the choices of a step, with the texts of their sampled tokens. */
async function readSide(name, stepId, rows) {
  const step = await json(["rollouts", name, "steps", stepId]);
  const wanted = step.choices.filter(({ index }) => rows.some(({ choice }) => choice === index));
  return Promise.all(
    wanted.map(async ({ index, ids, logprobs, prompt }) => {
      const prompted = (step.prompts ? step.prompts[prompt] : step.prompt_ids) ?? [];
      const query = { choice: index, start: prompted.length, limit: MAX_TEXTS };
      const { texts } = await json(["rollouts", name, "steps", stepId, "texts"], query).catch(() => ({ texts: [] }));
      return { index, ids, logprobs, prompt: prompted, texts, version: versionOf(step) };
    }),
  );
}

/** Show a run of tokens of a side; of equal ones, those that are near to different ones. */
function spansOf({ ids, logprobs, texts }, run, side) {
  const [from, to] = run[side];
  const token = (at) => html`
    <span class=${`t ${run.isSame ? "" : side}${texts[at] ? "" : " noid"}`}
      title=${`token ${count(at)}, id ${ids[at]}, logprob ${decimal(logprobs[at], 4)}`}
      >${shown(texts[at] || String(ids[at]))}</span>`;
  const tokens = (start, end) => Array.from({ length: end - start }, (_, at) => token(start + at));
  const [near, what] = run.isSame ? [NEAR, "equal"] : [10 * NEAR, "different"];
  if (to - from <= 2 * near) return tokens(from, to);
  const left = html` <i class="dim">… ${count(to - from - 2 * near)} ${what} tokens … </i>`;
  return [tokens(from, from + near), left, tokens(to - near, to)];
}
