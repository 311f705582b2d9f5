// The texts of tokens, requested in windows as they come into view. Tokens without a text are shown as ids.

import { json } from "./api.js";

const WINDOW = 500;

/** The texts of the whole row of a choice: `of` is `{rolloutId, stepId, choice}`, or null for a row without a choice. */
export class Texts {
  constructor(of, changed) {
    this.of = of;
    this.changed = changed;
    this.known = new Map();
    this.requested = new Set();
    this.sources = new Set();
  }

  /** Return the text at an index: null if there is none, undefined if it is not loaded. */
  at(index) {
    return this.known.get(index);
  }

  /** Request the texts of the tokens from `from` to `to`. */
  need(from, to) {
    if (this.of === null) return;
    for (let start = from - (from % WINDOW); start < to; start += WINDOW) void this.load(start);
  }

  async load(start) {
    if (this.requested.has(start)) return;
    this.requested.add(start);
    const { rolloutId, stepId, choice } = this.of;
    try {
      const found = await json(["rollouts", rolloutId, "steps", stepId, "texts"], { choice, start, limit: WINDOW });
      found.texts.forEach((text, offset) => this.known.set(start + offset, text));
      for (const source of found.sources) this.sources.add(source);
    } catch {
      this.sources.add("none"); // the ids are shown instead
    }
    this.changed();
  }
}

const MEANINGS = {
  recorded: "recorded by the engine with the logprobs",
  tokenizer: "from the configured tokenizer",
  engine: "from the engine's detokenizer",
  none: "not available; token ids are shown",
};

/** Return a sentence that names the sources of the texts. */
export function sourceOf(sources) {
  return sources.size ? `Texts: ${[...sources].map((source) => MEANINGS[source] ?? source).join("; ")}.` : "";
}
