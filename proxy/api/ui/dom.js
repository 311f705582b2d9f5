// Making elements, of text alone.
//
// Holds the one way in which this page makes elements, and how numbers, times and other people's text are written. What is
// recorded is untrusted: it becomes a text node or an attribute's value here, and never markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element. `props`: attributes; a function under "on…" listens; null and false are left out. */
export function el(name, props, ...children) {
  return filled(document.createElement(name), props, children);
}

/** An element of a drawing. */
export function svg(name, props, ...children) {
  return filled(document.createElementNS(SVG, name), props, children);
}

function filled(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** Put these in place of all that an element has. */
export function put(element, ...children) {
  element.replaceChildren(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

// Control and format characters (of direction, without width, tags) and line breakers: what a terminal is spared, too. Those
// that join letters stay, as many scripts need them.
const HIDDEN = /(?![\t\n\u200c\u200d])[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu;

/** Text with what would be invisible, or would rearrange its surroundings, written out. */
export function visible(text) {
  return text.toWellFormed().replace(HIDDEN, (mark) => {
    const code = mark.codePointAt(0);
    return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

/** The same, of one line and of some length. */
export function line(text, most = 200) {
  const head = visible(text.length > most ? text.slice(0, most) : text).replace(/[\n\t]/g, " ");
  return text.length > most ? `${head}…` : head;
}

const TAIL = 6;

/** An id of which both ends are seen where there is no room for all of it: many begin alike. */
export function ended(text) {
  const spelt = line(text, 120);
  if (spelt.length <= 2 * TAIL) return spelt;
  return el("span", { class: "ended" }, el("span", {}, spelt.slice(0, -TAIL)), el("span", {}, spelt.slice(-TAIL)));
}

/** A number with separators; a dash for none. */
export function count(value) {
  return typeof value === "number" ? value.toLocaleString("en") : "–";
}

/** A number with some digits that mean something; a dash for none. */
export function decimal(value, digits = 3) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  if (value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-3)) return value.toExponential(2);
  return String(Number(value.toFixed(digits)));
}

/** How long ago a unix time in milliseconds was. */
export function ago(ms) {
  if (typeof ms !== "number") return "–";
  const seconds = Math.max(0, (Date.now() - ms) / 1000);
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86400)} d`;
}

/** How long ago it was, which `tick` keeps true. */
export function since(ms) {
  return el("time", { title: clock(ms), "data-since": ms }, ago(ms));
}

/** Write all such times anew. */
export function tick() {
  for (const one of document.querySelectorAll("[data-since]")) one.textContent = ago(Number(one.dataset.since));
}

/** A unix time in milliseconds, to the second. */
export function clock(ms) {
  return typeof ms === "number" ? new Date(ms).toISOString().slice(0, 19).replace("T", " ") : "–";
}

/** A stretch of time. */
export function duration(ms) {
  if (typeof ms !== "number") return "–";
  return ms < 1000 ? `${Math.round(ms)} ms` : `${decimal(ms / 1000, 2)} s`;
}

/** A hash that leads to a view. */
export function hash(...parts) {
  return `#/${parts.map((part) => encodeURIComponent(String(part).toWellFormed())).join("/")}`;
}

/** Keep a choice for this tab, and read it. A browser may have no such store: then nothing is kept. */
export function keep(name, value) {
  try {
    if (value === null) sessionStorage.removeItem(name);
    else sessionStorage.setItem(name, value);
  } catch {
    /* storage is switched off */
  }
}

export function kept(name) {
  try {
    return sessionStorage.getItem(name);
  } catch {
    return null;
  }
}
