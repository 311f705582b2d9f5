// Components: htm templates and Preact's hooks, and keyboard shortcuts of the views.
//
// Recorded text is untrusted: templates insert values as text or as attributes, never as markup.

import { useEffect, useRef, useState } from "./vendor/hooks.js";
import htm from "./vendor/htm.js";
import { h, render } from "./vendor/preact.js";

export { useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/hooks.js";
export { render };
export const html = htm.bind(h);

const shortcuts = []; // of the components on the page; the newest ones come first

/** Register keyboard shortcuts while a component is on the page. `keys`: key -> a function of the event. */
export function useKeys(keys) {
  const newest = useRef(keys);
  newest.current = keys;
  useEffect(() => {
    shortcuts.unshift(newest);
    return () => shortcuts.splice(shortcuts.indexOf(newest), 1);
  }, []);
}

/** Run the shortcut of a key; return whether there is one. */
export function runShortcut(event) {
  const found = shortcuts.find(({ current }) => current[event.key]);
  found?.current[event.key](event);
  return found !== undefined;
}

/** Return the query of the hash, and a function that changes some of its values; empty ones are removed. */
export function useQuery() {
  const read = () => Object.fromEntries(new URLSearchParams(location.hash.split("?")[1] ?? ""));
  const [values, setValues] = useState(read);
  const change = (changed) => {
    const next = Object.fromEntries(Object.entries({ ...read(), ...changed }).filter(([, value]) => value));
    const query = new URLSearchParams(next).toString();
    history.replaceState(null, "", (location.hash.split("?")[0] || "#/rollouts") + (query && `?${query}`));
    setValues(next);
  };
  return [values, change];
}

/** Show terms and their values. */
export const Facts = ({ of }) => html`
  <dl class="facts">${of.map(([term, value]) => html`<div key=${term}><dt>${term}</dt><dd>${value}</dd></div>`)}</dl>`;

/** Show the path to a view above its title. */
export const Path = ({ links }) =>
  html`<p class="path">${links.map(([where, text]) => html`<a href=${where}>${text}</a> / `)}</p>`;
