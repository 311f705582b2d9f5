// Changes of rollouts as they happen, read from GET /events.
//
// The stream is read with fetch, because EventSource cannot send a key. Events are not repeated: after each connection
// `changed` is called with null, and the caller loads everything again.

import { ApiError, chunks, get, path } from "./api.js";
import { useEffect, useRef, useState } from "./html.js";

const SILENT_MS = 40_000; // a comment comes every 15 s
const FIRST_WAIT_MS = 500;
const MAX_WAIT_MS = 15_000;

/** Follow one rollout, or all of them (null). Return the function that ends it. */
export function follow(rolloutId, changed, showState) {
  const ended = new AbortController();
  void following(rolloutId, changed, showState, ended.signal);
  return () => ended.abort();
}

async function following(rolloutId, changed, showState, signal) {
  let wait = FIRST_WAIT_MS;
  while (!signal.aborted) {
    try {
      await once(
        rolloutId,
        changed,
        () => {
          wait = FIRST_WAIT_MS;
          showState("live");
        },
        signal,
      );
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof ApiError && [401, 403].includes(error.status)) return showState("not connected");
    }
    if (signal.aborted) return;
    showState("connecting");
    await new Promise((resolve) => setTimeout(resolve, wait));
    wait = Math.min(wait * 2, MAX_WAIT_MS);
  }
}

/** Read one connection to its end. */
async function once(rolloutId, changed, connected, signal) {
  const broken = new AbortController();
  const stop = () => broken.abort();
  signal.addEventListener("abort", stop);
  let watch = setTimeout(stop, SILENT_MS);
  try {
    const query = rolloutId === null ? {} : { rollout_id: rolloutId };
    const response = await get(path(["events"], query), { accept: "text/event-stream", signal: broken.signal });
    connected();
    changed(null);
    let rest = "";
    for await (const chunk of chunks(response)) {
      clearTimeout(watch);
      watch = setTimeout(stop, SILENT_MS);
      const events = (rest + chunk).split("\n\n");
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

/** Return a function that runs `work` soon: never twice at the same time, and less often the longer it takes. */
export function gently(work, leastMs = 300) {
  let requested = false;
  let busy = false;
  async function run() {
    busy = true;
    while (requested) {
      requested = false;
      const began = performance.now();
      await work();
      const took = performance.now() - began;
      await new Promise((resolve) => setTimeout(resolve, Math.max(leastMs, 5 * took)));
    }
    busy = false;
  }
  return () => {
    requested = true;
    if (!busy) void run();
  };
}

/** Load data at once, and again after each change of a rollout (`follows`: its ID, null for all, undefined for none).
 *
 * Return the newest data, null before. `isRelevant` selects changes; the page's `shell` shows errors and the connection.
 * If `of`, what is loaded, becomes another value, the data stay until the other ones are there.
 */
export function useLoaded(shell, load, { follows, isRelevant = () => true, leastMs, of } = {}) {
  const [data, setData] = useState(null);
  const newest = useRef();
  newest.current = { load, isRelevant };
  useEffect(() => {
    let isOver = false;
    const update = gently(async () => {
      try {
        const loaded = await newest.current.load();
        if (!isOver) setData(loaded);
      } catch (error) {
        if (!isOver) shell.fail(error);
      }
    }, leastMs);
    update();
    const changed = (change) => (change === null || newest.current.isRelevant(change)) && update();
    const end = follows === undefined ? () => {} : follow(follows, changed, shell.showState);
    return () => {
      isOver = true;
      end();
    };
  }, [of]);
  return data;
}
