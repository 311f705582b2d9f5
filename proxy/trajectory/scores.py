"""The scores of a row: the logprobs of its trained tokens by another engine, or by the same one later, and their bytes."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import isfinite
from typing import Any, Final, Literal, TypeVar

import orjson

from proxy.trajectory.arrays import ids_from_little_endian, logprobs_from_little_endian, to_little_endian
from proxy.trajectory.step import Ids, Logprobs

T = TypeVar("T")

Role = Literal["proximal", "teacher"]

_ROUNDING: Final = 1e-6  # by which an engine's logprob may exceed 0
_CLAMP: Final = -9999.0  # vLLM's value for a probability of 0


@dataclass(frozen=True, slots=True)
class Scores:
    """The logprobs of the trained tokens of a row, in their order, as float32.

    `engine`, `model` and `policy_version` describe what computed them. `top_ids` and `top_logprobs` have the `top_k` most
    likely tokens in place of each trained one, the most likely first.
    """

    engine: str
    model: str | None
    policy_version: str | None
    logprobs: Logprobs
    top_k: int = 0
    top_ids: Ids = field(default_factory=lambda: array("i"))
    top_logprobs: Logprobs = field(default_factory=lambda: array("f"))

    def described(self) -> dict[str, Any]:
        """Return what computed the scores, as JSON values."""
        return {"engine": self.engine, "model": self.model, "policy_version": self.policy_version}

    def filled(self, mask: Iterable[int], fill: T) -> list[float | T]:
        """Return a list with the logprob where `mask` is 1, and `fill` elsewhere."""
        values = iter(self.logprobs)
        return [next(values) if trained else fill for trained in mask]

    def filled_top(self, mask: Iterable[int], fill: Any) -> tuple[list[Any], list[Any]]:
        """Return a list of the most likely ids and one of their logprobs where `mask` is 1, with `fill` elsewhere."""
        ids, logprobs = _chunks(self.top_ids, self.top_k), _chunks(self.top_logprobs, self.top_k)
        bits = list(mask)
        return [next(ids) if bit else fill for bit in bits], [next(logprobs) if bit else fill for bit in bits]


def _chunks(values: Iterable[T], size: int) -> Iterator[list[T]]:
    remaining = iter(values)
    while True:
        yield list(islice(remaining, size))


def are_logprobs(values: Sequence[float]) -> bool:
    """Return whether all values are finite logprobs, and none is the engine's value for a probability of 0."""
    return all(isfinite(value) and _CLAMP < value <= _ROUNDING for value in values)


def encode_scores(scores: Scores) -> bytes:
    """Return the scores as bytes."""
    head = [scores.engine, scores.model, scores.policy_version, len(scores.logprobs), scores.top_k]
    arrays = (scores.logprobs, scores.top_ids, scores.top_logprobs)
    return orjson.dumps(head) + b"\n" + b"".join(to_little_endian(values) for values in arrays)


def decode_scores(encoded: bytes) -> Scores | None:
    """Return the scores of `encode_scores`; None if another version wrote the bytes."""
    head, newline, raw = encoded.partition(b"\n")
    try:
        engine, model, policy_version, count, top_k = orjson.loads(head)
        first, second = 4 * count, 4 * count * (1 + top_k)
        if not newline or len(raw) != second + 4 * count * top_k:
            return None
        top_ids, top = ids_from_little_endian(raw[first:second]), logprobs_from_little_endian("f", raw[second:])
        logprobs = logprobs_from_little_endian("f", raw[:first])
        names = (engine, model, policy_version)
        if not all(name is None or isinstance(name, str) for name in names) or not are_logprobs((*logprobs, *top)):
            return None
        return Scores(engine, model, policy_version, logprobs, top_k, top_ids, top)
    except (ValueError, TypeError):
        return None
