"""An estimate of the memory that parsing a JSON text takes, from counts of its characters (in C, a gigabyte in a second)."""

from typing import Final

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
