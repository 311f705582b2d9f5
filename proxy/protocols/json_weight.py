"""The memory that parsing a JSON text takes, estimated from counts of its characters (in C, a gigabyte in a second).

If a long request body begins like the body of the rollout's previous call, only the rest is hashed and counted; the digest and
the weight are still of the whole text. Comparing bytes takes a fiftieth of the time of computing both.
"""

from hashlib import blake2b
from typing import Any, Final, NamedTuple

# Bytes of memory for one character while a body is parsed (orjson 3.13, CPython 3.11, x86-64, measured): its
# own 16 bytes for each value, then a dict, a list, a boxed number with its slot, and half a string or key.
WEIGHTS: Final = {b"{": 248, b"[": 88, b",": 56}
QUOTE_WEIGHT: Final = 40
_ALL: Final = (*WEIGHTS.items(), (b'"', QUOTE_WEIGHT))
_LINE_WEIGHT: Final = 40  # an event of a stream has at least two line ends, and is an object


def most_weight(text: bytes | bytearray) -> int:
    """Return at least the bytes of memory that parsing a text takes: characters in strings count as if they were outside."""
    total = 0
    for character, weight in _ALL:
        if (
            character in text
        ):  # a part of a list of ids has commas only: searching takes a fifth of the time of counting
            total += weight * text.count(character)
    return total


def stream_weight(read: bytes) -> int:
    """Return at least the bytes of memory that a part of a stream takes: as received, joined, parsed, and as events."""
    return 2 * len(read) + most_weight(read) + _LINE_WEIGHT * (read.count(b"\n") + read.count(b"\r"))


LONG_TEXT: Final = 2**16  # bytes from which the comparison takes less time
_LIGHT_BYTES: Final = 2**20
_LIGHT_WEIGHT: Final = 2**22  # parsing so much takes as long as parsing 2**16 bytes of brackets
_PIECE_BYTES: Final = 2**14


class _Piece(NamedTuple):
    """A piece of a text, and the hash and the weight of the text to its end."""

    text: bytes
    state: Any
    weight: int


class LongText(NamedTuple):
    """A text in pieces, its digest, and the most memory that parsing it takes in bytes (`most_weight`)."""

    pieces: tuple[_Piece, ...]
    digest: str
    weight: int

    @property
    def size(self) -> int:
        """The approximate memory in bytes."""
        return len(self.pieces) * _PIECE_BYTES


def fresh_bytes(text: bytes, before: LongText) -> int:
    """Return about how many bytes of a text take time to process: only the bytes after `before`, if it has few values."""
    if len(text) > _LIGHT_BYTES or before.weight > _LIGHT_WEIGHT:
        return len(text)
    start = before.size - _PIECE_BYTES  # where its last piece is equal, most likely all are
    return len(text) - before.size if text.startswith(before.pieces[-1].text, start) else len(text)


def read_long(text: bytes, before: LongText | None) -> LongText:
    """Return a text in pieces; `before` is the text of the rollout's previous call."""
    pieces: list[_Piece] = []
    at = 0
    for piece in () if before is None else before.pieces:
        if not text.startswith(piece.text, at):
            break
        pieces.append(piece)
        at += _PIECE_BYTES
    state, weight = (pieces[-1].state, pieces[-1].weight) if pieces else (blake2b(digest_size=16), 0)
    for start in range(at, len(text) - len(text) % _PIECE_BYTES, _PIECE_BYTES):
        piece_text = text[start : start + _PIECE_BYTES]
        state = state.copy()
        state.update(piece_text)
        weight += most_weight(piece_text)
        pieces.append(_Piece(piece_text, state, weight))
    rest = text[len(pieces) * _PIECE_BYTES :]
    state = state.copy()
    state.update(rest)
    return LongText(tuple(pieces), state.hexdigest(), weight + most_weight(rest))
