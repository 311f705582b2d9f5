"""The simulated model: what may come after a prefix of ids, and how likely each token is.

Holds a proper probability distribution over the whole vocabulary that depends on the prefix ids and on
nothing else, so that scoring a sequence again gives the very numbers of its sampling; it must not hold seeds,
temperatures or draws.

The likely tokens are those that often followed the last id in the training text, weighed by their rank and by
a hash of the whole prefix. What is left of the probability is spread over the vocabulary as often as each
token occurred.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from struct import Struct
from typing import Final

from proxy.simulator.tokenizer import Vocabulary, load_vocabulary

_MASK: Final = (1 << 64) - 1
_TAIL: Final = 0.04  # the share of probability spread over the whole vocabulary
_RANK_WEIGHTS: Final = tuple(1.0 / (rank + 1.5) for rank in range(8))
_FLOAT32: Final = Struct("f")


def mix(value: int) -> int:
    """Scramble 64 bits, so that each bit of the answer depends on every bit of the value (splitmix64)."""
    value &= _MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def as_float32(value: float) -> float:
    """A number as the engines' arithmetic keeps it."""
    rounded: float = _FLOAT32.unpack(_FLOAT32.pack(value))[0]
    return rounded


@dataclass(frozen=True, slots=True)
class Prefix:
    """All that the model keeps of the ids so far: a rolling hash of them, and the last one."""

    hash: int = 0
    last: int = -1

    def then(self, token: int) -> "Prefix":
        """The prefix one id longer."""
        return Prefix((self.hash ^ (token + 1)) * 0x9E3779B97F4A7C15 & _MASK, token)


def prefix_of(ids: Iterable[int]) -> Prefix:
    """The prefix that these ids are."""
    prefix = Prefix()
    for token in ids:
        prefix = prefix.then(token)
    return prefix


@dataclass(frozen=True, slots=True)
class Tail:
    """The part of every distribution that no prefix moves.

    `chances` has one probability per id and sums to `_TAIL`; `rising` is the same, sorted; `best` is ids,
    likely first.
    """

    chances: Sequence[float]
    rising: Sequence[float]
    best: Sequence[int]


@dataclass(frozen=True, slots=True)
class Odds:
    """The distribution after one prefix.

    `likely` has the whole probability of the few tokens that stand out.
    """

    likely: dict[int, float]
    tail: Tail

    def chance(self, token: int) -> float:
        """The probability of a token; over the vocabulary they sum to one."""
        return self.likely.get(token) or self.tail.chances[token]

    def logprob(self, token: int) -> float:
        """The natural logarithm of the probability, rounded to float32 as engines compute it."""
        return as_float32(math.log(self.chance(token)))

    def best(self, count: int) -> list[int]:
        """The `count` most likely tokens, most likely first."""
        others = [token for token in self.tail.best[: count + len(self.likely)] if token not in self.likely]
        return sorted([*self.likely, *others], key=self.chance, reverse=True)[:count]

    def rank(self, token: int) -> int:
        """How many tokens are at least as likely as this one and come before it: 1 for the most likely."""
        chance = self.chance(token)
        rising = self.tail.rising
        above = len(rising) - bisect_right(rising, chance)
        lifted = sum(1 for t, p in self.likely.items() if self.tail.chances[t] <= chance < p)
        return 1 + above + lifted


class Distribution:
    """The model. `odds(prefix)` is a pure function."""

    __slots__ = ("_followers", "_starters", "tail")

    def __init__(self, vocabulary: Vocabulary) -> None:
        counts = [count + 0.5 for count in vocabulary["counts"]]
        scale = _TAIL / math.fsum(counts)
        chances = [count * scale for count in counts]
        order = sorted(range(len(chances)), key=lambda token: (-chances[token], token))
        self.tail = Tail(chances, sorted(chances), order)
        self._starters = tuple(vocabulary["starters"])
        self._followers = tuple(map(tuple, vocabulary["followers"]))

    def odds(self, prefix: Prefix) -> Odds:
        """The distribution after this prefix."""
        bits = mix(prefix.hash)
        tokens = self._followers[prefix.last] if prefix.last >= 0 else ()
        if not tokens:
            at = bits >> 58  # any eight neighbours in the ring of tokens that sentences start with
            ring = self._starters + self._starters
            tokens = ring[at % len(self._starters) :][:8]
        weights = [
            weight * (32 + (bits >> (place * 7) & 127)) for place, weight in enumerate(_RANK_WEIGHTS[: len(tokens)])
        ]
        scale = (1.0 - _TAIL) / sum(weights)
        chances = self.tail.chances
        likely = {token: weight * scale + chances[token] for token, weight in zip(tokens, weights, strict=True)}
        return Odds(likely, self.tail)


@cache
def load_distribution() -> Distribution:
    """The model over the installed vocabulary."""
    return Distribution(load_vocabulary())
