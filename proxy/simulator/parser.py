"""Parses reasoning, content and tool calls out of generated text, complete or piece by piece.

Behaves like vLLM 0.32's `qwen3` reasoning parser and `hermes` tool parser. Like them, the two ways differ: in a complete
text a truncated tool call stays content; in a stream, its name and arguments have already been sent as a call.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import orjson

from proxy.simulator.template import to_json

_CALL: Final = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_NAME: Final = re.compile(r'\s*\{\s*"name":\s*("(?:[^"\\]|\\.)*")')
_ARGUMENTS: Final = re.compile(r',\s*"arguments":\s*')
_CALL_OPEN, _CALL_CLOSE = "<tool_call>", "</tool_call>"
_REASONING_OPEN, _REASONING_CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call: the function's name, and its arguments as JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """A parsed reply. `content` and `reasoning` are None if there is none."""

    content: str | None
    reasoning: str | None = None
    calls: Sequence[ToolCall] = ()


CallBlocks = Mapping[str, Sequence[ToolCall]]
"""Texts that are tool calls as a whole, in the syntax of a chat template."""


def parse(text: str, *, reasoning: bool, tools: bool, blocks: CallBlocks = MappingProxyType({})) -> ParsedReply:
    """Parse a complete reply, for reasoning and tool calls as far as these are enabled."""
    content: str | None = text
    reasoning_text = None
    if reasoning:
        before, _, after = text.removeprefix(_REASONING_OPEN).partition(_REASONING_CLOSE)
        reasoning_text, content = before or None, after or None
    if not tools or not content:
        return ParsedReply(content, reasoning_text)
    for block, block_calls in blocks.items():
        if block in content:
            return ParsedReply(content[: content.index(block)] or None, reasoning_text, block_calls)
    calls = [_parse_call(inner) for inner in _CALL.findall(content)]
    valid = [call for call in calls if call is not None]
    if not valid or len(valid) < len(calls):
        return ParsedReply(content, reasoning_text)
    return ParsedReply(content[: content.index(_CALL_OPEN)] or None, reasoning_text, valid)


def _parse_call(inner: str) -> ToolCall | None:
    """Return the call between its tags, or None if it is malformed."""
    try:
        call = json.loads(inner)  # noqa: TID251 - vLLM's parser uses json, too
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    return ToolCall(call["name"], to_json(call.get("arguments")))


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A part of the call at this index: its name, which opens the call, or more of its arguments."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """What a piece of text adds to a reply."""

    content: str = ""
    reasoning: str = ""
    calls: Sequence[CallDelta] = ()


class StreamParser:
    """Parses a reply piece by piece; holds text back while it may be the beginning of a tag."""

    __slots__ = ("_blocks", "_buffer", "_index", "_mode", "_name", "_sent", "_tools")

    def __init__(
        self,
        *,
        reasoning: bool,
        tools: bool,
        reasoning_open: bool = False,
        blocks: CallBlocks = MappingProxyType({}),
    ) -> None:
        """With `reasoning_open`, the prompt ends with the tag that opens the reasoning."""
        self._blocks = blocks
        self._mode = ("reasoning" if reasoning_open else "start") if reasoning else "content"
        self._tools = tools
        self._buffer = ""
        self._index = -1
        self._name: str | None = None
        self._sent = 0  # characters of the current call's arguments

    def feed(self, text: str, *, ended: bool) -> Delta:
        """Return what this text adds; with `ended`, also the reasoning or content that was held back."""
        self._buffer += text
        content = reasoning = ""
        calls: list[CallDelta] = []
        before = None
        while self._mode != before:
            before = self._mode
            if before == "start":
                reasoning = self._until(_REASONING_OPEN, "reasoning", ended=ended)
            elif before == "reasoning":
                reasoning += self._until(_REASONING_CLOSE, "content", ended=ended)
            elif before == "call":
                calls += self._call()
            elif self._tools and self._blocks:
                piece, block_calls = self._until_block(ended=ended)
                content += piece
                calls += block_calls
            else:
                after_call = self._index >= 0  # text between and after calls is dropped
                piece = self._until(_CALL_OPEN if self._tools else None, "call", ended=ended)
                content += "" if after_call else piece
        return Delta(content, reasoning, calls)

    def _until(self, tag: str | None, next_mode: str, *, ended: bool) -> str:
        """Return the buffered text before the tag, and change the mode; without the tag, all that cannot be part of it."""
        start = -1 if tag is None else self._buffer.find(tag)
        if tag is not None and start >= 0:
            text, self._buffer, self._mode = self._buffer[:start], self._buffer[start + len(tag) :], next_mode
            if next_mode == "call":
                self._index, self._name, self._sent = self._index + 1, None, 0
            return text
        end = len(self._buffer) - (0 if ended or tag is None else _overlap(self._buffer, tag))
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        return text

    def _until_block(self, *, ended: bool) -> tuple[str, list[CallDelta]]:
        """Return the buffered text before a block and its calls, which end the reply; without a block, the final text."""
        for block, calls in self._blocks.items():
            text, found, _ = self._buffer.partition(block)
            if found:
                self._buffer, self._blocks, self._index = "", {}, len(calls) - 1
                return text, [CallDelta(index, call.name, call.arguments) for index, call in enumerate(calls)]
        held_back = 0 if ended else max(_overlap(self._buffer, block) for block in self._blocks)
        end = len(self._buffer) - held_back
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        return text, []

    def _call(self) -> Iterator[CallDelta]:
        """Yield the call's name once it is complete, and the arguments that were not sent yet; the closing tag ends it."""
        inner, closed, rest = self._buffer.partition(_CALL_CLOSE)
        name_match = _NAME.match(inner)
        if name_match is not None:
            name = None
            if self._name is None:
                name = self._name = str(orjson.loads(name_match[1]))
            start = _ARGUMENTS.match(inner, name_match.end())
            arguments = inner[start.end() : _value_end(inner, start.end())].rstrip() if start else ""
            unsent, self._sent = arguments[self._sent :], len(arguments)
            if name is not None or unsent:
                yield CallDelta(self._index, name, unsent)
        if closed:
            self._buffer, self._mode = rest, "content"


def _overlap(text: str, tag: str) -> int:
    """Return the length of the longest suffix of the text that is a prefix of the tag."""
    return next((size for size in range(len(tag) - 1, 0, -1) if text.endswith(tag[:size])), 0)


def _value_end(text: str, start: int) -> int:
    """Return the end of the JSON value that starts here; the end of the text if the value is incomplete."""
    depth = 0
    for match in re.finditer(r'"(?:[^"\\]|\\.)*"?|[{}\[\],]', text[start:]):
        sign = match[0]
        depth += (sign in {"{", "["}) - (sign in {"}", "]"})
        if depth < 0 or (depth == 0 and sign == ","):
            return start + match.start()
        if depth == 0 and sign in {"}", "]"}:
            return start + match.end()
    return len(text)
