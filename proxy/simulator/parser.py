"""What chat makes of generated text: thought, content and tool calls, whole and piece by piece.

Holds the parsing that vLLM 0.32 does with its `qwen3` reasoning parser and its `hermes` tool parser; it must
not hold chunks or ids. The two ways differ as they do in vLLM: read whole, a call that was cut off stays
text; read piece by piece, what came of it was already told as a call.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import orjson

from proxy.simulator.template import to_json

_CALL: Final = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_NAME: Final = re.compile(r'\s*\{\s*"name":\s*("(?:[^"\\]|\\.)*")')
_ARGUMENTS: Final = re.compile(r',\s*"arguments":\s*')
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_THOUGHT_OPEN, _THOUGHT_CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call: the function's name, and its arguments as JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """A reply, understood. `content` and `reasoning` are None when there is none."""

    content: str | None
    reasoning: str | None = None
    calls: Sequence[Call] = ()


def parse(text: str, *, thinking: bool, tools: bool) -> Parsed:
    """Understand a whole reply."""
    content: str | None = text
    reasoning = None
    if thinking:
        thought, _, rest = text.removeprefix(_THOUGHT_OPEN).partition(_THOUGHT_CLOSE)
        reasoning, content = thought or None, rest or None
    if not tools or not content:
        return Parsed(content, reasoning)
    calls = [_read_call(inner) for inner in _CALL.findall(content)]
    whole = [call for call in calls if call is not None]
    if not whole or len(whole) < len(calls):
        return Parsed(content, reasoning)
    return Parsed(content[: content.index(_OPEN)] or None, reasoning, whole)


def _read_call(inner: str) -> Call | None:
    """The call written between its tokens, or None if it is not one."""
    try:
        call = json.loads(inner)  # noqa: TID251 - what vLLM's parser reads it with
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    return Call(call["name"], to_json(call.get("arguments")))


@dataclass(frozen=True, slots=True)
class CallPiece:
    """What is told of the call at this place: its name, which opens it, or more of its arguments."""

    place: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one piece of text adds to a reply."""

    content: str = ""
    reasoning: str = ""
    calls: Sequence[CallPiece] = ()


class PieceParser:
    """Understands a reply piece by piece; what may be the beginning of a token of its own is held back."""

    __slots__ = ("_held", "_mode", "_name", "_place", "_told", "_tools")

    def __init__(self, *, thinking: bool, tools: bool) -> None:
        self._mode = "start" if thinking else "content"
        self._tools = tools
        self._held = ""
        self._place = -1
        self._name: str | None = None
        self._told = 0

    def feed(self, text: str, *, ended: bool) -> Piece:
        """What this text adds; at the end, what was held back of thought and content comes out."""
        self._held += text
        content = reasoning = ""
        calls: list[CallPiece] = []
        before = None
        while self._mode != before:
            before = self._mode
            if before == "start":
                reasoning = self._until(_THOUGHT_OPEN, "thought", ended=ended)
            elif before == "thought":
                reasoning += self._until(_THOUGHT_CLOSE, "content", ended=ended)
            elif before == "call":
                calls += self._call()
            else:
                told = self._place >= 0  # what stands between and behind calls is shown to nobody
                said = self._until(_OPEN if self._tools else None, "call", ended=ended)
                content += "" if told else said
        return Piece(content, reasoning, calls)

    def _until(self, mark: str | None, then: str, *, ended: bool) -> str:
        """What is held up to the mark, which changes the mode; without it, all that is surely before one."""
        at = -1 if mark is None else self._held.find(mark)
        if mark is not None and at >= 0:
            text, self._held, self._mode = self._held[:at], self._held[at + len(mark) :], then
            if then == "call":
                self._place, self._name, self._told = self._place + 1, None, 0
            return text
        sure = len(self._held) - (0 if ended or mark is None else _overlap(self._held, mark))
        text, self._held = self._held[:sure], self._held[sure:]
        return text

    def _call(self) -> Iterator[CallPiece]:
        """The name when it is whole, with what of the arguments was not yet told; the close ends the call."""
        inner, closed, rest = self._held.partition(_CLOSE)
        named = _NAME.match(inner)
        if named is not None:
            fresh = None
            if self._name is None:
                fresh = self._name = str(orjson.loads(named[1]))
            begun = _ARGUMENTS.match(inner, named.end())
            known = inner[begun.end() : _value_end(inner, begun.end())].rstrip() if begun else ""
            told, self._told = known[self._told :], len(known)
            if fresh is not None or told:
                yield CallPiece(self._place, fresh, told)
        if closed:
            self._held, self._mode = rest, "content"


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of the text may be the beginning of the mark."""
    return next((size for size in range(len(mark) - 1, 0, -1) if text.endswith(mark[:size])), 0)


def _value_end(text: str, start: int) -> int:
    """Where the JSON value that starts here ends; the end of the text if it does not yet."""
    depth = 0
    for part in re.finditer(r'"(?:[^"\\]|\\.)*"?|[{}\[\],]', text[start:]):
        sign = part[0]
        depth += (sign in {"{", "["}) - (sign in {"}", "]"})
        if depth < 0 or (depth == 0 and sign == ","):
            return start + part.start()
        if depth == 0 and sign in {"}", "]"}:
            return start + part.end()
    return len(text)
