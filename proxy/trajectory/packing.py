"""Numbers as arrays: token ids and logprobs of other people's JSON, and arrays as little-endian bytes.

Holds what turns lists into the arrays that a step is made of, and those arrays into bytes that read the same
on every machine. It must not know a step, a record or an engine.
"""

import sys
from array import array
from collections.abc import Sequence
from math import nan
from typing import Literal

from proxy.trajectory.step import Ids, Logprobs


def pack_ids(values: Sequence[int]) -> Ids:
    """Token ids as int32. Raises `ValueError` for what is not an integer of 32 bits, `True` included."""
    if not set(map(type, values)) <= {int}:  # array() would take True for the id 1
        odd = next(value for value in values if type(value) is not int)
        raise ValueError(f"a token id must be an integer, not {odd!r}")
    try:
        return array("i", values)
    except OverflowError:
        odd = next(value for value in values if not -(2**31) <= value < 2**31)
        raise ValueError(f"the token id {odd} does not fit into 32 bits") from None


def pack_logprobs(values: Sequence[float | None]) -> Logprobs:
    """Logprobs as float32 if that loses nothing of any, else as float64; a missing one (None) is NaN."""
    wide = array("d", [nan if value is None else value for value in values])
    narrow = array("f", wide)
    # Compared as bytes: NaN equals nothing, and -0.0 equals 0.0.
    return narrow if array("d", narrow).tobytes() == wide.tobytes() else wide


def to_little_endian(values: "Ids | Logprobs", byteorder: str = sys.byteorder) -> bytes:
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
