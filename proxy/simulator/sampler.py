"""Seeded sampling: draws tokens from the model's distribution along the plan of a reply.

The same prompt, plan, seed and temperature always give the same ids.
"""

import math
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, repeat
from typing import Final

from proxy.simulator.distribution import NextTokenModel, Prefix, TokenDistribution, mix
from proxy.simulator.tokenizer import Tokenizer, Vocabulary

FREE: Final = -1
"""An entry of a plan: a token to be drawn. Any other entry is the id to sample at that position."""

# In tokens; a reply counts its end-of-turn token.
MIN_REPLY_TOKENS, MAX_REPLY_TOKENS = 8, 60
MIN_REASONING_TOKENS, MAX_REASONING_TOKENS = 4, 16


@dataclass(slots=True)
class RandomStream:
    """A stream of random numbers that the seed determines."""

    seed: int

    def below(self, count: int) -> int:
        """Return an integer from 0 to `count` - 1."""
        self.seed = mix(self.seed + 0x9E3779B97F4A7C15)
        return self.seed % count

    def between(self, low: int, high: int) -> int:
        """Return an integer from `low` to `high`, both included."""
        return low + self.below(high - low + 1)

    def unit(self) -> float:
        """Return a number from 0 (included) to 1 (excluded)."""
        return self.below(1 << 53) / (1 << 53)


Split = Callable[[int, RandomStream], Sequence[int]]
"""Returns the tokens to sample in place of one."""


@dataclass(frozen=True, slots=True)
class Words:
    """The tokens that are a whole word with a leading space, which can follow any text.

    `cumulative_counts` are their frequencies, added up; `texts` are the longer words, without the space.
    """

    tokens: Sequence[int]
    cumulative_counts: Sequence[float]
    texts: Sequence[str]

    def pick(self, unit: float) -> int:
        """Return the word at a point of the unit interval."""
        counts = self.cumulative_counts
        return self.tokens[bisect(counts, unit * counts[-1], hi=len(counts) - 1)]


def words_from(vocabulary: Vocabulary, tokenizer: Tokenizer) -> Words:
    """Return the words of a vocabulary: tokens that begin with a space and that no letter follows."""

    def is_letter(token: int) -> bool:
        return tokenizer.pieces[token][:1].isalpha()

    tokens = [
        token
        for token, followers in enumerate(vocabulary["followers"])
        if followers and not any(map(is_letter, followers)) and tokenizer.pieces[token][1:].isalpha()
        if tokenizer.pieces[token].startswith(b" ")
    ]
    cumulative_counts = list(accumulate(float(vocabulary["counts"][token]) for token in tokens))
    texts = [tokenizer.decode([token]).strip() for token in tokens]
    return Words(tokens, cumulative_counts, [text for text in texts if len(text) > 3])


@dataclass(frozen=True, slots=True)
class Sampler:
    """Samples the tokens of one choice. At temperature 0 it takes the most likely token for every seed."""

    model: NextTokenModel
    words: Words
    seed: int
    temperature: float

    def draw(self, distribution: TokenDistribution, prefix: Prefix) -> int:
        """Draw one token: one of the likely ones, or sometimes any word; never an end-of-turn token."""
        likely = distribution.likely
        if self.temperature == 0:
            return max(likely, key=distribution.probability)
        power = 1.0 / self.temperature
        rest = 1.0 - math.fsum(likely.values())
        # Relative to the largest probability, so that the powers do not all underflow to zero.
        largest = max(likely.values())
        weights = [(probability / largest) ** power for probability in likely.values()]
        cumulative = list(accumulate([*weights, (max(rest, 0.0) / largest) ** power]))
        stream = RandomStream(self.seed ^ prefix.hash)
        index = bisect(cumulative, stream.unit() * cumulative[-1], hi=len(cumulative) - 1)
        return list(likely)[index] if index < len(weights) else self.words.pick(stream.unit())

    def sample(
        self, prefix: Prefix, plan: Sequence[int], split: Split | None = None
    ) -> Iterator[tuple[int, TokenDistribution]]:
        """Yield the tokens of a reply with the distributions that they are sampled from; after the plan, drawn tokens.

        `split` replaces a token by others with the same text.
        """
        for planned in chain(plan, repeat(FREE)):
            distribution = self.model.distribution(prefix)
            token = self.draw(distribution, prefix) if planned == FREE else planned
            # Another seed than the draw's, so that the split does not depend on which token was drawn.
            parts = (token,) if split is None else split(token, RandomStream(mix(self.seed ^ prefix.hash)))
            for index, part in enumerate(parts):
                yield part, self.model.distribution(prefix) if index else distribution
                prefix = prefix.with_token(part)


def plan_reply(
    stream: RandomStream,
    *,
    end: int | None,
    forced: Sequence[int] = (),
    reasoning_tags: tuple[int | None, int] | None = None,
    min_tokens: int = 0,
) -> list[int]:
    """Return the plan of a reply: reasoning between `reasoning_tags`, then `forced` ids or drawn words, then `end`.

    The first tag is None if the prompt ends with it. With `end` None the plan has no end-of-turn token.
    """
    plan: list[int] = []
    if reasoning_tags is not None:
        opening, closing = reasoning_tags
        plan += [] if opening is None else [opening]
        plan += [*[FREE] * stream.between(MIN_REASONING_TOKENS, MAX_REASONING_TOKENS), closing]
    plan += forced or [FREE] * (stream.between(MIN_REPLY_TOKENS, MAX_REPLY_TOKENS) - 1)
    plan += [FREE] * (min_tokens - len(plan))
    return plan if end is None else [*plan, end]
