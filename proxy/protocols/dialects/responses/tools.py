"""The tools and tool choice of a Responses request, as chat functions, and the tool of a sampled call.

A custom tool is a function with one string; tools of a namespace are functions with the namespace before their name; hosted
tools are refused by name or left out.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import orjson

from proxy.errors import BadRequest
from proxy.protocols.dialects.responses.validation import objects, optional, refused, required, unknown, wrong
from proxy.protocols.dialects.translation import Json

INPUT: Final = "input"

_HEAD_LENGTH: Final = 64  # until where the string must have begun
_HEAD: Final = re.compile(r'[ \t\r\n]*\{[ \t\r\n]*"input"[ \t\r\n]*:[ \t\r\n]*"')
_PLAIN: Final = re.compile(r'[^"\\]+')
_PAIR: Final = re.compile(r"\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_CODE: Final = re.compile(r"\\u([0-9a-fA-F]{4})")
_UNFINISHED: Final = re.compile(r"\\(?:u[0-9a-fA-F]{0,3}|u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?)?")
_ESCAPED: Final = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_LONE: Final = "\ufffd"  # half of a surrogate pair, which no JSON of ours can hold


class FreeformReader:
    """Reads argument text as it is sampled. The joined results of `feed` and `end` are the input."""

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
        """Find out what is read, as soon as that is sure; what comes back is still to be read."""
        found = _HEAD.match(text[:_HEAD_LENGTH])
        if found is not None:
            self._state = "string"
            return text[found.end() :]
        if len(text) >= _HEAD_LENGTH:
            self._state = "raw"
            return text
        self._held = text
        return ""

    def _read(self, text: str, *, last: bool) -> str:
        """Text of the string, its escapes read. One that may still go on is held."""
        said: list[str] = []
        at = 0
        while at < len(text):
            if text[at] == '"':
                self._state = "over"
                break
            if text[at] == "\\":
                if not last and _UNFINISHED.fullmatch(text, at):
                    self._held = text[at:]
                    break
                meaning, at = _escape(text, at)
                said.append(meaning)
                continue
            plain = _PLAIN.match(text, at)
            assert plain is not None
            said.append(plain[0])
            at = plain.end()
        return "".join(said)


def _escape(text: str, at: int) -> tuple[str, int]:
    """What the escape here means, and where it ends. A backslash that begins none means itself."""
    if pair := _PAIR.match(text, at):
        high, low = int(pair[1], 16), int(pair[2], 16)
        return chr(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00)), pair.end()
    if code := _CODE.match(text, at):
        number = int(code[1], 16)
        return _LONE if 0xD800 <= number < 0xE000 else chr(number), code.end()
    meaning = _ESCAPED.get(text[at + 1 : at + 2])
    return ("\\", at + 1) if meaning is None else (meaning, at + 2)


def input_of(arguments: str) -> str:
    """The input that whole argument text holds."""
    reader = FreeformReader()
    return reader.feed(arguments) + reader.end()


def arguments_for(said: str) -> str:
    """Argument text that holds this input, as chat templates write JSON."""
    return f'{{"{INPUT}": {orjson.dumps(said).decode()}}}'


_CHOICES: Final = ("none", "auto", "required")
_FREE: Final = "The freeform text payload for this tool."  # vLLM 0.32's words (tool_parsers/utils.py:45)


ADDITIONAL: Final = "additional_tools"  # an item that offers more of them


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool of the client's: `chat` is its name in chat."""

    chat: str
    kind: Literal["function", "custom"]
    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class Tools:
    """What a body offers: chat's `tools`, and each tool by its name there."""

    told: tuple[Json, ...] = ()
    named: Mapping[str, Tool] = field(default_factory=dict)

    def of(self, chat: str) -> Tool:
        """The tool that a sampled name means. One that nobody offered is taken for a function."""
        return self.named.get(chat) or Tool(chat, "function", chat)


def chat_name(name: str, namespace: str | None) -> str:
    """What a tool is called in chat, which has no namespaces."""
    return name if namespace is None else f"{namespace}__{name}"


def read_tools(body: Mapping[str, Any], *, ignore_hosted: bool) -> Tools:
    """The tools of a body, and of items that add some (Codex 0.169 sends all of its own so, with some models).

    Raises BadRequest for a hosted one that is not to be ignored, UnprocessableRequest for what is no tool.
    """
    told: list[Json] = []
    named: dict[str, Tool] = {}
    for entry, namespace, at in _offered(body):
        kind = required(entry, "type", str, at)
        if kind not in {"function", "custom"}:
            if ignore_hosted:
                continue
            raise hosted(kind, f"{at}.type")
        name = required(entry, "name", str, at)
        chat = chat_name(name, namespace)
        told.append(_function(entry, chat, at) if kind == "function" else _freeform(entry, chat, at))
        named[chat] = Tool(chat, "function" if kind == "function" else "custom", name, namespace)
    return Tools(tuple(told), named)


