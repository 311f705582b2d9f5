"""Arguments of tool calls: texts as sampled on chat's side, objects on this dialect's.

Holds how a text is told as an object, how an object is spelt where nothing better is known, and how the sampled text is put
back. It must not know messages or blocks.

A sampled text and the object that it says differ in what JSON does not mean (spaces, escapes, the order of keys), and
in what is no object: a text that was cut off, or is no JSON. Nothing of this dialect that a client returns can carry it: a
call's id and the signature of its thoughts are told before its arguments are sampled. So the text is looked up, by the id.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from proxy.protocols.dialects.messages.partial_json import DEEPEST, LONGEST, Beginning
from proxy.protocols.dialects.translation import Json
from proxy.protocols.dialects.validation import refusal

_LONG_NUMBER: Final = re.compile(rf"[-+.0-9eE]{{{LONGEST + 1}}}")


def parse_arguments(arguments: str) -> Json:
    """The object that a client gets of a sampled text: of what can be one, what came whole."""
    if arguments.count("{") + arguments.count("[") <= DEEPEST and not _LONG_NUMBER.search(arguments):
        try:
            read = orjson.loads(arguments)  # quicker by far, and the same: nothing of it is beyond what is let through
        except orjson.JSONDecodeError:
            read = None
        if isinstance(read, dict):
            return read
    beginning = Beginning()
    told = beginning.feed(arguments)
    return dict(orjson.loads(beginning.whole(told)))


def spelt(given: Json, at: str) -> str:
    """An object as models and the parsers of engines spell it: vLLM's and SGLang's write Python's own JSON."""
    try:
        return json.dumps(given, ensure_ascii=False)  # noqa: TID251 - orjson has no spaces after commas and colons
    except RecursionError:
        raise refusal(at, "is nested too deeply") from None


def restored(given: Json, name: str, sampled: Json | None, at: str) -> str:
    """The arguments of a call that came back: the sampled text, if it still says the same; else spelt anew.

    `sampled` is the chat call that was told by this id, if it is known.
    """
    function = sampled.get("function") if sampled is not None else None
    if isinstance(function, Mapping) and function.get("name") == name:
        arguments = function.get("arguments")
        if isinstance(arguments, str) and is_same(parse_arguments(arguments), given):
            return arguments
    return spelt(given, at)


def call_ids(calls: Sequence[Any], step_id: str) -> list[str]:
    """The ids by which the calls of a message are told: their own, unless one has none or it is another's, too."""
    seen: set[str] = set()
    return [
        choose_call_id(call.get("id") if isinstance(call, Mapping) else None, seen, step_id, at)
        for at, call in enumerate(calls)
    ]


def choose_call_id(own: Any, seen: set[str], step_id: str, at: int) -> str:
    """The id by which the call at this place is told; it is among those seen afterwards."""
    told = own if isinstance(own, str) and own and own not in seen else f"toolu_{step_id}_{at}"
    seen.add(told)
    return told


def unrestorable_calls(message: Mapping[str, Any], step_id: str) -> dict[str, Json]:
    """The calls of a sampled message, by the id they are told by, whose text reading could not give back by itself."""
    calls = [call for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    kept = {}
    for told, call in zip(call_ids(calls, step_id), calls, strict=True):
        function = call.get("function") or {}
        arguments = function.get("arguments")
        if isinstance(arguments, str) and spelt(parse_arguments(arguments), "input") != arguments:
            kept[told] = {"function": {"name": function.get("name"), "arguments": arguments}}
    return kept


def named(body: Mapping[str, Any]) -> frozenset[str]:
    """The ids of the calls that the replies in a body made: by these, sampled texts are looked up."""
    found = set()
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for block in content if isinstance(content, list) else ():
            if isinstance(block, dict) and block.get("type") == "tool_use" and isinstance(block.get("id"), str):
                found.add(block["id"])
    return frozenset(found)


def is_same(one: Any, other: Any) -> bool:
    """Whether two values of JSON are the same: 1 is 1.0 (JavaScript knows one kind of number), and not true."""
    pairs = [(one, other)]
    while pairs:  # a stack of our own: bodies may be nested deeper than Python's
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
