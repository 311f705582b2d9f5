// Asking the control API.
//
// Holds the control key, which is kept for this tab alone, and the one place that sends requests. Errors are sentences.

import { keep, kept } from "./dom.js";

const BASE = new URL("../", import.meta.url); // also below a path that another proxy adds
const KEY = "tokentape.key";

/** An answer that is none. `status` 0: nobody answered. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function hasKey() {
  return kept(KEY) !== null;
}

export function setKey(key) {
  keep(KEY, key);
}

/** A path of the control API. `parts` are encoded, `query` is an object. */
export function path(parts, query = {}) {
  if (parts.some((part) => part === "." || part === "..")) {
    throw new ApiError(0, "An id of dots alone is a folder to every browser: it cannot be looked at here.");
  }
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined);
  const search = given.map(([name, value]) => `${name}=${encodeURIComponent(value)}`).join("&");
  return parts.map((part) => encodeURIComponent(String(part).toWellFormed())).join("/") + (search && `?${search}`);
}

/** The answer to GET. Raises ApiError for anything but 200. */
export async function ask(what, { accept = "application/json", signal } = {}) {
  const headers = { Accept: accept };
  const key = kept(KEY);
  if (key !== null) headers.Authorization = `Bearer ${key}`;
  let answer;
  try {
    answer = await fetch(new URL(what, BASE), { headers, signal, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, "The proxy does not answer.");
  }
  if (answer.status !== 200) throw new ApiError(answer.status, await sentence(answer));
  return answer;
}

/** What an error says of itself. */
async function sentence(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `The proxy answered with ${answer.status}.`;
  }
}

export async function json(parts, query, options) {
  return (await ask(path(parts, query), options)).json();
}

export async function text(parts, query, options) {
  return (await ask(path(parts, query), options)).text();
}

/** Lines of an answer, one JSON value each, as they come. */
export async function* lines(parts, query, options) {
  const answer = await ask(path(parts, query), { ...options, accept: "application/x-ndjson" });
  let rest = "";
  for await (const read of reads(answer)) {
    const found = (rest + read).split("\n");
    rest = found.pop();
    for (const line of found) if (line) yield JSON.parse(line);
  }
  if (rest) yield JSON.parse(rest);
}

/** The text of an answer, piece by piece; whoever stops reading ends the answer. */
export async function* reads(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