def hosted(kind: str, param: str) -> BadRequest:
    """The refusal of a tool, or of an item of one, that OpenAI runs itself."""
    return refused(
        param,
        f"{kind[:100]!r} is a tool that OpenAI hosts, and is not available here: offer a function or a custom tool "
        "instead, or set `ignore_hosted_tools` to remove such tools",
    )


def _offered(body: Mapping[str, Any]) -> Iterator[tuple[Json, str | None, str]]:
    """Each tool that a body offers, with its namespace and where it stands."""
    yield from _entries(optional(body, "tools", list) or [], "tools")
    given = body.get("input")
    for number, item in enumerate(given if isinstance(given, list) else ()):
        if isinstance(item, dict) and item.get("type") == ADDITIONAL:
            at = f"input[{number}]"
            yield from _entries(required(item, "tools", list, at), f"{at}.tools")


def _entries(entries: list[Any], at: str) -> Iterator[tuple[Json, str | None, str]]:
    """Each tool with its namespace and where it stands."""
    for number, entry in enumerate(objects(entries, at)):
        here = f"{at}[{number}]"
        if entry.get("type") != "namespace":
            yield entry, None, here
            continue
        namespace = required(entry, "name", str, here)
        for inner, tool in enumerate(objects(required(entry, "tools", list, here), f"{here}.tools")):
            yield tool, namespace, f"{here}.tools[{inner}]"


def _function(tool: Json, chat: str, at: str) -> Json:
    """Chat's shape of a function: the same fields, one level down."""
    fields = {
        "description": optional(tool, "description", str, at),
        "parameters": optional(tool, "parameters", dict, at),
        "strict": optional(tool, "strict", bool, at),
        "defer_loading": optional(tool, "defer_loading", bool, at),
    }
    return {"type": "function", "function": {"name": chat} | {k: v for k, v in fields.items() if v is not None}}


def _freeform(tool: Json, chat: str, at: str) -> Json:
    """A function of one string. A grammar is told to the model in words: chat cannot bind a tool's input to one."""
    form = optional(tool, "format", dict, at) or {}
    rule = _FREE
    if form.get("type") == "grammar":
        where = f"{at}.format"
        syntax, definition = required(form, "syntax", str, where), required(form, "definition", str, where)
        rule = f"The input must follow this {syntax} grammar:\n{definition}"
    said = optional(tool, "description", str, at)
    schema = {
        "type": "object",
        "properties": {INPUT: {"type": "string", "description": rule}},
        "required": [INPUT],
        "additionalProperties": False,
    }
    described = {} if said is None else {"description": said}
    return {"type": "function", "function": {"name": chat, **described, "parameters": schema}}


def choose(body: Mapping[str, Any], tools: Tools, *, ignore_hosted: bool) -> Json:
    """The fields of chat that say which tools there are and which may be called."""
    told = list(tools.told)
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        choice, told = _choice(choice, tools, ignore_hosted=ignore_hosted)
    elif choice is not None and choice not in _CHOICES:
        if type(choice) is not str:
            raise wrong("tool_choice", "a string or an object", choice)
        raise unknown("tool_choice", choice, f"it is one of {', '.join(_CHOICES)}, or an object")
    fields: Json = {"tools": told} if told else {}
    # vLLM 0.32.0 refuses a choice among no tools, and agents send `auto` all the same.
    if choice is not None and (told or choice != "auto"):
        fields["tool_choice"] = choice
    parallel = optional(body, "parallel_tool_calls", bool)
    return fields if parallel is None or not told else {**fields, "parallel_tool_calls": parallel}


def _choice(choice: Json, tools: Tools, *, ignore_hosted: bool) -> tuple[Any, list[Json]]:
    """A choice that names tools, in chat's shape, and the tools that it leaves."""
    kind = required(choice, "type", str, "tool_choice")
    if kind in {"function", "custom"}:
        name = chat_name(
            required(choice, "name", str, "tool_choice"), optional(choice, "namespace", str, "tool_choice")
        )
        return {"type": "function", "function": {"name": name}}, list(tools.told)
    if kind == "allowed_tools":
        mode = required(choice, "mode", str, "tool_choice")
        if mode not in {"auto", "required"}:
            raise unknown("tool_choice.mode", mode, "it is auto or required")
        allowed = set()
        for entry, namespace, at in _entries(required(choice, "tools", list, "tool_choice"), "tool_choice.tools"):
            if optional(entry, "type", str, at) in {"function", "custom"}:
                inner = namespace or optional(entry, "namespace", str, at)
                allowed.add(chat_name(required(entry, "name", str, at), inner))
        return mode, [tool for tool in tools.told if tool["function"]["name"] in allowed]
    if ignore_hosted:
        return None, list(tools.told)
    raise hosted(kind, "tool_choice")
