// The filter of a list: words, and terms `field:value`. A value is a text, a number, a range (`>0.5`, `0..1`) or `none`.
//
// A minus before a term negates it, quotes keep spaces together. Times are dates (`2026-11-28T10:00`, UTC) or ages (`2h`).

import { html, useEffect, useKeys, useRef, useState } from "./html.js";

const TERM = /(-?)(?:([a-z_]+)((?:\.[\w-]+)*):)?("[^"]*"?|\S+)/gi;
const NUMBER = String.raw`(-?\d+(?:\.\d+)?(?:e-?\d+)?)`;
const ONE = new RegExp(`^([<>]=?)?${NUMBER}$`, "i");
const BOTH = new RegExp(`^${NUMBER}?\\.\\.${NUMBER}?$`, "i");
const AGE = /^(\d+(?:\.\d+)?)(s|min|h|d)$/;
const TYPING_MS = 300; // until the proxy is asked for what was typed
const SECONDS = { s: 1, min: 60, h: 3600, d: 86400 };
const TIMES = ["since", "until", "time"];

/** Return the terms of a filter. `fields`: name -> a function of a row and a path, which returns a value or several.
 *
 * A term has its `field` (null for a word), its `text`, whether it `isNot`, and `accepts`, a function of a value.
 */
export function parse(text, fields) {
  return [...text.matchAll(TERM)].flatMap(([whole, minus, name, path, value]) => {
    const field = name?.toLowerCase();
    const word = plain(whole);
    if (!Object.hasOwn(fields, field ?? "")) return [{ field: null, text: word, isNot: false, accepts: containing(word) }];
    const given = { field, path: path.slice(1), text: plain(value), isNot: minus === "-" };
    return TIMES.includes(field) ? timed(given) : [{ ...given, accepts: accepting(given.text) }];
  });
}

const plain = (text) => text.replaceAll('"', "");

/** Return whether a row matches all terms; `words` is the text of a row in which words are searched. */
export const matches = (row, terms, fields, words) =>
  terms.every(({ field, path, isNot, accepts }) => {
    const value = field === null ? words(row) : fields[field](row, path);
    return (Array.isArray(value) ? (value.length ? value.some(accepts) : accepts(null)) : accepts(value)) !== isNot;
  });

function containing(text) {
  const wanted = text.toLowerCase();
  return (value) => value !== null && value !== undefined && String(value).toLowerCase().includes(wanted);
}

/** Return a function that tells whether a value is the one that is wanted. */
function accepting(text) {
  if (text === "none") return (value) => value === null || value === undefined;
  const [one, both] = [ONE.exec(text), BOTH.exec(text)];
  const inRange = one ? comparing(one[1], Number(one[2])) : both && between(both[1], both[2]);
  const contains = containing(text);
  if (!inRange) return contains;
  return (value) => {
    if (value === null || value === undefined || value === "") return false;
    return Number.isNaN(Number(value)) ? contains(value) : inRange(Number(value));
  };
}

const comparing = (sign = "=", wanted) => (value) =>
  ({ "=": value === wanted, "<": value < wanted, "<=": value <= wanted, ">": value > wanted, ">=": value >= wanted })[sign];
const between = (low = "-Infinity", high = "Infinity") => (value) => value >= Number(low) && value <= Number(high);

/** Return terms for `since` and `until`, also of a range of times; none for a time that is not written to its end. */
function timed(given) {
  const { field, text } = given;
  const [first, last] = field === "time" ? text.split("..") : [text, text];
  const terms = [["since", field === "until" ? "" : first], ["until", field === "since" ? "" : last ?? ""]];
  return terms.flatMap(([name, of]) => {
    const seconds = secondsOf(of);
    if (Number.isNaN(seconds)) return [];
    const accepts = (value) => (name === "since" ? value >= seconds : value <= seconds);
    return [{ ...given, field: name, text: String(seconds), accepts }];
  });
}

/** Return a time in unix seconds, from a date or an age. */
function secondsOf(text) {
  const age = AGE.exec(text);
  if (age) return Math.floor(Date.now() / 1000 - Number(age[1]) * SECONDS[age[2]]);
  if (!/^\d{4}-\d\d-\d\d/.test(text)) return NaN;
  return Math.floor(Date.parse(text.includes("T") && !/[z+]/i.test(text.slice(10)) ? `${text}Z` : text) / 1000);
}

/** Return a value within the metadata of a row, as a text if it has parts. */
export function metadataOf({ metadata }, path) {
  const value = path.split(".").filter(Boolean).reduce((inner, name) => inner?.[name], metadata);
  return typeof value === "object" && value !== null ? JSON.stringify(value) : value;
}

/** Return a function that tells whether the store finds a term: the exact value of an indexed field. */
const isFoundBy = (indexed) => ({ field, path, text, isNot }) =>
  Object.hasOwn(indexed, field ?? "") && !path && !isNot && text && text !== "none"
  && (indexed[field][1]?.includes(text) ?? true);

/** Return the query of the route for the terms that the store finds. `indexed`: field -> `[parameter, its values if known]`. */
export const queryOf = (terms, indexed) =>
  Object.fromEntries(terms.filter(isFoundBy(indexed)).map(({ field, text }) => [indexed[field][0], text]));

/** Return a sentence that names the terms that only select among the rows that are loaded. */
export function localOf(terms, indexed) {
  const isFound = isFoundBy(indexed);
  const names = [...new Set(terms.filter((term) => !isFound(term)).map(({ field }) => field ?? "words"))];
  return names.length ? `; ${names.join(", ")}: only of these` : "";
}

/** Return a value once it has not changed for TYPING_MS. */
export function useSettled(value) {
  const [settled, setSettled] = useState(value);
  useEffect(() => {
    const timer = setTimeout(() => setSettled(value), TYPING_MS);
    return () => clearTimeout(timer);
  }, [value]);
  return settled;
}

/** Show the field of the filter, which is explained while it is used; `/` focuses it. */
export function Filter({ label, value, choose, fields, indexed }) {
  const field = useRef(null);
  useKeys({ "/": () => field.current.focus() });
  const names = Object.keys(fields).filter((name) => !Object.hasOwn(indexed, name));
  return html`
    <span class="filter">
      <input type="search" id="filter" placeholder="Filter ( / )" aria-label=${label} spellcheck="false" autocomplete="off"
        aria-describedby="hint" ref=${field} value=${value} oninput=${(event) => choose(event.target.value)} />
      <span id="hint" class="hint">
        Words, and terms such as <code>reward:>=0.5</code>, <code>drift:1..9</code>, <code>metadata.task:"two words"</code>,
        <code>-status:open</code>, <code>reward:none</code>, <code>since:2h</code>, <code>time:2026-11-27..2026-11-28</code>.
        In the whole store, by their exact values: ${Object.keys(indexed).join(", ")}.
        In what is loaded: words, ${names.join(", ")}.
      </span>
    </span>`;
}
