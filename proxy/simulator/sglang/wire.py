"""What answers of SGLang's shape share on the wire: logprobs, usage, finish, versions, `meta_info`.

Holds the small objects inside of answers, whoever has them; it must not hold an answer. Key order and null keys
are those of SGLang 0.5.23's answers (cassettes `sglang-0.5.23/*`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from proxy.simulator.distribution import Odds, Tail, as_float32
from proxy.simulator.errors import RefusedError
from proxy.simulator.generation import Token
from proxy.simulator.tokenizer import Tokenizer
from proxy.simulator.weights import Versions, Weights, as_int32
from proxy.simulator.wire import Answer

Pair = list[Any]
"""A logprob, the token's id, and its text or null."""


def flat(refusal: RefusedError) -> Answer:
    """A refusal in SGLang's shape, which is not nested."""
    return {
        "object": "error",
        "message": str(refusal),
        "type": refusal.kind,
        "param": None,
        "code": refusal.status,
    }


def full_usage(prompt_tokens: int, completion_tokens: int) -> Answer:
    """The usage of chat, and of completions that are not streamed. Thoughts are not counted apart."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
        "completion_tokens_details": None,
    }


def matched(token: Token) -> int | str | None:
    """What ended a choice: an id or a stop string; the end of a turn is told by its id, too."""
    if token.finish_reason != "stop":
        return None
    return token.id if token.stop_reason is None else token.stop_reason


@dataclass(slots=True)
class Tempered:
    """The odds of one place at a temperature; 0 and 1 leave them as they are (greedy batches are told raw)."""

    odds: Odds
    temperature: float
    _log_sum: float | None = field(init=False, default=None)

    def logprob(self, token: int) -> float:
        """The natural logarithm of the probability after temperature, rounded to float32."""
        if self.temperature in {0.0, 1.0}:
            return self.odds.logprob(token)
        if self._log_sum is None:
            self._log_sum = _log_sum(self.odds, 1.0 / self.temperature)
        return as_float32(math.log(self.odds.chance(token)) / self.temperature - self._log_sum)


def _log_sum(odds: Odds, power: float) -> float:
    """The logarithm of the sum of all chances to this power.

    The tail's part is the same after every prefix, so only the likely tokens are added up anew.
    """
    highest = math.log(max(odds.likely.values()))
    total = math.exp(_tail_log_sum(_Identity(odds.tail), power) - power * highest)
    for token, chance in odds.likely.items():
        total += math.exp(power * (math.log(chance) - highest))
        total -= math.exp(power * (math.log(odds.tail.chances[token]) - highest))
    return power * highest + math.log(total)


@dataclass(frozen=True, slots=True, eq=False)
class _Identity:
    """A tail as the key of a cache: the same one, not an equal one."""

    tail: Tail

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.tail is self.tail

    def __hash__(self) -> int:
        return id(self.tail)


@lru_cache(maxsize=64)
def _tail_log_sum(key: _Identity, power: float) -> float:
    logs = [math.log(chance) for chance in key.tail.chances]
    highest = max(logs)
    return power * highest + math.log(math.fsum(math.exp(power * (each - highest)) for each in logs))


@dataclass(frozen=True, slots=True)
class Scoring:
    """How tokens and their logprobs are told: after temperature, by their own bytes."""

    tokenizer: Tokenizer
    temperature: float

    def entry(self, token: Token, alternatives: int) -> Answer:
        """One entry of chat's `logprobs.content`."""
        odds = Tempered(token.odds, self.temperature)
        told = [self._one(odds, i) for i in token.odds.best(alternatives)] if alternatives else []
        return self._one(odds, token.id) | {"top_logprobs": told}

    def _one(self, odds: Tempered, token: int) -> Answer:
        return {
            "token": self.text(token),
            "bytes": list(self.tokenizer.pieces[token]),
            "logprob": odds.logprob(token),
        }

    def pair(self, token: Token, *, with_text: bool) -> Pair:
        """One entry of `output_token_logprobs`."""
        told = self.text(token.id) if with_text else None
        return [Tempered(token.odds, self.temperature).logprob(token.id), token.id, told]

    def best(self, token: Token, alternatives: int, *, with_text: bool) -> list[Pair]:
        """The likely tokens of one place, likely first."""
        odds = Tempered(token.odds, self.temperature)
        return [[odds.logprob(i), i, self.text(i) if with_text else None] for i in token.odds.best(alternatives)]

    def text(self, token: int) -> str:
        """A token's own text; bytes that are no character become U+FFFD."""
        return self.tokenizer.decode([token])


@dataclass(frozen=True, slots=True)
class Behind:
    """What stands behind an answer and is told in its margins: the engine's name for it, and its weights."""

    id: str
    versions: Versions
    weights: Weights

    def metadata(self, length: int) -> Answer:
        """`metadata`, of an answer whose first choice has this length."""
        return {"weight_version": self.weights.version, "weight_versions": self.versions.spans(length)}

    def meta_info(self, prompt: Sequence[int], tokens: Sequence[Token]) -> Answer:
        """`meta_info` of one choice, without logprobs. A simulated engine takes no time worth telling."""
        return {
            "id": self.id,
            "finish_reason": _native_finish(tokens),
            "prompt_tokens": len(prompt),
            "weight_version": self.weights.version,
            "num_retractions": 0,
            "reasoning_tokens": 0,
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
            "weight_versions": self.versions.spans(len(tokens)),
            "e2e_latency": 0.0,
        }


def _native_finish(tokens: Sequence[Token]) -> Answer | None:
    """The finish reason as the engine itself tells it; no tokens at all are what a length of 0 allows."""
    if not tokens:
        return {"type": "length", "length": 0}
    last = tokens[-1]
    if last.finish_reason == "stop":
        return {"type": "stop", "matched": matched(last)}
    if last.finish_reason == "length":
        return {"type": "length", "length": len(tokens)}
    if last.finish_reason == "abort":
        return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    return None


def output_logprobs(scoring: Scoring, tokens: Sequence[Token], alternatives: int, *, with_text: bool) -> Answer:
    """The keys of `meta_info` that tell the logprobs of what was sampled."""
    told: Answer = {"output_token_logprobs": [scoring.pair(token, with_text=with_text) for token in tokens]}
    if alternatives:
        told["output_top_logprobs"] = [scoring.best(token, alternatives, with_text=with_text) for token in tokens]
    return told | {"output_token_logprobs_length": len(tokens)}


def experts(prompt: Sequence[int], tokens: Sequence[Token]) -> str:
    """`routed_experts` of one choice."""
    return as_int32([*prompt, *[token.id for token in tokens]])
