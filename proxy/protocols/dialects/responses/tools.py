"""Translation of the tools and tool choice of a Responses request to chat functions, and back to the tool of a sampled call.

A custom tool becomes a function with one string; tools of a namespace become functions with the namespace before their
name; hosted tools are refused or removed.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import orjson

from proxy.errors import BadRequest
from proxy.protocols.dialects.base import Json
from proxy.protocols.dialects.translation import (
    a_flag,
    a_text,
    an_object,
    chat_function,
    objects,
    optional,
    required,
    unknown,
    wrong,
)

INPUT: Final = "input"

_MAX_HEAD: Final = 64  # characters, within which the string must begin
_HEAD: Final = re.compile(r'[ \t\r\n]*\{[ \t\r\n]*"input"[ \t\r\n]*:[ \t\r\n]*"')
_PLAIN: Final = re.compile(r'[^"\\]+')
_PAIR: Final = re.compile(r"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_CODE: Final = re.compile(r"\\u([0-9a-fA-F]{4})")
_UNFINISHED: Final = re.compile(r"\\(?:u[0-9a-fA-F]{0,3}|u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?)?")
_ESCAPED: Final = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_LONE: Final = "\ufffd"  # replaces half a surrogate pair, which UTF-8 cannot encode


class FreeformReader:
    """Extracts a custom tool's input from argument text as it is sampled: the joined results of `feed` and `end`."""

    __slots__ = ("_held", "_state")

    def __init__(self) -> None:
        self._state: Literal["head", "string", "raw", "over"] = "head"
        self._held = ""

    def feed(self, piece: str) -> str:
        """Return the new part of the input."""
        text, self._held = self._held + piece, ""
        if self._state == "head":
            text = self._enter(text)
        if self._state == "string":
            return self._read(text, last=False)
        return text if self._state == "raw" else ""

    def end(self) -> str:
        """Return the rest of the input."""
        rest, self._held = self._held, ""
        return self._read(rest, last=True) if self._state == "string" else rest

    def _enter(self, text: str) -> str:
        """Decide whether the text is JSON with the input, or the input itself; return the text that is still to be read."""
        found = _HEAD.match(text[:_MAX_HEAD])
        if found is not None:
            self._state = "string"
            return text[found.end() :]
        if len(text) >= _MAX_HEAD:
            self._state = "raw"
            return text
        self._held = text
        return ""

    def _read(self, text: str, *, last: bool) -> str:
        """Return the text of the string with its escapes decoded; keep an unfinished escape for the next piece."""
        decoded: list[str] = []
        pos = 0
        while pos < len(text):
            if text[pos] == '"':
                self._state = "over"
                break
            if text[pos] == "\\":
                if not last and _UNFINISHED.fullmatch(text, pos):
                    self._held = text[pos:]
                    break
                character, pos = _escape(text, pos)
                decoded.append(character)
                continue
            plain = _PLAIN.match(text, pos)
            assert plain is not None
            decoded.append(plain[0])
            pos = plain.end()
        return "".join(decoded)


def _escape(text: str, pos: int) -> tuple[str, int]:
    """Return the decoded escape at this position, and where it ends. An invalid escape is a backslash."""
    if pair := _PAIR.match(text, pos):
        high, low = int(pair[1], 16), int(pair[2], 16)
        return chr(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00)), pair.end()
    if code := _CODE.match(text, pos):
        number = int(code[1], 16)
        return _LONE if 0xD800 <= number < 0xE000 else chr(number), code.end()
    character = _ESCAPED.get(text[pos + 1 : pos + 2])
    return ("\\", pos + 1) if character is None else (character, pos + 2)


def input_from(arguments: str) -> str:
    """Return the input in complete argument text."""
    reader = FreeformReader()
    return reader.feed(arguments) + reader.end()


def arguments_for(text: str) -> str:
    """Return argument text with this input, formatted as chat templates write JSON."""
    return f'{{"{INPUT}": {orjson.dumps(text).decode()}}}'


_CHOICES: Final = ("none", "auto", "required")
_FREE: Final = "The freeform text payload for this tool."  # as in vLLM 0.32 (tool_parsers/utils.py:45)


ADDITIONAL: Final = "additional_tools"  # an input item with tools


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool of the client; `chat` is its name in chat."""

    chat: str
    kind: Literal["function", "custom"]
    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a body: in chat's format, and by their names in chat."""

    chat_tools: tuple[Json, ...] = ()
    by_name: Mapping[str, Tool] = field(default_factory=dict)

    def of(self, chat: str) -> Tool:
        """Return the tool with a sampled name; an unknown one is a function."""
        return self.by_name.get(chat) or Tool(chat, "function", chat)


def chat_name(name: str, namespace: str | None) -> str:
    """Return a tool's name in chat, which has no namespaces."""
    return name if namespace is None else f"{namespace}__{name}"


