"""What the simulated engine samples: draws from the distribution, along the plan of a reply.

Holds seeded draws and the plan (which tokens are given, which are free, where the reply ends); it must not
hold text, stops or wire shapes. The same prompt, plan, seed and temperature give the same ids, wherever and
whenever.
"""

import math
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, repeat
from typing import Final

from proxy.simulator.distribution import Distribution, Odds, Prefix, mix
from proxy.simulator.tokenizer import Tokenizer, Vocabulary

FREE: Final = -1
"""In a plan: a token to be drawn. Any other entry is the id that is sampled there."""

SHORTEST_REPLY, LONGEST_REPLY = 8, 60  # tokens, the end of the turn included
SHORTEST_THOUGHT, LONGEST_THOUGHT = 4, 16


@dataclass(slots=True)
class Draws:
    """A stream of numbers that only the seed determines."""

    seed: int

    def below(self, count: int) -> int:
        """A whole number from 0 to `count` - 1."""
        self.seed = mix(self.seed + 0x9E3779B97F4A7C15)
        return self.seed % count

    def between(self, low: int, high: int) -> int:
        """A whole number from `low` to `high`, both included."""
        return low + self.below(high - low + 1)


@dataclass(frozen=True, slots=True)
class Words:
    """The tokens that are whole words with their space, and so fit after anything; `shares` add up."""

    tokens: Sequence[int]
    shares: Sequence[float]
    texts: Sequence[str]

    def pick(self, unit: float) -> int:
        """The word at this place of the unit interval."""
        return self.tokens[bisect(self.shares, unit * self.shares[-1], hi=len(self.shares) - 1)]


def words_of(vocabulary: Vocabulary, tokenizer: Tokenizer) -> Words:
    """The words of a vocabulary: tokens that begin with a space and that no letters follow."""

    def letter(token: int) -> bool:
        return tokenizer.pieces[token][:1].isalpha()

    tokens = [
        token
        for token, followers in enumerate(vocabulary["followers"])
        if followers and not any(map(letter, followers)) and tokenizer.pieces[token][1:].isalpha()
        if tokenizer.pieces[token].startswith(b" ")
    ]
    shares = list(accumulate(float(vocabulary["counts"][token]) for token in tokens))
    texts = [tokenizer.decode([token]).strip() for token in tokens]
    return Words(tokens, shares, [text for text in texts if len(text) > 3])


@dataclass(frozen=True, slots=True)
class Sampler:
    """Draws the tokens of one choice.

    `temperature` 0 always takes the most likely token, and needs no seed.
    """

    distribution: Distribution
    words: Words
    seed: int
    temperature: float

    def draw(self, odds: Odds, prefix: Prefix) -> int:
        """One free token: among the likely ones, or now and then any word; never the end of the turn."""
        if self.temperature == 0:
            return max(odds.likely, key=odds.chance)
        power = 1.0 / self.temperature
        rest = 1.0 - math.fsum(odds.likely.values())
        # Relative to the largest, so that a power of a small chance does not vanish for all of them.
        largest = max(odds.likely.values())
        weights = [(chance / largest) ** power for chance in odds.likely.values()]
        rising = list(accumulate([*weights, (max(rest, 0.0) / largest) ** power]))
        draws = Draws(self.seed ^ prefix.hash)
        at = bisect(rising, draws.below(1 << 53) / (1 << 53) * rising[-1], hi=len(rising) - 1)
        if at < len(weights):
            return list(odds.likely)[at]
        return self.words.pick(draws.below(1 << 53) / (1 << 53))

    def sample(self, prefix: Prefix, plan: Sequence[int]) -> Iterator[tuple[int, Odds]]:
        """The tokens of a reply, each with the odds it was sampled from; past the plan, free ones."""
        for planned in chain(plan, repeat(FREE)):
            odds = self.distribution.odds(prefix)
            token = self.draw(odds, prefix) if planned == FREE else planned
            yield token, odds
            prefix = prefix.then(token)


def plan_reply(
    draws: Draws,
    *,
    end: int | None,
    call: Sequence[int] = (),
    think: tuple[int, int] | None = None,
    min_tokens: int = 0,
) -> list[int]:
    """Lay out a reply: a thought if `think` (its two tokens) is given, a tool call or words, then the end.

    `end` None lets the reply run on until something else stops it. `call` is the ids of a tool call.
    """
    plan: list[int] = []
    if think is not None:
        plan += [think[0], *[FREE] * draws.between(SHORTEST_THOUGHT, LONGEST_THOUGHT), think[1]]
    plan += call or [FREE] * (draws.between(SHORTEST_REPLY, LONGEST_REPLY) - 1)
    plan += [FREE] * (min_tokens - len(plan))
    return plan if end is None else [*plan, end]
