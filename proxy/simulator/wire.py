"""What responses share: usage, server-sent events, weights and experts.

The order of keys and the null values are vLLM 0.32's; SGLang 0.5.23 has the same where it uses these functions. The
simulated model never changes with the label of the weights, and has no experts.
"""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from struct import pack
from typing import Any, Final

import orjson

from proxy.simulator.sampler import Prefix, mix

LAYERS: Final = 2
EXPERTS_PER_TOKEN: Final = 2
_EXPERTS: Final = 8


@dataclass(slots=True)
class Weights:
    """The label of the current weights, and how many times the calls in flight have been aborted."""

    version: str = "default"
    aborts: int = 0


@dataclass(slots=True)
class WeightVersions:
    """The weight versions of one call.

    All choices of a call sample one token per round, so a position has the same version in every choice.
    """

    _starts: list[tuple[int, str]] = field(default_factory=list)

    def record(self, position: int, version: str) -> None:
        """Record that this version samples the tokens from this position on."""
        if not self._starts or self._starts[-1][1] != version:
            self._starts.append((position, version))

    def spans(self, length: int) -> list[dict[str, Any]]:
        """Return `weight_versions` of a choice of this length: spans of output positions, in both engines' form."""
        ends: Sequence[int] = [start for start, _ in self._starts[1:]] + [length]
        return [
            {"version": version, "start": start, "end": min(end, length)}
            for (start, version), end in zip(self._starts, ends, strict=True)
            if start < length
        ]


def experts_as_npy(ids: Sequence[int]) -> str:
    """Return routed experts as vLLM 0.32 does: base64 of a .npy array (tokens - 1, layers, experts per token)."""
    shape = (max(len(ids) - 1, 0), LAYERS, EXPERTS_PER_TOKEN)
    header = f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}, }}"
    padded = header.ljust(-(-(10 + len(header) + 1) // 64) * 64 - 11) + "\n"  # the array begins at a multiple of 64
    return b64encode(b"\x93NUMPY\x01\x00" + pack("<H", len(padded)) + padded.encode() + _int32(ids)).decode()


def experts_as_int32(ids: Sequence[int], start: int = 0) -> str:
    """Return routed experts as SGLang 0.5.23 does: base64 of int32 numbers in the same order, without a header."""
    raw = _int32(ids)
    return b64encode(raw[start * len(raw) // max(1, len(ids) - 1) :]).decode()


def _int32(ids: Sequence[int]) -> bytes:
    """Return the experts of each token but the last, which is sampled but never fed to the model."""
    prefix = Prefix()
    experts: list[int] = []
    for token in ids[:-1]:
        prefix = prefix.with_token(token)
        bits = mix(prefix.hash)
        experts += [(bits >> 3 * slot) % _EXPERTS for slot in range(LAYERS * EXPERTS_PER_TOKEN)]
    return pack(f"<{len(experts)}i", *experts)


DONE: Final = b"data: [DONE]\n\n"
FINGERPRINT: Final = "vllm-0.32.0-simulator"

JsonObject = dict[str, Any]


def event(payload: JsonObject) -> bytes:
    """Return a chunk as a server-sent event."""
    return b"data: " + orjson.dumps(payload) + b"\n\n"


def usage(prompt_tokens: int, completion_tokens: int, **details: Any) -> JsonObject:
    """Return `usage`; `details` are the keys that only some responses have."""
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        **details,
    }
