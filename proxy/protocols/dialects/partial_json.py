"""An incremental parser that returns the longest prefix of sampled arguments that can be the beginning of a JSON object.

Invariant: the results of `feed`, joined, are a prefix of the sampled text, and do not depend on how it is split.

Sampled arguments may be truncated or invalid. Clients parse partial JSON as it arrives, and the official SDK (anthropic 2.12,
with jiter) raises an error at text that cannot be part of a JSON value, which loses the whole stream. Text from that point on
is withheld. `whole` returns the object that these clients have at the end: complete values remain, a truncated one is removed.
"""

import math
import re
from typing import Final

_WHITE: Final = re.compile(r"[ \t\n\r]+")
_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]+')
# orjson and jiter refuse lone surrogates.
_ESCAPE: Final = re.compile(
    r'\\(?:["\\/bfnrt]|u(?!d[89a-f])[0-9a-f]{4}|ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2})', re.IGNORECASE
)
_CUT_ESCAPE: Final = re.compile(r"\\(?:ud[89ab][0-9a-f]{2}(?:\\(?:u[0-9a-f]{0,3})?)?|u[0-9a-f]{0,3})?", re.IGNORECASE)
_SCALAR: Final = re.compile(r"[-+.0-9a-zA-Z]+")
_WORD: Final = re.compile(r"true|false|null")
_CUT_WORD: Final = re.compile(r"tru?|t|fals?|fa?|nul?|n")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_CUT_NUMBER: Final = re.compile(
    r"-?(?:(?:0|[1-9][0-9]*)(?:\.(?:[0-9]+(?:[eE](?:[+-]?[0-9]*)?)?)?|[eE](?:[+-]?[0-9]*)?)?)?"
)
MAX_DEPTH: Final = 100  # jiter refuses 200 levels
MAX_NUMBER_LENGTH: Final = 100  # characters of a number


class PartialObject:
    """The parser's state for one object. `broken`: the rest of the text cannot be part of an object."""

    __slots__ = ("_base", "_expects", "_in", "_open", "_safe", "_tail", "_white", "broken")

    def __init__(self) -> None:
        self.broken = False
        self._expects = "object"
        self._in: str | None = None  # within a string: what is expected after it
        self._open: list[str] = []  # the closing brackets of open values
        self._tail = ""  # an incomplete token
        self._white: list[str] = []  # before the object
        self._base = 0  # offset of the tail in the returned text
        self._safe = 0, "{}"  # the length of the returned text that can be closed, and the text that closes it

    def feed(self, piece: str) -> str:
        """Return the new part of the prefix."""
        if self.broken or not piece:
            return ""
        if self._expects == "object" and (white := _WHITE.fullmatch(piece)):
            self._white.append(white[0])  # kept in pieces: a model may sample white space without end
            return ""
        text, pos, returned = "".join((*self._white, self._tail, piece)), 0, len(self._tail)
        self._tail = ""
        self._white.clear()
        while pos < len(text) and not self._is_waiting():
            pos = self._take(text, pos)
        if self._expects == "object":  # it is broken, or there is nothing yet
            return ""
        self._base += pos - len(self._tail)
        return text[returned:pos]

    def whole(self, prefix: str) -> str:
        """Return the JSON of the object; `prefix` is the joined results of `feed`."""
        if _NUMBER.fullmatch(self._tail):
            return prefix + "".join(reversed(self._open))
        length, closing = self._safe
        return prefix[:length] + closing

    def _is_waiting(self) -> bool:
        return self.broken or bool(self._tail)

    def _take(self, text: str, pos: int) -> int:
        """Parse one token, possibly incomplete, and return where it ends."""
        if self._in is not None:
            return self._string(text, pos, self._in)
        if white := _WHITE.match(text, pos):
            return white.end()
        if text[pos] in "{}[]:,":
            return self._mark(text[pos], pos)
        values = self._expects in {"value", "value or end"}
        if text[pos] == '"' and (values or self._expects in {"key", "key or end"}):
            self._in = "next" if values else "colon"
            return pos + 1
        scalar = _SCALAR.match(text, pos) if values else None
        return self._break(pos) if scalar is None else self._scalar(scalar[0], pos, ended=scalar.end() < len(text))

    def _string(self, text: str, pos: int, after: str) -> int:
        if plain := _PLAIN.match(text, pos):
            return plain.end()
        if text[pos] == '"':
            self._in = None
            return self._reach(after, pos + 1)
        if escape := _ESCAPE.match(text, pos):
            return escape.end()
        cut = _CUT_ESCAPE.match(text, pos)
        return self._cut(text, pos, pos if cut is None else cut.end())

    def _scalar(self, token: str, pos: int, *, ended: bool) -> int:
        """Parse a word or a number; of an invalid one, return the longest valid prefix."""
        if word := _WORD.match(token):
            return self._reach("next", pos + word.end())
        number = _CUT_NUMBER.match(token[:MAX_NUMBER_LENGTH])
        digits = "" if number is None else number[0]
        while _NUMBER.fullmatch(digits) and not math.isfinite(float(digits)):
            digits = digits[:-1]
        if digits == token and (not ended or _NUMBER.fullmatch(token)):
            return self._reach("next", pos + len(token)) if ended else self._cut(token, 0, len(token)) + pos
        word = None if digits else _CUT_WORD.match(token)
        return self._cut(token, 0, len(digits) if word is None else word.end(), broken=ended) + pos

    def _mark(self, mark: str, pos: int) -> int:
        """Parse a bracket, a colon or a comma."""
        expects, closer = self._expects, self._open[-1] if self._open else ""
        if mark == ":" and expects == "colon":
            self._expects = "value"
        elif mark == "," and expects == "next" and closer:
            self._expects = "key" if closer == "}" else "value"
        elif mark in "{[" and expects in ({"value", "value or end"} | ({"object"} if mark == "{" else set())):
            self._open.append("}" if mark == "{" else "]")
            if len(self._open) > MAX_DEPTH:
                self._open.pop()
                return self._break(pos)
            return self._reach("key or end" if mark == "{" else "value or end", pos + 1)
        elif mark == closer and expects in {"next", "key or end", "value or end"}:
            self._open.pop()
            return self._reach("next", pos + 1)
        else:
            return self._break(pos)
        return pos + 1

    def _reach(self, expects: str, pos: int) -> int:
        """Complete a token, after which the object can be closed, unless the token is a key."""
        self._expects = expects
        if expects != "colon":
            self._safe = self._base + pos, "".join(reversed(self._open))
        return pos

    def _cut(self, text: str, pos: int, end: int, *, broken: bool = False) -> int:
        """Keep an incomplete token, or mark the object as broken."""
        self._tail = text[pos:end]
        self.broken = broken or end < len(text)
        return end

    def _break(self, pos: int) -> int:
        self.broken = True
        return pos
