"""Long request bodies: a text that begins as that of the rollout's previous call is hashed and searched from there on.

The digest is that of the whole text, and the weight that of all its characters: comparing bytes takes a fiftieth of the time
of computing both.
"""

from hashlib import blake2b
from typing import Any, Final, NamedTuple

from proxy.protocols.json_weight import most_weight

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
    """Return about how many bytes of a text take time to process: those after `before`, if that has few values."""
    if len(text) > _LIGHT_BYTES or before.weight > _LIGHT_WEIGHT:
        return len(text)
    start = before.size - _PIECE_BYTES  # where its last piece is equal, most likely all are
    return len(text) - before.size if text.startswith(before.pieces[-1].text, start) else len(text)


def read_long(text: bytes, before: LongText | None) -> LongText:
    """Return a text in pieces; `before` is that of the rollout's previous call."""
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
