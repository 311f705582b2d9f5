// What changed, told as it happens by GET /events.
//
// Holds the reading of that stream with fetch, since EventSource cannot send a key. After each connection `changed` is called
// with null: nothing is told again, so whoever follows looks anew.

import { ApiError, ask, path, reads } from "./api.js";

const SILENT_MS = 40_000; // a comment comes every 15 s
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 15_000;

/** Follow one rollout, or all of them (null). Gives what ends it. */
export function follow(rolloutId, changed, told) {
  const ended = new AbortController();
  void following(rolloutId, changed, told, ended.signal);
  return () => ended.abort();
}

async function following(rolloutId, changed, told, signal) {
  let wait = FIRST_WAIT_MS;
  while (!signal.aborted) {
    try {
      await once(
        rolloutId,
        changed,
        () => {
          wait = FIRST_WAIT_MS;
          told("live");
        },
        signal,
      );
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof ApiError && [401, 403].includes(error.status)) return told("not following");
    }
    if (signal.aborted) return;
    told("connecting");
    await new Promise((resolve) => setTimeout(resolve, wait));
    wait = Math.min(wait * 2, LONGEST_WAIT_MS);
  }
}

/** One connection, to its end. */
async function once(rolloutId, changed, connected, signal) {
  const broken = new AbortController();
  const stop = () => broken.abort();
  signal.addEventListener("abort", stop);
  let watch = setTimeout(stop, SILENT_MS);
  try {
    const query = rolloutId === null ? {} : { rollout_id: rolloutId };
    const answer = await ask(path(["events"], query), { accept: "text/event-stream", signal: broken.signal });
    connected();
    changed(null);
    let rest = "";
    for await (const read of reads(answer)) {
      clearTimeout(watch);
      watch = setTimeout(stop, SILENT_MS);
      const events = (rest + read).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.split("\n").find((line) => line.startsWith("data: "));
        if (data) changed(JSON.parse(data.slice(6)));
      }
    }
  } finally {
    clearTimeout(watch);
    signal.removeEventListener("abort", stop);
  }
}

/** Call `work` soon, never twice at once, and the less often the longer it takes. */
export function gently(work, leastMs = 300) {
  let asked = false;
  let busy = false;
  async function run() {
    busy = true;
    while (asked) {
      asked = false;
      const began = performance.now();
      await work();
      const took = performance.now() - began;
      await new Promise((resolve) => setTimeout(resolve, Math.max(leastMs, 5 * took)));
    }
    busy = false;
  }
  return () => {
    asked = true;
    if (!busy) void run();
  };
}
