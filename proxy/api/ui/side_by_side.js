// The members of a group side by side: their replies in order of time, their rewards, and where they part.

import { json } from "./api.js";
import { count, decimal, hash, line } from "./format.js";
import { html, useState } from "./html.js";
import { layout } from "./tree.js";

const MAX_MEMBERS = 8; // each is one request
const MAX_TURNS = 200;

/** Show a button that loads the trees of the newest members, and a table with one column for each. */
export function SideBySide({ members, shell }) {
  const [loaded, setLoaded] = useState(null);
  const chosen = members.filter((member) => member.steps > 0).slice(0, MAX_MEMBERS);
  const load = () => Promise.all(chosen.map(readMember)).then(setLoaded, shell.fail);
  if (chosen.length < 2) return null;
  const rest = chosen.length < members.length ? `, ${count(chosen.length)} of ${count(members.length)} members` : "";
  return html`
    <h2>Side by side</h2>
    <p><button type="button" onclick=${load}>${loaded ? "Reload" : "Compare"} replies${rest}</button></p>
    ${loaded && html`<${Turns} members=${loaded} />`}`;
}

async function readMember(member) {
  const tree = await json(["rollouts", member.rollout_id, "tree"], { texts: "false" });
  return { ...member, turns: layout(tree).slice(0, MAX_TURNS) };
}

function Turns({ members }) {
  const size = Math.max(...members.map(({ turns }) => turns.length));
  const textOf = ({ turns }, at) => turns[at]?.opening ?? null;
  const isSame = (at) => members.every((member) => textOf(member, at) === textOf(members[0], at));
  const rows = Array.from({ length: size }, (_, at) => at);
  const parting = rows.find((at) => !isSame(at));
  return html`
    <div class="compared" tabindex="0" role="region" aria-label="Replies of the members">
      <table>
        <thead>
          <tr>
            <th scope="col">Reply</th>
            ${members.map(({ rollout_id: id, reward }) => html`
              <th scope="col"><a href=${hash("rollout", id)}>${line(id, 40)}</a><br />reward ${decimal(reward)}</th>`)}
          </tr>
        </thead>
        <tbody>
          ${rows.map((at) => html`
            <tr key=${at} class=${at === parting ? "parting" : ""}>
              <th scope="row">${at}${at === parting && " ↳ they part here"}</th>
              ${members.map(({ rollout_id: id, turns }) => html`
                <td>${turns[at] && html`<a href=${hash("rollout", id, "step", turns[at].step_id)}
                  >${line(turns[at].opening ?? "no text", 80)}</a>`}</td>`)}
            </tr>`)}
        </tbody>
      </table>
    </div>`;
}
