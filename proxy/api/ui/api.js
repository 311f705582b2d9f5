// Requests to the control API, with the control key, which is kept for this tab only.

import { keep, kept } from "./format.js";

const BASE = new URL("../", import.meta.url); // also below a path that another proxy adds
const KEY = "tokentape.key";

/** An error response. `status` is 0 if there was no response. */
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
    throw new ApiError(0, "Browsers treat an ID of only dots as a folder: this page cannot show it.");
  }
  const params = Object.entries(query).filter(([, value]) => value !== null && value !== undefined);
  const search = params.map(([name, value]) => `${name}=${encodeURIComponent(value)}`).join("&");
  return parts.map((part) => encodeURIComponent(String(part).toWellFormed())).join("/") + (search && `?${search}`);
}

/** Send GET and return the response. Throws ApiError for any status but 200. */
export async function get(resource, { accept = "application/json", signal } = {}) {
  const headers = { Accept: accept };
  const key = kept(KEY);
  if (key !== null) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(new URL(resource, BASE), { headers, signal, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, "The proxy is unreachable.");
  }
  if (response.status !== 200) throw new ApiError(response.status, await errorMessage(response));
  return response;
}

async function errorMessage(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The proxy responded with status ${response.status}.`;
  }
}

export async function json(parts, query, options) {
  return (await get(path(parts, query), options)).json();
}

export async function text(parts, query, options) {
  return (await get(path(parts, query), options)).text();
}

/** Yield the lines of a response as they arrive, one JSON value each. */
export async function* lines(parts, query, options) {
  const response = await get(path(parts, query), { ...options, accept: "application/x-ndjson" });
  let rest = "";
  for await (const chunk of chunks(response)) {
    const found = (rest + chunk).split("\n");
    rest = found.pop();
    for (const line of found) if (line) yield JSON.parse(line);
  }
  if (rest) yield JSON.parse(rest);
}

/** Yield the text of a response in chunks; the response is cancelled when the reader stops. */
export async function* chunks(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
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
