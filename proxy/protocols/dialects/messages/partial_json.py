"""The beginning of a JSON object, grown piece by piece, as far as it can be one.

Holds the reading of arguments as models sample them: cut off by a limit, or no JSON at all. It must not change what it lets
through: that is a prefix of what was sampled, the same one whatever the pieces.

Clients read partial JSON as it comes, and the official SDK (anthropic 2.12, by jiter) raises on text that cannot go on to be
JSON, by which the whole stream is lost. So what can be no part of an object is held back. `whole` is the object that such
clients have at the end: what came whole stays, a value that was cut off is left out.
"""

import math
import re
from typing import Final

_WHITE: Final = re.compile(r"[ \t\n\r]+")
_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]+')
# A lone surrogate is no JSON to orjson, and none to jiter.
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
DEEPEST: Final = 100  # jiter refuses 200 levels
LONGEST: Final = 100  # characters of a number


class Beginning:
    """One object's text, so far. `broken`: what followed can be no part of it."""

    __slots__ = ("_base", "_in", "_open", "_safe", "_tail", "_wants", "broken")

    def __init__(self) -> None:
        self.broken = False
        self._wants = "object"
        self._in: str | None = None  # within a string: what comes after it
        self._open: list[str] = []  # the closers of what is open
        self._tail = ""  # a token that may go on
        self._base = 0  # where the tail begins in the text let through
        self._safe = 0, "{}"  # up to where, and by what, the text is closed

    def feed(self, piece: str) -> str:
        """What can be told now, beyond what was."""
        if self.broken:
            return ""
        text, at, told = self._tail + piece, 0, 0 if self._wants == "object" else len(self._tail)
        self._tail = ""
        while at < len(text) and not self._is_held():
            at = self._take(text, at)
        if self._wants == "object":  # white space alone is no beginning
            self._tail = text[:at]
            return ""
        self._base += at - len(self._tail)
        return text[told:at]

    def whole(self, told: str) -> str:
        """The object that the text comes to; `told` is all that was let through."""
        if _NUMBER.fullmatch(self._tail):
            return told + "".join(reversed(self._open))
        upto, closing = self._safe
        return told[:upto] + closing

    def _is_held(self) -> bool:
        return self.broken or bool(self._tail)

    def _take(self, text: str, at: int) -> int:
        """Read a token, or as much of it as there is; gives where that ends."""
        if self._in is not None:
            return self._string(text, at, self._in)
        if white := _WHITE.match(text, at):
            return white.end()
        if text[at] in "{}[]:,":
            return self._mark(text[at], at)
        values = self._wants in {"value", "value or end"}
        if text[at] == '"' and (values or self._wants in {"key", "key or end"}):
            self._in = "next" if values else "colon"
            return at + 1
        scalar = _SCALAR.match(text, at) if values else None
        return self._break(at) if scalar is None else self._scalar(scalar[0], at, ended=scalar.end() < len(text))

    def _string(self, text: str, at: int, after: str) -> int:
        if plain := _PLAIN.match(text, at):
            return plain.end()
        if text[at] == '"':
            self._in = None
            return self._reach(after, at + 1)
        if escape := _ESCAPE.match(text, at):
            return escape.end()
        cut = _CUT_ESCAPE.match(text, at)
        return self._cut(text, at, at if cut is None else cut.end())

    def _scalar(self, token: str, at: int, *, ended: bool) -> int:
        """A word or a number. What cannot be one is told as far as it could have been."""
        if word := _WORD.match(token):
            return self._reach("next", at + word.end())
        number = _CUT_NUMBER.match(token[:LONGEST])
        said = "" if number is None else number[0]
        while _NUMBER.fullmatch(said) and not math.isfinite(float(said)):
            said = said[:-1]
        if said == token and (not ended or _NUMBER.fullmatch(token)):
            return self._reach("next", at + len(token)) if ended else self._cut(token, 0, len(token)) + at
        word = None if said else _CUT_WORD.match(token)
        return self._cut(token, 0, len(said) if word is None else word.end(), broken=ended) + at

    def _mark(self, mark: str, at: int) -> int:
        """A bracket, a colon or a comma."""
        wants, closer = self._wants, self._open[-1] if self._open else ""
        if mark == ":" and wants == "colon":
            self._wants = "value"
        elif mark == "," and wants == "next" and closer:
            self._wants = "key" if closer == "}" else "value"
        elif mark in "{[" and wants in ({"value", "value or end"} | ({"object"} if mark == "{" else set())):
            self._open.append("}" if mark == "{" else "]")
            if len(self._open) > DEEPEST:
                self._open.pop()
                return self._break(at)
            return self._reach("key or end" if mark == "{" else "value or end", at + 1)
        elif mark == closer and wants in {"next", "key or end", "value or end"}:
            self._open.pop()
            return self._reach("next", at + 1)
        else:
            return self._break(at)
        return at + 1

    def _reach(self, wants: str, at: int) -> int:
        """A token came whole, after which the object could be closed, unless it was a key."""
        self._wants = wants
        if wants != "colon":
            self._safe = self._base + at, "".join(reversed(self._open))
        return at

    def _cut(self, text: str, at: int, end: int, *, broken: bool = False) -> int:
        """A token ends here for now, if it may go on; else it is broken here."""
        self._tail = text[at:end]
        self.broken = broken or end < len(text)
        return end

    def _break(self, at: int) -> int:
        self.broken = True
        return at
