// The page: routes between its views, the key form, light and dark colours, and keyboard shortcuts.
//
// Routes are URL hashes, so that links to steps can be shared. A view is a component; its properties are the decoded parts of
// the hash and `shell`, which shows errors and whether live updates are connected.

import { hasKey, setKey } from "./api.js";
import { Compare } from "./compare.js";
import { hash, keep, kept } from "./format.js";
import { Group, Groups } from "./groups.js";
import { html, render, runShortcut, useEffect, useMemo, useRef, useState } from "./html.js";
import { Plots } from "./plots.js";
import { Rollout } from "./rollout.js";
import { Rollouts } from "./rollouts.js";
import { Search } from "./search.js";
import { Step } from "./step.js";
import { Training } from "./training.js";

const TABS = {
  rollouts: ["Rollouts", "rollout"], groups: ["Groups", "group"], training: ["Training"], plots: ["Plots"], search: ["Search"],
};
const VIEWS = { rollouts: Rollouts, groups: Groups, training: Training, plots: Plots };
const GO_TO = { r: "rollouts", g: "groups", e: "training", p: "plots", s: "search" };
const THEMES = ["auto", "light", "dark"];
const KEYS = [
  ["/", "filter the list"],
  ["j, ↓", "the next row"],
  ["k, ↑", "the previous row"],
  ["Enter", "open the row"],
  ["x", "select the row, to compare or export"],
  ["Esc", "back"],
  ["[ ]", "the earlier step, the later step"],
  ["c", "colour tokens by mask or by logprob"],
  ["n", "in tokens: the next span or drift boundary"],
  ["← →", "in tokens and plots: the previous, the next"],
  ["g r, g g, g e, g p, g s", "go to rollouts, groups, training, plots, search"],
  ["t", "light, dark or automatic colours"],
  ["?", "this list"],
];

/** Return the decoded parts of the hash; `["?"]`, which no route matches, if they cannot be decoded. */
function parts() {
  try {
    return location.hash.replace(/^#\/?/, "").split("?")[0].split("/").filter(Boolean).map(decodeURIComponent);
  } catch {
    return ["?"];
  }
}

function viewOf([name = "rollouts", ...rest]) {
  const [id, inner, stepId] = rest;
  if (name === "compare" && id) return [Compare, { of: rest }];
  if (name in VIEWS) return [VIEWS[name], {}];
  if (name === "search") return [Search, { text: id ?? "" }];
  if (name === "group" && id) return [Group, { name: id }];
  if (name === "rollout" && id && inner === "step" && stepId) return [Step, { rolloutId: id, stepId }];
  if (name === "rollout" && id) return [Rollout, { rolloutId: id, tab: inner ?? "steps" }];
  return [Missing, {}];
}

const Missing = () => html`<h1>Page not found</h1><p><a href="#/rollouts">All rollouts</a></p>`;

function App() {
  const [run, setRun] = useState(0); // the view is created again for each
  const [error, setError] = useState(null);
  const [live, setLive] = useState(null); // of a view that follows changes
  const [theme, setTheme] = useState(THEMES.find((name) => name === kept("tokentape.theme")) ?? "auto");
  const [isHelp, setHelp] = useState(false);
  const main = useRef(null);
  const open = () => {
    setError(null);
    setLive(null);
    setRun((before) => before + 1);
  };
  useEffect(() => {
    const opened = () => {
      open();
      scrollTo(0, 0);
      main.current.focus({ preventScroll: true });
    };
    addEventListener("hashchange", opened);
    return () => removeEventListener("hashchange", opened);
  }, []);
  const turn = () => setTheme((before) => THEMES[(THEMES.indexOf(before) + 1) % THEMES.length]);
  useEffect(() => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    keep("tokentape.theme", theme);
    dispatchEvent(new Event("theme"));
  }, [theme]);
  useGlobalKeys(turn, () => setHelp(true));
  const place = parts();
  const [name = "rollouts", id, , stepId] = place;
  document.title = `${[name, id, stepId].filter(Boolean).join(" ").slice(0, 80)} · TokenTape`;
  const shell = useMemo(() => {
    const showState = (state) => {
      setLive(state);
      if (state === "live") setError(null); // everything is loaded again
    };
    return { fail: setError, showState };
  }, [run]);
  const [View, properties] = viewOf(place);
  const needsKey = error?.status === 401 || error?.status === 403;
  const forget = () => {
    setKey(null);
    open();
  };
  return html`
    <a class="skip" href="#main" onclick=${skipTo(main)}>Skip to content</a>
    <header class="top">
      <a class="brand" href="#/rollouts">TokenTape</a>
      <nav aria-label="Views">
        ${Object.entries(TABS).map(([view, [title, inner]]) => {
          const isHere = [view, inner].includes(name);
          return html`<a href=${hash(view)} aria-current=${isHere ? "page" : null}>${title}</a>`;
        })}
      </nav>
      <div class="tools">
        <span id="live" class=${live === "live" ? "live on" : "live"} role="status" hidden=${live === null}>${live}</span>
        <button id="theme" type="button" title="Light or dark colours (t)" onclick=${turn}>${theme}</button>
        <button id="forget" type="button" hidden=${!hasKey()} onclick=${forget}>Forget key</button>
        <button type="button" title="Keyboard shortcuts (?)" aria-label="Keyboard shortcuts"
          onclick=${() => setHelp(true)}>?</button>
      </div>
    </header>
    <main id="main" tabindex="-1" ref=${main}>
      ${needsKey && html`<${KeyForm} why=${hasKey() ? keyError(error) : ""} opened=${open} />`}
      ${!needsKey && html`
        <div key=${run} class=${`view v-${name in VIEWS || ["group", "rollout", "search"].includes(name) ? name : "none"}`}>
          ${error && html`
            <p class="failure" role="alert">
              ${String(error.message ?? error)} <button type="button" onclick=${open}>Try again</button>
            </p>`}
          <${View} ...${properties} shell=${shell} />
        </div>`}
    </main>
    ${isHelp && html`<${Help} close=${() => setHelp(false)} />`}`;
}

