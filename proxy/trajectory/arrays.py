"""Token ids, logprobs, masks and experts as arrays, and their conversion from and to JSON and little-endian bytes.

`SharedIds` are ids with shared prefixes: the prompts of a growing rollout in memory linear in its unique tokens.
"""

import struct
import sys
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from math import isfinite, nan
from operator import methodcaller
from typing import Any, Final, Literal, TypeAlias, overload

import orjson

Ids: TypeAlias = "array[int]"  # array itself takes no index before Python 3.12
Prompt: TypeAlias = "Ids | SharedIds"
Logprobs: TypeAlias = "array[float]"

_NPY: Final = b"\x93NUMPY"


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts to which a mixture-of-experts model routed tokens, unchanged from the engine."""

    # A .npy file (vLLM: tokens - 1, layers, experts per token), int32 without a shape (SGLang), or anything else as JSON.
    form: Literal["npy", "int32", "json"]
    raw: bytes


@dataclass(frozen=True, slots=True)
class Mask:
    """The ids that sampling could choose from: `ids[offsets[i]:offsets[i + 1]]` at position i."""

    ids: Ids
    offsets: Ids


class Link:
    """A piece of little-endian int32 ids that follows `parent`; `size` is the number of bytes from the chain's beginning."""

    __slots__ = ("parent", "piece", "size")

    def __init__(self, parent: "Link | None", piece: bytes) -> None:
        self.parent = parent
        self.piece = piece
        self.size: int = len(piece) + (0 if parent is None else parent.size)


class SharedIds:
    """Token ids as a chain of shared pieces and a separate tail. It reads like an `array('i')` and is immutable.

    Reading an item copies all ids: call `to_array()` once if several are needed. Raises ValueError if the bytes are not
    whole ids.
    """

    __slots__ = ("_length", "end", "tail")

    def __init__(self, end: Link | None, tail: bytes) -> None:
        size = len(tail) + (0 if end is None else end.size)
        if size % 4:
            raise ValueError("the number of bytes is not a multiple of 4")
        self.end = end
        self.tail = tail
        self._length = size // 4

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return repr(self.to_array())

    def __iter__(self) -> Iterator[int]:
        return iter(self.to_array())

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> "array[int]": ...
    def __getitem__(self, at: int | slice) -> "int | array[int]":
        return self.to_array()[at]

    def __add__(self, others: "array[int]") -> "array[int]":
        joined = self.to_array()
        joined.extend(others)
        return joined

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SharedIds):
            if self.end is other.end or self._length != other._length:
                return self._length == other._length and self.tail == other.tail
            return self.to_array() == other.to_array()
        return self.to_array() == other if isinstance(other, array) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # like an array's

    def links(self) -> Iterator[Link]:
        """Return the links of the chain, the last one first."""
        link = self.end
        while link is not None:
            yield link
            link = link.parent

    def after(self, beginning: "SharedIds") -> bytes | None:
        """Return the little-endian bytes of the ids that follow `beginning`.

        None if the ids do not begin with `beginning`, or if the chain does not begin with its chain.
        """
        pieces = [self.tail]
        link = self.end
        while link is not beginning.end:
            if link is None:
                return None
            pieces.append(link.piece)
            link = link.parent
        rest = b"".join(reversed(pieces))
        return rest[len(beginning.tail) :] if rest.startswith(beginning.tail) else None

    def to_array(self) -> "array[int]":
        """Copy all ids into an array."""
        pieces = [self.tail, *(link.piece for link in self.links())]
        ids = array("i", b"".join(reversed(pieces)))
        if sys.byteorder != "little":
            ids.byteswap()
        return ids

    def tolist(self) -> list[int]:
        """Return all ids as a list."""
        return self.to_array().tolist()

    def tobytes(self) -> bytes:
        """Return all ids in this machine's byte order."""
        return self.to_array().tobytes()

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedIds, (None, b"".join(reversed([self.tail, *(link.piece for link in self.links())])))


@dataclass(frozen=True, slots=True)
class Floats:
    """float32 values with gaps: `values` are 4 bytes each in this machine's byte order; where `present` is 0 the value is null.

    The bytes of a null are zeros.
    """

    values: bytearray
    present: bytearray

    def __len__(self) -> int:
        return len(self.present)


def floats_with_gaps(length: int, parts: Iterable[tuple[int, Logprobs]]) -> Floats:
    """Return this many float32 values: each of `parts` from its position on, and null elsewhere."""
    values, present = bytearray(4 * length), bytearray(length)
    for start, part in parts:
        end = start + len(part)
        narrow = part if part.typecode == "f" else array("f", part)
        values[4 * start : 4 * end] = narrow.tobytes()
        present[start:end] = b"\x01" * len(part)
    return Floats(values, present)


