"""Which experts a token was routed to: made up, for the simulated model has none.

Holds a pure function of the prefix and the two ways in which engines write it; it must not hold requests.
"""

from base64 import b64encode
from collections.abc import Iterator, Sequence
from struct import pack
from typing import Final

from proxy.simulator.distribution import Prefix, mix

LAYERS: Final = 2
EXPERTS_PER_TOKEN: Final = 2
_EXPERTS: Final = 8


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
