"""What translators share: checks of request values, chat's fields, arguments of tool calls, and delayed pieces of streams.

A check takes a value and its path, in the notation of the dialect (`messages.0.content`, `input[0].content`), and returns the
value; an invalid value is refused with its path. Null counts as absent.

Arguments of tool calls are sampled texts in chat, and objects in dialects with a field for an object (Messages, Gemini). A
sampled text and its object differ in spaces, escapes and the order of keys, and a truncated or invalid text is no object. A
client does not send the text back, so it is looked up by the call's id.
"""

import json
import math
import re
from base64 import b64decode
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import orjson

from proxy.errors import InvalidValue
from proxy.protocols.dialects.base import Json
from proxy.protocols.sampling import SAMPLING_FIELDS
from proxy.trajectory.conversations import THOUGHTS
from proxy.trajectory.json_bytes import parse_text, write_python

T = TypeVar("T")
Check: TypeAlias = Callable[[Any, str], T]

_NAMES: Final = {
    type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list",
    dict: "an object",
}  # fmt: skip


def refusal(path: str, sentence: str) -> InvalidValue:
    """Return the error for the value at this path."""
    return InvalidValue(f"{path}: {sentence}", param=path)


def wrong(path: str, expected: str, value: Any) -> InvalidValue:
    """Return the error for a value of another type than expected."""
    return refusal(path, f"must be {expected}, not {_NAMES[type(value)]}")


def unknown(path: str, value: str, known: str) -> InvalidValue:
    """Return the error for an unknown value; `known` is what to use."""
    return InvalidValue(f"{path} cannot be {value[:100]!r}: {known}", param=path)


def _of(expected: str, *types: type) -> Check[Any]:
    def check(value: Any, path: str) -> Any:
        if type(value) not in types:
            raise wrong(path, expected, value)
        return value

    return check


a_text: Final[Check[str]] = _of("a string", str)
a_list: Final[Check[list[Any]]] = _of("a list", list)
an_object: Final[Check[Json]] = _of("an object", dict)
a_number: Final[Check[int | float]] = _of("a number", int, float)
a_count: Final[Check[int]] = _of("an integer", int)
a_flag: Final[Check[bool]] = _of("true or false", bool)