def pack_ids(values: Sequence[int]) -> Ids:
    """Return token ids as int32.

    Raises ValueError if a value is not an integer of 32 bits; booleans are not integers.
    """
    if isinstance(values, array) and values.typecode == "i":
        return values
    # Both calls run in C. struct accepts True as the id 1, so the JSON is searched for an e, which only true and false
    # have (or a number that struct rejects).
    try:
        if b"e" not in orjson.dumps(values):
            return array("i", struct.pack(f"{len(values)}i", *values))
    except (struct.error, TypeError):
        pass
    for value in values:
        if type(value) is not int:
            raise ValueError(f"a token id must be an integer, not {value!r}")
        if not -(2**31) <= value < 2**31:
            raise ValueError(f"token id {value} does not fit into 32 bits")
    return array("i", values)


def has_negative(ids: Ids) -> bool:
    """Return whether an id is negative."""
    # The sign is the top bit of every fourth byte. Testing these takes microseconds for a long prompt.
    return not to_little_endian(ids)[3::4].isascii()


def pack_numbers(values: Sequence[int]) -> Ids:
    """Return token ids as int32. The caller excludes booleans, which would become 0 and 1.

    Raises ValueError if a value is not an integer of 32 bits.
    """
    try:
        return array("i", struct.pack(f"{len(values)}i", *values))
    except (struct.error, TypeError) as error:
        raise ValueError(f"a token id must be an integer of 32 bits: {error}") from None


def pack_logprobs(values: Sequence[float | None]) -> Logprobs:
    """Return logprobs as float32 if that is lossless for all, else as float64.

    Values that are not numbers become NaN.
    """
    if isinstance(values, array):
        return values
    if not set(map(type, values)) <= {float}:
        values = [_number(value) for value in values]
    return pack_floats(values)  # type: ignore[arg-type]  # no other type is left


def pack_floats(values: list[float]) -> Logprobs:
    """Return logprobs, all floats, as float32 if that is lossless for all, else as float64."""
    try:
        narrow = array("f", struct.pack(f"{len(values)}f", *values))
    except OverflowError:  # exceeds float32
        return array("d", values)
    if narrow.tolist() == values:
        return narrow
    # NaN equals nothing, so these are compared as bytes.
    wide = array("d", values)
    return narrow if array("d", narrow).tobytes() == wide.tobytes() else wide


def are_finite(values: Logprobs) -> bool:
    """Return whether no value is NaN or infinite, and their sum is not.

    The highest byte of these is 0x7f or 0xff. Other values have it only if they are very large, and are added.
    """
    size = values.itemsize
    highest = values.tobytes()[size - 1 if sys.byteorder == "little" else 0 :: size]
    return (0x7F not in highest and 0xFF not in highest) or isfinite(sum(values))


def _number(value: Any) -> float:
    try:
        return float(value) if type(value) in (float, int) else nan
    except OverflowError:
        return nan


def pack_mask(positions: Sequence[Sequence[int]]) -> Mask:
    """Return the remaining ids of each position as two flat arrays.

    Raises ValueError if a value is not an integer of 32 bits.
    """
    return Mask(pack_ids(list(chain.from_iterable(positions))), array("i", accumulate(map(len, positions), initial=0)))


def unpack_mask(mask: Mask) -> list[list[int]]:
    """Return the ids of each position; the inverse of `pack_mask`."""
    ids = mask.ids.tolist()
    return [ids[start:end] for start, end in pairwise(mask.offsets)]


def pack_experts(given: Any) -> Experts:
    """Return the experts of an engine's response: the bytes of a base64 string, anything else as JSON.

    Raises TypeError if orjson cannot write the value.
    """
    raw = _from_base64(given) if isinstance(given, str) else None
    if raw is None:
        return Experts("json", orjson.dumps(given))
    return Experts("npy" if raw.startswith(_NPY) else "int32", raw)


def unpack_experts(experts: Experts) -> Any:
    """Return the value that `pack_experts` packed, including the exact base64 string."""
    return orjson.loads(experts.raw) if experts.form == "json" else b64encode(experts.raw).decode()


def _from_base64(text: str) -> bytes | None:
    """Return the bytes of a string in canonical base64; None for anything else, which could not be restored."""
    try:
        raw = b64decode(text, validate=True)
    except ValueError:
        return None
    return raw if b64encode(raw).decode() == text else None


def _swapped(values: "Prompt | Logprobs") -> bytes:
    turned = values[:]
    turned.byteswap()
    return turned.tobytes()


# Returns the numbers as little-endian bytes.
to_little_endian: Final[Callable[["Prompt | Logprobs"], bytes]] = (
    methodcaller("tobytes") if sys.byteorder == "little" else _swapped
)


def ids_from_little_endian(raw: bytes, byteorder: str = sys.byteorder) -> Ids:
    """Return the ids that `to_little_endian` wrote. Raises ValueError if Bytes are missing."""
    ids = array("i", raw)
    if byteorder != "little":
        ids.byteswap()
    return ids


def logprobs_from_little_endian(code: Literal["f", "d"], raw: bytes, byteorder: str = sys.byteorder) -> Logprobs:
    """Return the logprobs of this type code that `to_little_endian` wrote. Raises ValueError if Bytes are missing."""
    logprobs = array(code, raw)
    if byteorder != "little":
        logprobs.byteswap()
    return logprobs
