"""What SGLang's responses share: errors, logprobs, usage, finish reasons, weight versions and `meta_info`.

The order of keys and the null values are those of SGLang 0.5.23's responses (cassettes `sglang-0.5.23/*`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from proxy.simulator.distribution import TokenDistribution, UnigramTail, as_float32
from proxy.simulator.errors import RequestError, invalid_value
from proxy.simulator.generation import Token
from proxy.simulator.requests import CommonFields
from proxy.simulator.tokenizer import Tokenizer
from proxy.simulator.weights import Weights, WeightVersions, experts_as_int32
from proxy.simulator.wire import JsonObject

LogprobTuple = list[Any]
"""A logprob, the token's id, and its text or None: an entry of `output_token_logprobs`."""


def error_body(error: RequestError) -> JsonObject:
    """Return the body of an error response, which is not nested."""
    return {
        "object": "error",
        "message": str(error),
        "type": error.kind,
        "param": None,
        "code": error.status,
    }


def full_usage(prompt_tokens: int, completion_tokens: int) -> JsonObject:
    """Return the usage of chat, and of completions that are not streamed; reasoning tokens are not counted."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": None,
        "reasoning_tokens": 0,
        "completion_tokens_details": None,
    }


def matched_stop(token: Token) -> int | str | None:
    """Return `matched_stop`: the id or stop string that ended the choice; for the end of a turn, its id."""
    if token.finish_reason != "stop":
        return None
    return token.id if token.stop_reason is None else token.stop_reason


@dataclass(slots=True)
class TemperedDistribution:
    """A distribution after temperature, which SGLang's logprobs are of: log_softmax(logits / temperature).

    Temperatures 0 and 1 change nothing: logprobs of greedy batches are the model's own. A sampler that truncates the
    vocabulary (top_k, top_p) changes nothing either (SGLang 0.5.23, `layers/sampler.py:208-331`).
    """

    distribution: TokenDistribution
    temperature: float
    _log_sum: float | None = field(init=False, default=None)

    def logprob(self, token: int) -> float:
        """Return the natural logarithm of the probability after temperature, rounded to float32."""
        if self.temperature in {0.0, 1.0}:
            return self.distribution.logprob(token)
        if self._log_sum is None:
            self._log_sum = _log_sum(self.distribution, 1.0 / self.temperature)
        return as_float32(math.log(self.distribution.probability(token)) / self.temperature - self._log_sum)


def _log_sum(distribution: TokenDistribution, power: float) -> float:
    """Return the logarithm of the sum of all probabilities to this power.

    The sum over the tail is cached, because it is the same after every prefix; the likely tokens correct it.
    """
    highest = math.log(max(distribution.likely.values()))
    total = math.exp(_tail_log_sum(_TailKey(distribution.tail), power) - power * highest)
    for token, probability in distribution.likely.items():
        total += math.exp(power * (math.log(probability) - highest))
        total -= math.exp(power * (math.log(distribution.tail.probabilities[token]) - highest))
    return power * highest + math.log(total)


@dataclass(frozen=True, slots=True, eq=False)
class _TailKey:
    """A tail as a cache key, compared by identity."""

    tail: UnigramTail

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _TailKey) and other.tail is self.tail

    def __hash__(self) -> int:
        return id(self.tail)


@lru_cache(maxsize=64)
def _tail_log_sum(key: _TailKey, power: float) -> float:
    logs = [math.log(probability) for probability in key.tail.probabilities]
    highest = max(logs)
    return power * highest + math.log(math.fsum(math.exp(power * (log - highest)) for log in logs))


@dataclass(frozen=True, slots=True)
class LogprobFormatter:
    """Formats tokens and their logprobs: after temperature, each token by its own bytes."""

    tokenizer: Tokenizer
    temperature: float

    def chat_entry(self, token: Token, alternatives: int) -> JsonObject:
        """Return an entry of chat's `logprobs.content`."""
        tempered = self._tempered(token)
        top = token.distribution.top(alternatives) if alternatives else []
        return self._entry(tempered, token.id) | {"top_logprobs": [self._entry(tempered, i) for i in top]}

    def _entry(self, tempered: TemperedDistribution, token: int) -> JsonObject:
        return {
            "token": self.text(token),
            "bytes": list(self.tokenizer.pieces[token]),
            "logprob": tempered.logprob(token),
        }

    def sampled(self, token: Token, *, with_text: bool) -> LogprobTuple:
        """Return the entry of the sampled token."""
        return [self._tempered(token).logprob(token.id), token.id, self.text(token.id) if with_text else None]

    def top(self, token: Token, alternatives: int, *, with_text: bool) -> list[LogprobTuple]:
        """Return the entries of the most likely tokens at the position, most likely first."""
        tempered = self._tempered(token)
        ids = token.distribution.top(alternatives)
        return [[tempered.logprob(i), i, self.text(i) if with_text else None] for i in ids]

    def text(self, token: int) -> str:
        """Return the text of a single token; bytes that are not valid UTF-8 become U+FFFD."""
        return self.tokenizer.decode([token])

    def _tempered(self, token: Token) -> TemperedDistribution:
        return TemperedDistribution(token.distribution, self.temperature)


