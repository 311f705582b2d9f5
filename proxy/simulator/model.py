"""The simulated model: generates the tokens of choices and scores the tokens of prompts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from proxy.simulator.distribution import NextTokenModel, Prefix, load_next_token_model, mix, prefix_from
from proxy.simulator.errors import invalid_value
from proxy.simulator.generation import StopConditions, Token, TokenLogprob, generate, token_logprobs
from proxy.simulator.requests import CommonFields
from proxy.simulator.sampler import RandomStream, Sampler, Words, plan_reply, words_from
from proxy.simulator.tokenizer import Decoder, Tokenizer, load_tokenizer, load_vocabulary


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """How to generate a choice, apart from the fields of `CommonFields`.

    `max_tokens` is what the context window allows. `alternatives` is the number of most likely tokens to score at each
    position. `make_call` returns the ids of the tool call that the reply consists of. With `reasoning` the reply begins
    with reasoning. `scripted_ids` is the whole reply of a script, and `disconnect_after` the number of tokens after which
    the engine disconnects.
    """

    max_tokens: int
    alternatives: int = 0
    make_call: Callable[[RandomStream], Sequence[int]] | None = None
    reasoning: bool = False
    scripted_ids: Sequence[int] | None = None
    disconnect_after: int | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """The model and its tokenizer; all methods are pure."""

    tokenizer: Tokenizer
    next_token: NextTokenModel
    words: Words

    def generate(self, prompt: Prefix, common: CommonFields, options: GenerationOptions, seed: int) -> Iterator[Token]:
        """Yield the tokens of one choice."""
        temperature = 1.0 if common.temperature is None else common.temperature
        seed = mix(seed if temperature else 0)
        eos_ids = (self.tokenizer.id("<|im_end|>"), self.tokenizer.id("<|endoftext|>"))
        reasoning_tags = (self.tokenizer.id("<think>"), self.tokenizer.id("</think>"))
        stream = RandomStream(mix(seed) ^ prompt.hash)
        forced = options.scripted_ids or (options.make_call(stream) if options.make_call else ())
        plan = plan_reply(
            stream,
            end=None if common.ignore_eos else eos_ids[0],
            forced=forced,
            reasoning_tags=reasoning_tags if options.reasoning and options.scripted_ids is None else None,
            min_tokens=common.min_tokens,
        )
        conditions = StopConditions(
            max_tokens=options.max_tokens,
            min_tokens=common.min_tokens,
            eos_ids=() if common.ignore_eos else eos_ids,
            stop_token_ids=frozenset(common.stop_token_ids or ()),
            stop_strings=common.stop_strings,
            include_stop=common.include_stop_str_in_output,
        )
        sampler = Sampler(self.next_token, self.words, seed, temperature)
        return generate(sampler.sample(prompt, plan), self.tokenizer, conditions, options.alternatives)

    def score(self, ids: Sequence[int], alternatives: int) -> list[tuple[TokenLogprob, ...]]:
        """Return the logprobs of each prompt token but the first, which has no prefix."""
        decoder = Decoder(self.tokenizer)
        scores = []
        for prefix, token in self._prefixes(ids, decoder):
            scores.append(token_logprobs(token, self.next_token.distribution(prefix), decoder, alternatives))
        return scores

    def prompt_logprobs(self, ids: Sequence[int], alternatives: int) -> list[dict[str, Any] | None]:
        """Return `prompt_logprobs`: None for the first token, then by id the token and the most likely tokens."""
        decoder = Decoder(self.tokenizer)
        entries: list[dict[str, Any] | None] = [None]
        for prefix, token in self._prefixes(ids, decoder):
            distribution = self.next_token.distribution(prefix)
            entries.append(
                {
                    str(i): {
                        "logprob": distribution.logprob(i),
                        "rank": distribution.rank(i),
                        "decoded_token": decoder.string(i),
                    }
                    for i in dict.fromkeys([token, *distribution.top(alternatives)])
                }
            )
        return entries

    def _prefixes(self, ids: Sequence[int], decoder: Decoder) -> Iterator[tuple[Prefix, int]]:
        """Yield each token but the first with its prefix; the decoder has been fed the tokens before it."""
        prefix = prefix_from(ids[:1])
        decoder.feed(ids[0])
        for token in ids[1:]:
            yield prefix, token
            prefix = prefix.with_token(token)
            decoder.feed(token)

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise RequestError for an id outside the vocabulary."""
        unknown = next((i for i in ids if not 0 <= i < len(self.tokenizer)), None)
        if unknown is not None:
            raise invalid_value(f"Token id {unknown} is out of vocabulary")


@cache
def load_model() -> Model:
    """Return the model over the installed vocabulary; it is loaded once, and all engines of the process share it."""
    tokenizer = load_tokenizer()
    return Model(tokenizer, load_next_token_model(), words_from(load_vocabulary(), tokenizer))
