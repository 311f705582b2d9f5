// Search rollouts for a text in prompts, replies and errors, newest first. Requests are repeated until a page is full.

import { json } from "./api.js";
import { clock, count, decimal, hash, line } from "./format.js";
import { html, useEffect, useKeys, useRef, useState } from "./html.js";
import { Status } from "./parts.js";

const PAGE = 20; // rollouts with matches
const NOTHING = { rollouts: 0, steps: 0, unreadable: 0, oldest_ms: null };

export function Search({ shell, text }) {
  const field = useRef(null);
  useKeys({ "/": () => field.current.focus() });
  useEffect(() => field.current.focus(), []);
  const submit = (event) => {
    event.preventDefault();
    location.hash = hash("search", field.current.value.trim());
  };
  return html`
    <form class="bar" role="search" onsubmit=${submit}>
      <h1>Search</h1>
      <input type="search" id="filter" placeholder="Prompts, replies and errors" maxlength="500" spellcheck="false"
        aria-label="Search prompts, replies and errors" ref=${field} defaultValue=${text} />
      <button type="submit">Search</button>
    </form>
    ${text && html`<${Found} shell=${shell} text=${text} />`}`;
}

function Found({ shell, text }) {
  const [run, setRun] = useState({ rollouts: [], searched: NOTHING, cursor: undefined, pages: 1 });
  const isSearching = run.cursor !== null && run.rollouts.length < run.pages * PAGE;
  useEffect(() => {
    if (!isSearching) return undefined;
    let isLeft = false;
    json(["search"], { q: text, limit: PAGE, cursor: run.cursor }).then(
      (page) => isLeft || setRun((before) => joined(before, page)),
      (error) => isLeft || shell.fail(error),
    );
    return () => { isLeft = true; };
  }, [run.cursor, run.pages]);
  const more = () => setRun((before) => ({ ...before, pages: before.pages + 1 }));
  return html`
    <p class="sum" role="status">${isSearching ? "Searching: " : "Searched: "}${sumOf(run)}</p>
    <ol class="found">${run.rollouts.map((rollout) => html`<${Rollout} key=${rollout.rollout_id} of=${rollout} />`)}</ol>
    ${!isSearching && run.cursor && html`<button type="button" onclick=${more}>Search older rollouts</button>`}`;
}

/** Add a response to the earlier ones; the counts are totals of all responses. */
function joined(before, { rollouts, searched, cursor }) {
  const sum = (name) => before.searched[name] + searched[name];
  const counts = { rollouts: sum("rollouts"), steps: sum("steps"), unreadable: sum("unreadable") };
  const oldest_ms = searched.oldest_ms ?? before.searched.oldest_ms;
  return { ...before, rollouts: [...before.rollouts, ...rollouts], searched: { ...counts, oldest_ms }, cursor };
}

function sumOf({ rollouts, searched, cursor }) {
  const { oldest_ms: oldest, unreadable } = searched;
  return [
    `${count(searched.rollouts)} rollouts with ${count(searched.steps)} steps`,
    cursor === null ? "all there are" : oldest !== null && `back to ${clock(oldest)}`,
    unreadable > 0 && `${count(unreadable)} unreadable`,
    `${count(rollouts.length)} ${rollouts.length === 1 ? "has" : "have"} the text`,
  ].filter(Boolean).join("; ");
}

const Rollout = ({ of }) => html`
  <li>
    <p>
      <a href=${hash("rollout", of.rollout_id)}>${line(of.rollout_id, 80)}</a> <${Status} of=${of.status} />
      ${of.reward !== null && html` reward ${decimal(of.reward)}`} ${clock(of.created_ms)}
    </p>
    <ul>${of.matches.map((match) => html`
      <li>
        <a href=${hash("rollout", of.rollout_id, "step", match.step_id)}>${match.role ?? match.place}</a>${" "}
        ${line(match.before, 80)}<mark>${line(match.text, 200)}</mark>${line(match.after, 80)}
      </li>`)}
    </ul>
  </li>`;