const skipTo = (main) => (event) => {
  event.preventDefault(); // the hash is the route
  main.current.focus();
};

const keyError = ({ status, message }) => (status === 401 ? "The control key is not valid." : message);

/** Request the control key; `why` is the problem with the one before. */
function KeyForm({ why, opened }) {
  const input = useRef(null);
  const [wrong, setWrong] = useState(why);
  useEffect(() => input.current.focus(), []);
  const submit = (event) => {
    event.preventDefault();
    const key = input.current.value.trim();
    if (!/^[\x21-\x7e]+$/.test(key)) return setWrong("A key consists of ASCII characters without spaces.");
    setKey(key);
    opened();
  };
  return html`
    <form class="keyform" onsubmit=${submit}>
      <h1>A control key is required</h1>
      <label for="key">Control key (one of control.api_keys)</label>
      <input type="password" id="key" autocomplete="off" required spellcheck="false" ref=${input} />
      <p class="flagged" role="alert">${wrong}</p>
      <button type="submit">Continue</button>
      <p class="dim">The key is kept for this tab only and is deleted when the tab is closed.</p>
    </form>`;
}

function Help({ close }) {
  const dialog = useRef(null);
  useEffect(() => dialog.current.showModal(), []);
  return html`
    <dialog id="help" aria-labelledby="help-title" ref=${dialog} onclose=${close}>
      <h2 id="help-title">Keyboard shortcuts</h2>
      <dl class="keys">${KEYS.map(([key, what]) => html`<div><dt><kbd>${key}</kbd></dt><dd>${what}</dd></div>`)}</dl>
      <button type="button" onclick=${() => dialog.current.close()}>Close</button>
    </dialog>`;
}

/** Handle the keys that are pressed outside of fields: `g` and a letter, then the shortcuts of the components. */
function useGlobalKeys(turn, help) {
  useEffect(() => {
    let last = "";
    const pressed = (event) => {
      if (event.defaultPrevented || event.altKey || event.ctrlKey || event.metaKey) return;
      if (event.target.closest("dialog")) return;
      if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) {
        if (event.key === "Escape") event.target.blur();
        return;
      }
      if (event.key === "Enter" && event.target.closest("button, a, summary")) return; // the element handles it
      const view = last === "g" ? GO_TO[event.key] : undefined;
      last = view ? "" : event.key;
      if (view) location.hash = hash(view);
      else if (event.key === "?") help();
      else if (event.key === "t") turn();
      else if (!runShortcut(event)) return;
      event.preventDefault();
    };
    document.addEventListener("keydown", pressed);
    return () => document.removeEventListener("keydown", pressed);
  }, []);
}

render(html`<${App} />`, document.getElementById("app"));
