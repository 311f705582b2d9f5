"""Tools: what agents offer, as chat's functions, and which tool a sampled call is of.

Holds the reading of `tools` and `tool_choice`. A custom tool is a function of one string (freeform.py); tools of a namespace
are functions with the namespace before their name; hosted tools, which nobody hosts here, are refused by name or left out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from proxy.dialects.responses.checking import objects, optional, refused, required, unknown, wrong
from proxy.dialects.responses.freeform import INPUT
from proxy.dialects.translated import Json
from proxy.errors import BadCall

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

    Raises BadCall for a hosted one that is not to be ignored, NotValid for what is no tool.
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


def hosted(kind: str, param: str) -> BadCall:
    """The refusal of a tool, or of an item of one, that OpenAI runs itself."""
    return refused(
        param,
        f"{kind[:100]!r} is a tool that is hosted by OpenAI, and nobody runs it here: offer a function or a custom tool "
        "in its place, or set `ignore_hosted_tools` to leave such tools out",
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