def read_tools(body: Mapping[str, Any], *, ignore_hosted: bool) -> Tools:
    """Return the tools of a body, and of its `additional_tools` items (Codex 0.169 uses them with some models).

    Raises:
        BadRequest: A tool is hosted, and hosted tools are not ignored.
        InvalidValue: A tool is invalid.
    """
    chat_tools: list[Json] = []
    by_name: dict[str, Tool] = {}
    for entry, namespace, path in _offered(body):
        kind = required(a_text, entry, "type", path)
        if kind not in {"function", "custom"}:
            if ignore_hosted:
                continue
            raise hosted(kind, f"{path}.type")
        name = required(a_text, entry, "name", path)
        chat = chat_name(name, namespace)
        chat_tools.append(_function(entry, chat, path) if kind == "function" else _freeform(entry, chat, path))
        by_name[chat] = Tool(chat, "function" if kind == "function" else "custom", name, namespace)
    return Tools(tuple(chat_tools), by_name)


def hosted(kind: str, param: str) -> BadRequest:
    """Return the error for a tool that OpenAI hosts, or for an item of one."""
    return BadRequest(
        f"{kind[:100]!r} is a hosted tool of OpenAI, which TokenTape does not support: use a function or a custom tool "
        "instead, or set `ignore_hosted_tools` to remove hosted tools",
        param=param,
    )


def _offered(body: Mapping[str, Any]) -> Iterator[tuple[Json, str | None, str]]:
    yield from _entries(optional(objects, body, "tools") or ())
    items = body.get("input")
    for number, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, dict) and item.get("type") == ADDITIONAL:
            path = f"input[{number}]"
            yield from _entries(required(objects, item, "tools", path))


def _entries(entries: Iterable[tuple[Json, str]]) -> Iterator[tuple[Json, str | None, str]]:
    for entry, path in entries:
        if entry.get("type") != "namespace":
            yield entry, None, path
            continue
        namespace = required(a_text, entry, "name", path)
        for tool, tool_path in required(objects, entry, "tools", path):
            yield tool, namespace, tool_path


def _function(tool: Json, chat: str, path: str) -> Json:
    """Return a function in chat's format: the same fields, one level deeper."""
    return chat_function(
        chat,
        description=optional(a_text, tool, "description", path),
        parameters=optional(an_object, tool, "parameters", path),
        strict=optional(a_flag, tool, "strict", path),
        defer_loading=optional(a_flag, tool, "defer_loading", path),
    )


def _freeform(tool: Json, chat: str, path: str) -> Json:
    """Return a custom tool as a function with one string. A grammar is described in words: chat has no field for it."""
    input_format = optional(an_object, tool, "format", path) or {}
    rule = _FREE
    if input_format.get("type") == "grammar":
        format_path = f"{path}.format"
        syntax, definition = (required(a_text, input_format, name, format_path) for name in ("syntax", "definition"))
        rule = f"The input must follow this {syntax} grammar:\n{definition}"
    description = optional(a_text, tool, "description", path)
    schema = {
        "type": "object",
        "properties": {INPUT: {"type": "string", "description": rule}},
        "required": [INPUT],
        "additionalProperties": False,
    }
    return chat_function(chat, description=description, parameters=schema)


def choose(body: Mapping[str, Any], tools: Tools, *, ignore_hosted: bool) -> Json:
    """Return chat's fields of the tools and the tool choice."""
    chat_tools = list(tools.chat_tools)
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        choice, chat_tools = _choice(choice, tools, ignore_hosted=ignore_hosted)
    elif choice is not None and choice not in _CHOICES:
        if type(choice) is not str:
            raise wrong("tool_choice", "a string or an object", choice)
        raise unknown("tool_choice", choice, f"use one of {', '.join(_CHOICES)}, or an object")
    fields: Json = {"tools": chat_tools} if chat_tools else {}
    # vLLM 0.32.0 refuses a tool choice without tools; some agents send `auto` without tools.
    if choice is not None and (chat_tools or choice != "auto"):
        fields["tool_choice"] = choice
    parallel = optional(a_flag, body, "parallel_tool_calls")
    return fields if parallel is None or not chat_tools else {**fields, "parallel_tool_calls": parallel}


def _choice(choice: Json, tools: Tools, *, ignore_hosted: bool) -> tuple[Any, list[Json]]:
    """Return a tool choice with names in chat's format, and the tools that it allows."""
    kind = required(a_text, choice, "type", "tool_choice")
    if kind in {"function", "custom"}:
        name = chat_name(
            required(a_text, choice, "name", "tool_choice"), optional(a_text, choice, "namespace", "tool_choice")
        )
        return chat_function(name), list(tools.chat_tools)
    if kind == "allowed_tools":
        mode = required(a_text, choice, "mode", "tool_choice")
        if mode not in {"auto", "required"}:
            raise unknown("tool_choice.mode", mode, "use auto or required")
        allowed = set()
        for entry, namespace, path in _entries(required(objects, choice, "tools", "tool_choice")):
            if optional(a_text, entry, "type", path) in {"function", "custom"}:
                inner = namespace or optional(a_text, entry, "namespace", path)
                allowed.add(chat_name(required(a_text, entry, "name", path), inner))
        return mode, [tool for tool in tools.chat_tools if tool["function"]["name"] in allowed]
    if ignore_hosted:
        return None, list(tools.chat_tools)
    raise hosted(kind, "tool_choice")
