"""Numbers as arrays: token ids, logprobs, masks and experts of other people's JSON, and arrays as little-endian bytes.

Holds what turns lists and texts into the arrays and bytes that a step is made of, and back; and those arrays into
bytes that read the same on every machine. It must not know a whole step, a record or an engine.
"""

import struct
import sys
from array import array
from base64 import b64decode, b64encode
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from math import nan
from typing import Any, Final, Literal

import orjson

from proxy.trajectory.step import Experts, Ids, Logprobs, Mask, Prompt

_NPY: Final = b"\x93NUMPY"


def pack_ids(values: Sequence[int]) -> Ids:
    """Token ids as int32. Raises `ValueError` for what is not an integer of 32 bits, `True` included."""
    # Both of these run in C. struct takes True for the id 1, so it is looked for in the JSON, where only true and false
    # have an e (or a number that struct refuses).
    try:
        if b"e" not in orjson.dumps(values):
            return array("i", struct.pack(f"{len(values)}i", *values))
    except (struct.error, TypeError):
        pass
    for value in values:
        if type(value) is not int:
            raise ValueError(f"a token id must be an integer, not {value!r}")
        if not -(2**31) <= value < 2**31:
            raise ValueError(f"the token id {value} does not fit into 32 bits")
    return array("i", values)


def pack_logprobs(values: Sequence[float | None]) -> Logprobs:
    """Logprobs as float32 if that loses nothing of any, else as float64. What is no number (None, a boolean) is NaN."""
    if not set(map(type, values)) <= {float}:
        values = [_number(value) for value in values]
    wide = struct.pack(f"{len(values)}d", *values)
    try:
        narrow = struct.pack(f"{len(values)}f", *values)
    except OverflowError:  # beyond what 32 bits can say
        return array("d", wide)
    # Compared as bytes: NaN equals nothing, and -0.0 equals 0.0.
    widened = struct.pack(f"{len(values)}d", *struct.unpack(f"{len(values)}f", narrow))
    return array("f", narrow) if widened == wide else array("d", wide)


def _number(value: Any) -> float:
    try:
        return float(value) if type(value) in (float, int) else nan
    except OverflowError:
        return nan


def pack_mask(positions: Sequence[Sequence[int]]) -> Mask:
    """The ids left at each position, flat: 200 000 positions are two arrays. Raises what `pack_ids` does."""
    return Mask(pack_ids(list(chain.from_iterable(positions))), array("i", accumulate(map(len, positions), initial=0)))


def unpack_mask(mask: Mask) -> list[list[int]]:
    """What `pack_mask` was given."""
    ids = mask.ids.tolist()
    return [ids[start:end] for start, end in pairwise(mask.offsets)]


def pack_experts(given: Any) -> Experts:
    """The experts as an engine gave them: the bytes behind a base64 text, anything else as JSON.

    Raises `TypeError` for what orjson cannot write.
    """
    raw = _from_base64(given) if isinstance(given, str) else None
    if raw is None:
        return Experts("json", orjson.dumps(given))
    return Experts("npy" if raw.startswith(_NPY) else "int32", raw)


def unpack_experts(experts: Experts) -> Any:
    """What `pack_experts` was given, a base64 text to the last character."""
    return orjson.loads(experts.raw) if experts.form == "json" else b64encode(experts.raw).decode()


def _from_base64(text: str) -> bytes | None:
    """The bytes of a text that is just what their base64 is; None for any other spelling, which would be lost."""
    try:
        raw = b64decode(text, validate=True)
    except ValueError:
        return None
    return raw if b64encode(raw).decode() == text else None


def to_little_endian(values: "Prompt | Logprobs", byteorder: str = sys.byteorder) -> bytes:
    """The numbers as little-endian bytes; `byteorder` is that of this machine."""
    if byteorder == "little":
        return values.tobytes()
    turned = values[:]
    turned.byteswap()
    return turned.tobytes()


def ids_from_little_endian(raw: bytes, byteorder: str = sys.byteorder) -> Ids:
    """What `to_little_endian` made of ids. Raises `ValueError` when cut off."""
    ids = array("i", raw)
    if byteorder != "little":
        ids.byteswap()
    return ids


def logprobs_from_little_endian(code: Literal["f", "d"], raw: bytes, byteorder: str = sys.byteorder) -> Logprobs:
    """What `to_little_endian` made of logprobs of this type code. Raises `ValueError` when cut off."""
    logprobs = array(code, raw)
    if byteorder != "little":
        logprobs.byteswap()
    return logprobs
