"""The simulated language model: the probability of each token after a prefix of ids.

The distribution covers the whole vocabulary and depends on the prefix alone, so scoring a sequence again gives exactly
the logprobs of its sampling. Seeds and temperatures are the sampler's.

The likely tokens are those that often follow the last id in the training text, weighted by rank and by a hash of the
whole prefix. The rest of the probability is spread over the vocabulary by token frequency.
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
_TAIL_SHARE: Final = 0.04  # of the probability, spread over the whole vocabulary
_RANK_WEIGHTS: Final = tuple(1.0 / (rank + 1.5) for rank in range(8))
_FLOAT32: Final = Struct("f")


def mix(value: int) -> int:
    """Return 64 mixed bits, each of which depends on all bits of the value (splitmix64)."""
    value &= _MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def as_float32(value: float) -> float:
    """Round to float32, the precision of engines."""
    rounded: float = _FLOAT32.unpack(_FLOAT32.pack(value))[0]
    return rounded


@dataclass(frozen=True, slots=True)
class Prefix:
    """The ids so far, as far as the model needs them: a rolling hash of all, and the last id (-1: there are none)."""

    hash: int = 0
    last: int = -1

    def with_token(self, token: int) -> "Prefix":
        """Return the prefix that is one id longer."""
        return Prefix((self.hash ^ (token + 1)) * 0x9E3779B97F4A7C15 & _MASK, token)


def prefix_from(ids: Iterable[int]) -> Prefix:
    """Return the prefix that consists of these ids."""
    prefix = Prefix()
    for token in ids:
        prefix = prefix.with_token(token)
    return prefix


@dataclass(frozen=True, slots=True)
class UnigramTail:
    """The part of every distribution that does not depend on the prefix.

    `probabilities` has one entry per id and sums to `_TAIL_SHARE`; `ascending` is the same, sorted; `ids` are all ids,
    most likely first.
    """

    probabilities: Sequence[float]
    ascending: Sequence[float]
    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class TokenDistribution:
    """The distribution after one prefix. `likely`: the full probability of the few tokens above the tail."""

    likely: dict[int, float]
    tail: UnigramTail

    def probability(self, token: int) -> float:
        """Return the probability of a token; over the vocabulary they sum to one."""
        return self.likely.get(token) or self.tail.probabilities[token]

    def logprob(self, token: int) -> float:
        """Return the natural logarithm of the probability, rounded to float32."""
        return as_float32(math.log(self.probability(token)))

    def top(self, count: int) -> list[int]:
        """Return the `count` most likely tokens, most likely first."""
        others = [token for token in self.tail.ids[: count + len(self.likely)] if token not in self.likely]
        return sorted([*self.likely, *others], key=self.probability, reverse=True)[:count]

    def rank(self, token: int) -> int:
        """Return the token's rank: 1 for the most likely one."""
        probability = self.probability(token)
        ascending = self.tail.ascending
        above = len(ascending) - bisect_right(ascending, probability)
        raised = sum(1 for t, p in self.likely.items() if self.tail.probabilities[t] <= probability < p)
        return 1 + above + raised


class NextTokenModel:
    """The language model: `distribution(prefix)` is a pure function."""

    __slots__ = ("_followers", "_starters", "tail")

    def __init__(self, vocabulary: Vocabulary, markers: int = 0) -> None:
        """Add this number of tokens that do not occur in the training text."""
        counts = [count + 0.5 for count in vocabulary["counts"] + [0] * markers]
        scale = _TAIL_SHARE / math.fsum(counts)
        probabilities = [count * scale for count in counts]
        ids = sorted(range(len(probabilities)), key=lambda token: (-probabilities[token], token))
        self.tail = UnigramTail(probabilities, sorted(probabilities), ids)
        self._starters = tuple(vocabulary["starters"])
        self._followers = (*map(tuple, vocabulary["followers"]), *[()] * markers)

    def distribution(self, prefix: Prefix) -> TokenDistribution:
        """Return the distribution after this prefix."""
        bits = mix(prefix.hash)
        tokens = self._followers[prefix.last] if prefix.last >= 0 else ()
        if not tokens:
            start = (bits >> 58) % len(self._starters)  # eight neighbors in the ring of starters
            tokens = (self._starters + self._starters)[start:][:8]
        weights = [
            weight * (32 + (bits >> (rank * 7) & 127)) for rank, weight in enumerate(_RANK_WEIGHTS[: len(tokens)])
        ]
        scale = (1.0 - _TAIL_SHARE) / sum(weights)
        tail = self.tail.probabilities
        likely = {token: weight * scale + tail[token] for token, weight in zip(tokens, weights, strict=True)}
        return TokenDistribution(likely, self.tail)


@cache
def load_next_token_model(markers: int = 0) -> NextTokenModel:
    """Return the model over the installed vocabulary and this number of markers."""
    return NextTokenModel(load_vocabulary(), markers)
