// The page: routes between its views, the key form, light and dark colours, and keyboard shortcuts.
//
// Routes are URL hashes, so that links to steps can be shared. Every view returns an object with `end()`, and optionally
// `back`, `table`, `filter`, `turn` (colours), `go` (neighbours) and `next` (marks), which keyboard shortcuts use.

import { hasKey, setKey } from "./api.js";
import { el, keep, kept, put, tick } from "./dom.js";
import { show as showGroup } from "./group.js";
import { show as showGroups } from "./groups.js";
import { show as showRollouts } from "./list.js";
import { show as showPlots } from "./overview.js";
import { showRollout } from "./rollout.js";
import { showStep } from "./step.js";

const byId = (id) => document.getElementById(id);
const main = byId("main");
let view = { end() {} };

/** Return the decoded parts of the hash; `["?"]`, which no route matches, if they cannot be decoded. */
function parts() {
  try {
    return location.hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(decodeURIComponent);
  } catch {
    return ["?"];
  }
}

function route() {
  view.end();
  const found = parts();
  const [name = "rollouts", id, inner, stepId] = found;
  const place = el("div", {
    class: `view v-${["rollouts", "groups", "plots", "group", "rollout"].includes(name) ? name : "none"}`,
  });
  put(main, place);
  const tools = {
    fail: (error) => main.contains(place) && failed(place, error),
    showState: (state) => main.contains(place) && showLive(state, place),
  };
  showLive("not connected");
  for (const link of document.querySelectorAll("[data-view]")) {
    const isHere = link.dataset.view === { rollout: "rollouts", group: "groups" }[name] || link.dataset.view === name;
    if (isHere) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  try {
    view = opened(place, tools, name, id, inner, stepId);
  } catch (error) {
    view = { end() {} };
    failed(place, error);
  }
  document.title = `${[name, id, stepId].filter(Boolean).join(" ").slice(0, 80)} · TokenTape`;
  byId("forget").hidden = !hasKey();
  scrollTo(0, 0);
  view.table?.element.focus({ preventScroll: true });
}

function opened(place, tools, name, id, inner, stepId) {
  if (name === "rollouts") return showRollouts(place, tools);
  if (name === "groups") return showGroups(place, tools);
  if (name === "plots") return showPlots(place, tools);
  if (name === "group" && id) return showGroup(place, id, tools);
  if (name === "rollout" && id && inner === "step" && stepId) return showStep(place, id, stepId, tools);
  if (name === "rollout" && id)
    return showRollout(place, id, ["sequences", "plots"].includes(inner) ? inner : "steps", tools);
  place.append(el("h1", {}, "Page not found"), el("p", {}, el("a", { href: "#/rollouts" }, "All rollouts")));
  return { end() {} };
}

/** Show the key form if a key is required; otherwise show the error. */
function failed(place, error) {
  if (error.status === 401 || error.status === 403) return showKeyForm(hasKey() ? keyError(error) : "");
  place.querySelector(".failure")?.remove();
  place.prepend(
    el(
      "p",
      { class: "failure", role: "alert" },
      String(error.message ?? error),
      " ",
      el("button", { type: "button", onclick: route }, "Try again"),
    ),
  );
}

const keyError = ({ status, message }) => (status === 401 ? "The control key is not valid." : message);

function showKeyForm(why) {
  view.end();
  view = { end() {} };
  const input = el("input", { type: "password", id: "key", autocomplete: "off", required: true, spellcheck: "false" });
  const wrong = el("p", { class: "flagged", role: "alert" }, why);
  const form = el(
    "form",
    {
      class: "keyform",
      onsubmit: (event) => {
        event.preventDefault();
        const key = input.value.trim();
        if (!/^[\x21-\x7e]+$/.test(key)) {
          wrong.textContent = "A key consists of ASCII characters without spaces.";
          return;
        }
        setKey(key);
        route();
      },
    },
    el("h1", {}, "A control key is required"),
    el("label", { for: "key" }, "Control key (one of control.api_keys)"),
    input,
    wrong,
    el("button", { type: "submit" }, "Continue"),
    el("p", { class: "dim" }, "The key is kept for this tab only and is deleted when the tab is closed."),
  );
  put(main, form);
  input.focus();
}

function showLive(state, place) {
  byId("live").textContent = state;
  byId("live").classList.toggle("on", state === "live");
  if (state === "live") place.querySelector(".failure")?.remove(); // everything is loaded again
}

const THEMES = ["auto", "light", "dark"];

function theme(name) {
  const chosen = THEMES.includes(name) ? name : "auto";
  if (chosen === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
  byId("theme").textContent = chosen;
  keep("tokentape.theme", chosen);
}

const nextTheme = () => theme(THEMES[(THEMES.indexOf(byId("theme").textContent) + 1) % THEMES.length]);

const KEYS = [
  ["/", "filter the list"],
  ["j, ↓", "the next row"],
  ["k, ↑", "the previous row"],
  ["Enter", "open the row"],
  ["Esc", "back"],
  ["[ ]", "the previous step, the next step"],
  ["c", "colour tokens by mask or by logprob"],
  ["n", "in tokens: the next span or drift boundary"],
  ["← →", "in tokens and plots: the previous, the next"],
  ["g r, g g, g p", "go to rollouts, groups, plots"],
  ["t", "light, dark or automatic colours"],
  ["?", "this list"],
];

function help() {
  const dialog = byId("help");
  put(
    dialog,
    el("h2", { id: "help-title" }, "Keyboard shortcuts"),
    el(
      "dl",
      { class: "keys" },
      KEYS.map(([key, what]) => el("div", {}, el("dt", {}, el("kbd", {}, key)), el("dd", {}, what))),
    ),
    el("button", { type: "button", onclick: () => dialog.close() }, "Close"),
  );
  if (!dialog.open) dialog.showModal();
}

let pressed = "";

function key(event) {
  if (event.defaultPrevented || event.altKey || event.ctrlKey || event.metaKey || byId("help").open) return;
  if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) {
    if (event.key === "Escape") {
      event.target.blur();
      view.table?.element.focus({ preventScroll: true });
    }
    return;
  }
  const where = pressed === "g" ? { r: "#/rollouts", g: "#/groups", p: "#/plots" }[event.key] : undefined;
  pressed = where ? "" : event.key;
  const does = {
    "/": () => view.filter?.focus(),
    "?": help,
    t: nextTheme,
    c: () => view.turn?.(),
    n: () => view.next?.(),
    "[": () => view.go?.(-1),
    "]": () => view.go?.(1),
    Escape: () => {
      if (view.back) location.hash = view.back;
    },
  }[event.key];
  if (where) location.hash = where;
  else if (does) does();
  else if (view.table?.key(event)) return;
  else return;
  event.preventDefault();
}

theme(kept("tokentape.theme"));
byId("theme").addEventListener("click", nextTheme);
byId("help-open").addEventListener("click", help);
byId("forget").addEventListener("click", () => {
  setKey(null);
  route();
});
document.addEventListener("keydown", key);
addEventListener("hashchange", route);
setInterval(tick, 1000);
route();
