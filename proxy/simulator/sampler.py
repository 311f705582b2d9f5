"""The simulated language model, and seeded sampling from it along the plan of a reply.

The distribution covers the whole vocabulary and depends on the prefix alone, so scoring a sequence again gives exactly the
logprobs of its sampling. Likely tokens often follow the last id in the training text; they are weighted by rank
and by a hash of the whole prefix. The rest of the probability is spread over the vocabulary by token frequency. The same
prompt, plan, seed and temperature always give the same ids.
"""

import math
from bisect import bisect, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain, repeat
from struct import Struct
from typing import Final

from proxy.simulator.tokenizer import Tokenizer, Vocabulary, load_vocabulary

_MASK: Final = (1 << 64) - 1
_TAIL_SHARE: Final = 0.04  # of the probability, spread over the whole vocabulary
_RANK_WEIGHTS: Final = tuple(1.0 / (rank + 1.5) for rank in range(8))
_FLOAT32: Final = Struct("f")


def mix(value: int) -> int:
    """Return 64 mixed bits; each depends on all bits of the value (splitmix64)."""
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


@dataclass(frozen=True, slots=True, eq=False)
class UnigramTail:
    """The part of every distribution that does not depend on the prefix."""

    probabilities: Sequence[float]  # by id; the sum is `_TAIL_SHARE`
    ascending: Sequence[float]  # the same, sorted
    ids: Sequence[int]  # all, most likely first


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
    """The tokens that are a whole word with a leading space, which can follow any text."""

    tokens: Sequence[int]
    cumulative_counts: Sequence[float]  # their frequencies, added up
    texts: Sequence[str]  # the longer words, without the space

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
        """Draw one token: a likely token, or sometimes any word; never an end-of-turn token."""
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
        self,
        prefix: Prefix,
        plan: Sequence[int],
        split: Split | None = None,
        *,
        end: int | None = None,
        min_tokens: int = 0,
    ) -> Iterator[tuple[int, TokenDistribution]]:
        """Yield the tokens of a reply with the distributions that they are sampled from.

        After the plan, and before `end` while there are fewer than `min_tokens`, tokens are drawn. `split` replaces a token by
        others with the same text.
        """
        rest, count = chain(plan, () if end is None else (end,), repeat(FREE)), 0
        waiting = None  # the end, while it is too early
        while True:
            planned = next(rest) if waiting is None else waiting
            waiting = planned if planned == end and count < min_tokens else None
            planned = planned if waiting is None else FREE
            distribution = self.model.distribution(prefix)
            token = self.draw(distribution, prefix) if planned == FREE else planned
            # Another seed than the draw's, so that the split does not depend on which token was drawn.
            parts = (token,) if split is None else split(token, RandomStream(mix(self.seed ^ prefix.hash)))
            for index, part in enumerate(parts):
                yield part, self.model.distribution(prefix) if index else distribution
                prefix = prefix.with_token(part)
            count += len(parts)


def plan_reply(
    stream: RandomStream,
    *,
    forced: Sequence[int] = (),
    reasoning_tags: tuple[int | None, int] | None = None,
) -> list[int]:
    """Return the plan of a reply, without its end: reasoning between `reasoning_tags`, then `forced` ids or drawn words.

    The first tag is None if the prompt ends with it.
    """
    plan: list[int] = []
    if reasoning_tags is not None:
        opening, closing = reasoning_tags
        plan += [] if opening is None else [opening]
        plan += [*[FREE] * stream.between(MIN_REASONING_TOKENS, MAX_REASONING_TOKENS), closing]
    plan += forced or [FREE] * (stream.between(MIN_REPLY_TOKENS, MAX_REPLY_TOKENS) - 1)
    return plan
