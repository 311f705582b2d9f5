// The texts of tokens, asked for in windows as they come into view.
//
// Holds what was told so far. Ids whose text nobody knows stay ids.

import { json } from "./api.js";

const WINDOW = 500;

/** Texts of the whole row of a choice: `of` is `{rolloutId, stepId, choice}`, or null where it is nobody's. */
export class Texts {
  constructor(of, changed, told) {
    this.of = of;
    this.changed = changed;
    this.told = told;
    this.known = new Map();
    this.asked = new Set();
    this.sources = new Set();
  }

  /** The text at a place: null where there is none, undefined while nobody told. */
  at(index) {
    return this.known.get(index);
  }

  /** Have the texts from here to there asked for. */
  need(from, to) {
    if (this.of === null) return;
    for (let start = from - (from % WINDOW); start < to; start += WINDOW) void this.ask(start);
  }

  async ask(start) {
    if (this.asked.has(start)) return;
    this.asked.add(start);
    const { rolloutId, stepId, choice } = this.of;
    try {
      const told = await json(["rollouts", rolloutId, "steps", stepId, "texts"], { choice, start, limit: WINDOW });
      told.texts.forEach((text, offset) => this.known.set(start + offset, text));
      for (const source of told.sources) this.sources.add(source);
      this.changed();
    } catch {
      this.sources.add("none"); // ids say as much as can be said
    }
    this.told(this.sources);
  }
}

const MEANINGS = {
  recorded: "recorded by the engine beside logprobs",
  tokenizer: "from the configured tokenizer",
  engine: "from the engine's detokenizer",
  none: "known to nobody: ids are shown",
};

/** Where texts come from, in a sentence. */
export function sourceOf(sources) {
  return sources.size ? `Texts: ${[...sources].map((one) => MEANINGS[one] ?? one).join("; ")}.` : "";
}