@dataclass(frozen=True, slots=True)
class ResponseMetadata:
    """The id of a response and the weights that sample it."""

    id: str
    versions: WeightVersions
    weights: Weights

    def rid(self, common: CommonFields) -> str | None:
        """Return the id by which a call can be aborted: several choices have ids of their own."""
        return self.id if common.choices == 1 else None

    def metadata(self, length: int) -> JsonObject:
        """Return `metadata` of a response whose first choice has this length."""
        return {"weight_version": self.weights.version, "weight_versions": self.versions.spans(length)}

    def meta_info(self, prompt: Sequence[int], tokens: Sequence[Token], logprobs: JsonObject) -> JsonObject:
        """Return `meta_info` of one choice with these keys of logprobs; the latency is always 0."""
        return {
            "id": self.id,
            "finish_reason": _native_finish(tokens),
            "prompt_tokens": len(prompt),
            "weight_version": self.weights.version,
            "num_retractions": 0,
            **logprobs,
            "reasoning_tokens": 0,
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
            "weight_versions": self.versions.spans(len(tokens)),
            "cached_tokens_details": None,
            "dp_rank": None,
            "e2e_latency": 0.0,
        }


def _native_finish(tokens: Sequence[Token]) -> JsonObject | None:
    """Return the finish reason of the native API; a choice has no tokens if `max_new_tokens` is 0."""
    if not tokens:
        return {"type": "length", "length": 0}
    last = tokens[-1]
    if last.finish_reason == "stop":
        return {"type": "stop", "matched": matched_stop(last)}
    if last.finish_reason == "length":
        return {"type": "length", "length": len(tokens)}
    if last.finish_reason == "abort":
        return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    return None


def output_logprobs(
    formatter: LogprobFormatter, tokens: Sequence[Token], alternatives: int, *, with_text: bool
) -> JsonObject:
    """Return the keys of `meta_info` with the logprobs of the sampled tokens."""
    keys: JsonObject = {"output_token_logprobs": [formatter.sampled(token, with_text=with_text) for token in tokens]}
    if alternatives:
        keys["output_top_logprobs"] = [formatter.top(token, alternatives, with_text=with_text) for token in tokens]
    return keys | {"output_token_logprobs_length": len(tokens)}


def routed_experts(prompt: Sequence[int], tokens: Sequence[Token], start: int = 0) -> str:
    """Return `routed_experts` of one choice, from a token on.

    Raises:
        RequestError: The prompt is shorter.
    """
    if not 0 <= start <= len(prompt):
        raise invalid_value(f"routed_experts_start_len={start} is not within the prompt of {len(prompt)} tokens.")
    return experts_as_int32([*prompt, *[token.id for token in tokens]], start)
