"""Which version of the weights the engine has, and which one sampled which tokens.

Holds the label that tests and trainers move, and the spans of one call; it must not hold weights: the simulated
model stays the same whatever it is called.
"""

from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from struct import pack
from typing import Any, Final

from proxy.simulator.distribution import Prefix, mix

LAYERS: Final = 2
EXPERTS_PER_TOKEN: Final = 2
_EXPERTS: Final = 8


@dataclass(slots=True)
class Weights:
    """The label of the weights that sample now, and how often the calls in flight were aborted so far."""

    version: str = "default"
    aborts: int = 0


@dataclass(slots=True)
class Versions:
    """The versions of one call.

    All choices of a call sample one token a round, so a position has one version, whatever the choice.
    """

    _starts: list[tuple[int, str]] = field(default_factory=list)

    def note(self, position: int, version: str) -> None:
        """The tokens from this position on are sampled by this version."""
        if not self._starts or self._starts[-1][1] != version:
            self._starts.append((position, version))

    def spans(self, length: int) -> list[dict[str, Any]]:
        """`weight_versions` of a choice of this length: spans over output positions, as both engines tell them."""
        ends: Sequence[int] = [start for start, _ in self._starts[1:]] + [length]
        return [
            {"version": version, "start": start, "end": min(end, length)}
            for (start, version), end in zip(self._starts, ends, strict=True)
            if start < length
        ]


def as_npy(ids: Sequence[int]) -> str:
    """vLLM 0.32's form: base64 of a .npy array (tokens - 1, layers, experts per token)."""
    shape = (max(len(ids) - 1, 0), LAYERS, EXPERTS_PER_TOKEN)
    header = f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}, }}"
    padded = header.ljust(-(-(10 + len(header) + 1) // 64) * 64 - 11) + "\n"  # the array begins at a multiple of 64
    return b64encode(b"\x93NUMPY\x01\x00" + pack("<H", len(padded)) + padded.encode() + _numbers(ids)).decode()


def as_int32(ids: Sequence[int]) -> str:
    """SGLang 0.5.23's form: base64 of the bare numbers, in the same order."""
    return b64encode(_numbers(ids)).decode()


def _numbers(ids: Sequence[int]) -> bytes:
    routed = list(_routed(ids))
    return pack(f"<{len(routed)}i", *routed)


def _routed(ids: Sequence[int]) -> Iterator[int]:
    """The experts of each token but the last, which is routed nowhere: nothing was sampled from it."""
    prefix = Prefix()
    for token in ids[:-1]:
        prefix = prefix.then(token)
        bits = mix(prefix.hash)
        for place in range(LAYERS * EXPERTS_PER_TOKEN):
            yield (bits >> 3 * place) % _EXPERTS
