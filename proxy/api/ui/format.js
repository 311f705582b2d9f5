// Formatting of numbers, times and recorded text.

// Control characters, format characters (text direction, zero width, tags) and line separators, as in the terminal output.
// Joiners stay, because many scripts need them.
const HIDDEN = /(?![\t\n\u200c\u200d])[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu;

/** Return the text with invisible and reordering characters written as code points. */
export function visible(text) {
  return text.toWellFormed().replace(HIDDEN, (mark) => {
    const code = mark.codePointAt(0);
    return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

/** Return the visible text on one line, cut at `most` characters. */
export function line(text, most = 200) {
  const head = visible(text.length > most ? text.slice(0, most) : text).replace(/[\n\t]/g, " ");
  return text.length > most ? `${head}…` : head;
}

/** Format a number with thousands separators; a dash for none. */
export function count(value) {
  return typeof value === "number" ? value.toLocaleString("en") : "–";
}

/** Format a number with `digits` decimals; a dash for none. */
export function decimal(value, digits = 3) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  if (value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-3)) return value.toExponential(2);
  return String(Number(value.toFixed(digits)));
}

/** Format the age of a unix time in milliseconds. */
export function ago(ms) {
  if (typeof ms !== "number") return "–";
  const seconds = Math.max(0, (Date.now() - ms) / 1000);
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h`;
  return `${Math.floor(seconds / 86400)} d`;
}

/** Format a unix time in milliseconds, to the second. */
export function clock(ms) {
  return typeof ms === "number" ? new Date(ms).toISOString().slice(0, 19).replace("T", " ") : "–";
}

/** Format a duration in milliseconds. */
export function duration(ms) {
  if (typeof ms !== "number") return "–";
  return ms < 1000 ? `${Math.round(ms)} ms` : `${decimal(ms / 1000, 2)} s`;
}

/** Return the hash of a view. */
export function hash(...parts) {
  return `#/${parts.map((part) => encodeURIComponent(String(part).toWellFormed())).join("/")}`;
}

/** Keep a choice for this tab; without session storage nothing is kept. */
export function keep(name, value) {
  try {
    if (value === null) sessionStorage.removeItem(name);
    else sessionStorage.setItem(name, value);
  } catch {
    /* session storage is disabled */
  }
}

export function kept(name) {
  try {
    return sessionStorage.getItem(name);
  } catch {
    return null;
  }
}

/** Return a policy version, after the name of the policy unless that is `default`, and the epoch unless that is the first one;
 * null if there is none of them. */
export const versionOf = ({ policy = null, policy_version: version, policy_epoch: epoch = 0 }) =>
  [policy, epoch ? `epoch ${epoch}` : null, version].filter((part) => part !== null).join(" ") || null;
