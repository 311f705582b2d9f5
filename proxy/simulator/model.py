"""The simulated model in use: prompts go in, tokens come out.

Holds the tokenizer, the distribution and the words together, and the scores of a prompt; it must not hold what chat
and completions make of the tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from proxy.simulator.distribution import Distribution, Prefix, load_distribution, mix, prefix_of
from proxy.simulator.errors import bad_value
from proxy.simulator.generation import Limits, Scored, Token, generate, score
from proxy.simulator.requests import Common
from proxy.simulator.sampler import Draws, Sampler, Words, plan_reply, words_of
from proxy.simulator.tokenizer import Decoder, Tokenizer, load_tokenizer, load_vocabulary


@dataclass(frozen=True, slots=True)
class Manner:
    """How a reply shall go, beside what the request's sampling settings say.

    `room` is how many tokens it may have; `alternatives` how many likely tokens are told beside each; `call`,
    if given, makes the ids of the tool call that the reply is; with `thinking` it begins with a thought. `said` is the
    whole reply, where a script says it, and `cut` after how many tokens it breaks off.
    """

    room: int
    alternatives: int = 0
    call: Callable[[Draws], Sequence[int]] | None = None
    thinking: bool = False
    said: Sequence[int] | None = None
    cut: int | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """The model with its tokenizer. All of it is pure."""

    tokenizer: Tokenizer
    distribution: Distribution
    words: Words

    def reply(self, prompt: Prefix, common: Common, manner: Manner, seed: int) -> Iterator[Token]:
        """The tokens of one choice."""
        temperature = 1.0 if common.temperature is None else common.temperature
        seed = mix(seed if temperature else 0)
        ends = (self.tokenizer.id("<|im_end|>"), self.tokenizer.id("<|endoftext|>"))
        thought = (self.tokenizer.id("<think>"), self.tokenizer.id("</think>"))
        draws = Draws(mix(seed) ^ prompt.hash)
        call = manner.said or (manner.call(draws) if manner.call else ())
        plan = plan_reply(
            draws,
            end=None if common.ignore_eos else ends[0],
            call=call,
            think=thought if manner.thinking and manner.said is None else None,
            min_tokens=common.min_tokens,
        )
        limits = Limits(
            max_tokens=manner.room,
            min_tokens=common.min_tokens,
            ends=() if common.ignore_eos else ends,
            stop_ids=frozenset(common.stop_token_ids or ()),
            stops=common.stops,
            show_stop=common.include_stop_str_in_output,
        )
        sampler = Sampler(self.distribution, self.words, seed, temperature)
        return generate(sampler.sample(prompt, plan), self.tokenizer, limits, manner.alternatives)

    def prompt_scores(self, ids: Sequence[int], alternatives: int) -> list[tuple[Scored, ...]]:
        """The scores of each prompt token but the first, which nothing came before."""
        decoder = Decoder(self.tokenizer)
        scores = []
        for prefix, token in self._prefixes(ids, decoder):
            scores.append(score(token, self.distribution.odds(prefix), decoder, alternatives))
        return scores

    def prompt_logprobs(self, ids: Sequence[int], alternatives: int) -> list[dict[str, Any] | None]:
        """The `prompt_logprobs` of an answer: by id, each token, then the likeliest; null for the first."""
        decoder = Decoder(self.tokenizer)
        entries: list[dict[str, Any] | None] = [None]
        for prefix, token in self._prefixes(ids, decoder):
            odds = self.distribution.odds(prefix)
            each = dict.fromkeys([token, *odds.best(alternatives)])
            entries.append(
                {
                    str(i): {
                        "logprob": odds.logprob(i),
                        "rank": odds.rank(i),
                        "decoded_token": decoder.string(i),
                    }
                    for i in each
                }
            )
        return entries

    def _prefixes(self, ids: Sequence[int], decoder: Decoder) -> Iterator[tuple[Prefix, int]]:
        """Each token but the first, with what came before it; the decoder stands before the token."""
        prefix = prefix_of(ids[:1])
        decoder.feed(ids[0])
        for token in ids[1:]:
            yield prefix, token
            prefix = prefix.then(token)
            decoder.feed(token)

    def check_ids(self, ids: Sequence[int]) -> None:
        """Refuse ids that are no tokens."""
        unknown = next((i for i in ids if not 0 <= i < len(self.tokenizer)), None)
        if unknown is not None:
            raise bad_value(f"Token id {unknown} is out of vocabulary")


@cache
def load_model() -> Model:
    """The model over the installed vocabulary; loaded once, it is shared by all engines of the process."""
    tokenizer = load_tokenizer()
    return Model(tokenizer, load_distribution(), words_of(load_vocabulary(), tokenizer))