def one_of(value: Any, path: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    """Return the value if it is one of these strings."""
    text = a_text(value, path)
    if text not in known:
        raise refusal(path, f"must be one of {', '.join(known)}, not {text[:64]!r}")
    return text


def objects(value: Any, path: str) -> list[tuple[Json, str]]:
    """Return the objects of a list, each with its path."""
    return [(an_object(entry, f"{path}[{n}]"), f"{path}[{n}]") for n, entry in enumerate(a_list(value, path))]


def texts(value: Any, path: str) -> list[str]:
    """Return the strings of a list."""
    return [a_text(entry, f"{path}[{n}]") for n, entry in enumerate(a_list(value, path))]


def decoded(coded: str) -> str | None:
    """Return the UTF-8 text in base64; None if it is not."""
    try:
        return b64decode(coded, validate=True).decode()
    except ValueError:
        return None


@cache
def snake_case(name: str) -> str:
    """Return the name of a field in camelCase as in protocol buffers; other names are unchanged."""
    return re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", name)


def at(value: Mapping[str, Any], name: str, path: str = "") -> tuple[Any, str]:
    """Return the value of a field, by either spelling of its name, and its path. Raises InvalidValue if it occurs twice."""
    field_path = f"{path}.{name}" if path else name
    found = value.get(name)
    if (other := snake_case(name)) != name and (spelled := value.get(other)) is not None:
        if found is not None:
            raise refusal(field_path, f"is present twice, also as {other}")
        found = spelled
    return found, field_path


def optional(check: Check[T], value: Mapping[str, Any], name: str, path: str = "") -> T | None:
    """Return the checked value of a field; None if it is absent. `path` is the path of the object."""
    if name.islower():  # the usual case: it has no other spelling
        found = value.get(name)
        return None if found is None else check(found, f"{path}.{name}" if path else name)
    found, field_path = at(value, name, path)
    return None if found is None else check(found, field_path)


def required(check: Check[T], value: Mapping[str, Any], name: str, path: str = "") -> T:
    """Return the checked value of a field, which must be present."""
    if name.islower():
        return check(value.get(name), f"{path}.{name}" if path else name)
    return check(*at(value, name, path))


CONTINUES: Final = {"continue_final_message": True, "add_generation_prompt": False}


def passed_fields(body: Mapping[str, Any], translated: Collection[str]) -> Json:
    """Return the engine's sampling fields in a body, except the `translated` fields. The engine validates them."""
    return {name: body[name] for name in SAMPLING_FIELDS if name not in translated and body.get(name) is not None}


def add_configured(chat: Json, fields: Mapping[str, Any]) -> None:
    """Add configured fields to a chat body. The body's own fields override them."""
    for name, value in fields.items():
        own = chat.get(name)
        if isinstance(own, dict) and isinstance(value, Mapping):
            chat[name] = {**value, **own}
        elif own is None:
            chat[name] = value


def continue_last(chat: Json, reasoning_field: str) -> None:
    """Let the model continue the last message if it is not empty; remove an empty one."""
    last = chat["messages"][-1]
    if last["content"] or last.get(reasoning_field):
        chat |= CONTINUES
    else:
        chat["messages"] = chat["messages"][:-1]


def text_part(text: str) -> Json:
    """Return a part of content, in chat and in Messages."""
    return {"type": "text", "text": text}


def chat_content(parts: list[Json]) -> str | list[Json]:
    """Return chat content with these parts: a single text is a string, as chat's clients send it."""
    text: str | list[Json] = parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts
    return text


def chat_call(call_id: str, name: str, arguments: str) -> Json:
    """Return a tool call of a chat message."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def chat_function(name: str, **fields: Any) -> Json:
    """Return a function of chat with these fields, except those that are None; without any, the choice of this function."""
    return {"type": "function", "function": {"name": name} | {k: v for k, v in fields.items() if v is not None}}


def schema_format(schema: Json) -> Json:
    """Return the chat field of a response format with a schema; `schema` are its name, its JSON Schema and its options."""
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def choices_of(response: Mapping[str, Any]) -> list[Json]:
    """Return the choices, at least one: a response that was aborted at its beginning may have none."""
    return response.get("choices") or [{}]


def reasoning_of(message: Mapping[str, Any]) -> Any:
    """Return the reasoning of a message or a delta; None if it has none."""
    for name in THOUGHTS:  # without a generator: for each event of a stream
        if message.get(name):
            return message[name]
    return None


class Usage(NamedTuple):
    """The token counts of a chat response. `reasoning` is None if the engine does not count it."""

    prompt: int
    completion: int
    cached: int
    reasoning: int | None


def read_usage(usage: Any) -> Usage:
    """Return the counts of a chat response; an invalid or absent count is 0."""
    reasoning = _count(usage, "completion_tokens_details", "reasoning_tokens")
    return Usage(
        _count(usage, "prompt_tokens") or 0,
        _count(usage, "completion_tokens") or 0,
        _count(usage, "prompt_tokens_details", "cached_tokens") or 0,
        _count(usage, "reasoning_tokens") if reasoning is None else reasoning,  # SGLang 0.5.23
    )


def _count(value: Any, *path: str) -> int | None:
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if type(value) is int else None


def event(kind: str, **fields: Any) -> bytes:
    """Return one event of a stream."""
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **fields}) + b"\n\n"


TEXT: Final = -1  # in place of the index of a call: reasoning or text


class HeldPieces:
    """Writes pieces as they arrive until a call is open; then only pieces of this call, and all others at the end.

    A call is complete for a client when the next block or item begins: Claude Code 2.1 and Codex 0.169 then run its tool, while
    the rest is sampled. If the engine failed after that, a tool would have run for a response without a complete step.
    """

    __slots__ = ("_held", "open_call")

    def __init__(self) -> None:
        self.open_call: int | None = None  # its index
        self._held: dict[int, list[Callable[[], bytes]]] = {}

    @property
    def calls(self) -> list[int]:
        """The indices of the held calls, in the order in which they began."""
        return [index for index in self._held if index != TEXT]

    def take(self, index: int, write: Callable[..., bytes], *piece: Any) -> bytes:
        """Return the events that this writes of a piece, none if it is held. `index`: of its call, or TEXT.

        What writes a call sets `open_call`.
        """
        if self.open_call is None or self.open_call == index:
            return write(*piece)
        self._held.setdefault(index, []).append(partial(write, *piece))
        return b""

    def release(self) -> bytes:
        """Return the events of the held pieces, grouped by call."""
        held, self._held = self._held, {}
        return b"".join([write() for writers in held.values() for write in writers])


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
    """An incremental parser that returns the longest prefix of sampled arguments that can be the beginning of a JSON object.

    Invariant: the results of `feed`, joined, are a prefix of the sampled text, and do not depend on how it is split.

    Clients parse partial JSON as it arrives, and the official SDK (anthropic 2.12, with jiter) raises an error at text that
    cannot be part of a JSON value, which loses the whole stream. Text from that point on is withheld. `whole` returns the
    object that these clients have at the end: complete values remain, a truncated one is removed.

    `broken`: the rest of the text cannot be part of an object.
    """

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


_ENCODER: Final = json.JSONEncoder(ensure_ascii=False)  # orjson has no spaces after commas and colons
_LONG_NUMBER: Final = re.compile(rf"(?<![-+.0-9eE])[-+.0-9eE]{{{MAX_NUMBER_LENGTH + 1}}}")  # each run is read once


def parse_arguments(arguments: str) -> Json:
    """Return the client's object of a sampled text: the values that are complete."""
    if arguments.count("{") + arguments.count("[") <= MAX_DEPTH and not _LONG_NUMBER.search(arguments):
        try:
            read = parse_text(arguments)  # faster, with the same result for what is accepted above
        except ValueError:
            read = None
        if isinstance(read, dict):
            return read
    partial = PartialObject()
    prefix = partial.feed(arguments)
    return dict(orjson.loads(partial.whole(prefix)))


def serialize(arguments: Json, path: str) -> str:
    """Serialize an object like models and engines' parsers: vLLM's and SGLang's write Python's own JSON."""
    try:
        return write_python(arguments, _ENCODER)
    except RecursionError:
        raise refusal(path, "is nested too deeply") from None


class SampledCalls:
    """The functions of earlier calls by id. The arguments of each are parsed once, however often a body repeats its id."""

    __slots__ = ("_calls", "_parsed")

    def __init__(self, calls: Mapping[str, Mapping[str, Any]]) -> None:
        self._calls = calls
        self._parsed: dict[str, Json] = {}

    def restored(self, tool_input: Json, name: str, call_id: str, path: str) -> str:
        """Return the arguments of a call that was sent back: the sampled text if it is equal, else the serialized object."""
        function = self._calls.get(call_id, {})
        arguments = function.get("arguments")
        if function.get("name") == name and isinstance(arguments, str):
            if call_id not in self._parsed:
                self._parsed[call_id] = parse_arguments(arguments)
            if is_same(self._parsed[call_id], tool_input):
                return arguments
        return serialize(tool_input, path)


def call_ids(calls: Sequence[Any], step_id: str, prefix: str = "toolu") -> list[str]:
    """Return the rendered ids of a message's calls: their own, unless one is missing or duplicated."""
    seen: set[str] = set()
    return [
        choose_call_id(call.get("id") if isinstance(call, Mapping) else None, seen, step_id, index, prefix)
        for index, call in enumerate(calls)
    ]


def choose_call_id(own: Any, seen: set[str], step_id: str, index: int, prefix: str = "toolu") -> str:
    """Return the rendered id of the call with this index, and add it to `seen`."""
    call_id = own if isinstance(own, str) and own and own not in seen else f"{prefix}_{step_id}_{index}"
    seen.add(call_id)
    return call_id


def is_same(left_value: Any, right_value: Any) -> bool:
    """Return whether two JSON values are equal: 1 equals 1.0 (JavaScript has one number type), and not true."""
    pairs = [(left_value, right_value)]
    while pairs:  # an explicit stack: bodies may be nested deeper than Python's recursion limit
        left, right = pairs.pop()
        if isinstance(left, dict) and isinstance(right, dict):
            if left.keys() != right.keys():
                return False
            pairs += [(left[key], right[key]) for key in left]
        elif isinstance(left, list) and isinstance(right, list):
            if len(left) != len(right):
                return False
            pairs += zip(left, right, strict=True)
        elif isinstance(left, bool) is not isinstance(right, bool) or left != right:
            return False
    return True
