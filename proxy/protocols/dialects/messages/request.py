"""A Messages request, read as a chat call.

Fields without an equivalent in chat (`metadata`, `context_management`, …) are recorded with the client's body, and not sent.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from proxy.protocols.dialects.base import NO_REFERENCES, Json, ResolvedReferences, TranslationOptions
from proxy.protocols.dialects.chat_format import add_configured, continue_last, passed_fields, schema_format
from proxy.protocols.dialects.messages.messages import TOOL_CHANGES, read_conversation
from proxy.protocols.dialects.validation import (
    a_count,
    a_flag,
    a_list,
    a_number,
    a_text,
    an_object,
    one_of,
    optional,
    refusal,
    required,
)

# Sampling fields with another name here, or with an effect that a response cannot represent.
TRANSLATED: Final = frozenset(
    {"temperature", "top_p", "top_k", "n", "max_tokens", "max_completion_tokens", "stop", "tool_choice"}
)
_THINKING_TYPES: Final = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
_NUMBERS: Final = {"max_tokens": a_count, "top_k": a_count, "temperature": a_number, "top_p": a_number}
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none", "tool": None}


def read(body: Mapping[str, Any], options: TranslationOptions, resolved: ResolvedReferences = NO_REFERENCES) -> Json:
    """Return the chat body of a request. Raises UnprocessableRequest, naming the field."""
    if body.get("thread") not in (None, False):
        raise refusal(
            "thread", "conversations are not stored; send the whole conversation with each call and remove `thread`"
        )
    model = optional(a_text, body, "model")
    chat: Json = {} if model is None else {"model": model}
    chat["messages"] = read_conversation(body, options, resolved.calls)
    chat |= {**_sampling(body), **tools_from(body, ignore_hosted=options.ignore_hosted_tools), **_response_format(body)}
    chat |= passed_fields(body, TRANSLATED)
    if body.get("chat_template_kwargs") is not None:
        chat["chat_template_kwargs"] = body["chat_template_kwargs"]
    _continue(chat, body["messages"][-1]["role"], options.thought)
    _set_reasoning(chat, body, options)
    if optional(a_flag, body, "stream"):
        # The first event has the number of prompt tokens, which is known in time only if each chunk has usage.
        chat |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    return chat


def _sampling(body: Mapping[str, Any]) -> Json:
    if body.get("n") not in (None, 1):
        raise refusal("n", "must be 1: Messages returns one response per call")
    fields: Json = {name: check(body[name], name) for name, check in _NUMBERS.items() if body.get(name) is not None}
    stops = optional(a_list, body, "stop_sequences")
    if stops:
        fields["stop"] = [a_text(stop, f"stop_sequences.{n}") for n, stop in enumerate(stops)]
    return fields


def _response_format(body: Mapping[str, Any]) -> Json:
    """Return `response_format` of `output_config.format`, or of `output_format` (its name in betas)."""
    config = optional(an_object, body, "output_config") or {}
    value, path = body.get("output_format"), "output_format"
    if config.get("format") is not None:
        value, path = config["format"], "output_config.format"
    if value is None:
        return {}
    output_format = an_object(value, path)
    one_of(output_format.get("type"), f"{path}.type", ("json_schema",))
    return schema_format(
        {"name": "output", "schema": required(an_object, output_format, "schema", path), "strict": True}
    )


def _continue(chat: Json, last_role: str, reasoning_field: str) -> None:
    """Let the model continue the last turn if it is the assistant's and not empty; remove an empty one.

    `last_role` is the role of the request's last turn, since the last chat message may be another one: a system message is
    moved to the beginning, and an empty turn has no message.
    """
    last = chat["messages"][-1] if chat["messages"] else {}
    if last_role == "assistant" and "tool_calls" in last:
        raise refusal("messages", "the last message calls tools; add their results")
    if last_role == last.get("role") == "assistant":
        continue_last(chat, reasoning_field)
    if not chat["messages"]:
        raise refusal("messages", "at least one message must have content")


def _set_reasoning(chat: Json, body: Mapping[str, Any], options: TranslationOptions) -> None:
    """Set the fields of reasoning, as vLLM 0.32's endpoint does (entrypoints/anthropic/serving.py:629).

    `output_config.effort` is the effort; disabled reasoning is the effort "none".
    """
    effort = optional(a_text, body.get("output_config") or {}, "effort", "output_config")
    if effort is not None:
        chat["reasoning_effort"] = effort
    thinking = optional(an_object, body, "thinking")
    if thinking is None:
        return
    if _THINKING_TYPES[one_of(thinking.get("type"), "thinking.type", _THINKING_TYPES)]:
        add_configured(chat, options.thinking)
    else:
        chat.pop("reasoning_effort", None)
        add_configured(chat, {"reasoning_effort": "none", **options.not_thinking})


def tools_from(body: Mapping[str, Any], *, ignore_hosted: bool = False) -> Json:
    """Return the chat fields with the tools and the tool choice.

    Hosted tools (Anthropic's, or tools of MCP servers) are refused, or removed with `ignore_hosted`: neither their results
    nor their schemas are available.
    """
    if body.get("mcp_servers") and not ignore_hosted:
        raise refusal("mcp_servers", "tools of MCP servers are not supported; let the agent call them")
    tools = optional(a_list, body, "tools") or ()
    offered = [_function(tool, f"tools.{n}", ignore_hosted=ignore_hosted) for n, tool in enumerate(tools)]
    offered = _changed([tool for tool in offered if tool], body)
    fields: Json = {"tools": offered} if offered else {}
    choice = optional(an_object, body, "tool_choice")
    return fields if choice is None else fields | _choice(choice, offers=bool(fields))


def _function(value: Any, path: str, *, ignore_hosted: bool) -> Json:
    """Return one tool as a chat function; an empty object if it is ignored."""
    tool = an_object(value, path)
    kind = optional(a_text, tool, "type", path)
    if kind not in (None, "custom"):
        if ignore_hosted:
            return {}
        shown = tool.get("name") or tool.get("mcp_server_name") or kind
        raise refusal(
            path,
            f"tool {str(shown)[:64]!r} ({str(kind)[:64]}) is not supported, only custom tools are; offer it with a name and an "
            "input_schema",
        )
    name, description = required(a_text, tool, "name", path), optional(a_text, tool, "description", path)
    schema = required(an_object, tool, "input_schema", path)
    parameters = schema if "type" in schema else {**schema, "type": "object"}  # as vLLM 0.32 completes it
    flags = {field: optional(a_flag, tool, field, path) for field in ("strict", "defer_loading")}
    function = {"name": name, "description": description, "parameters": parameters, **flags}
    return _as_function({field: value for field, value in function.items() if value is not None})


def _as_function(function: Json) -> Json:
    return {"type": "function", "function": function}


def _changed(offered: list[Json], body: Mapping[str, Any]) -> list[Json]:
    """Return the tools available at the end of the conversation: templates receive one list.

    Blocks of system messages add and remove tools. As in vLLM 0.32 (entrypoints/anthropic/serving.py:717), a tool that is
    added by its name is no longer deferred.
    """
    changes = list(_changes(body))
    if not changes:
        return offered
    tools = {tool["function"]["name"]: tool for tool in offered}
    removed: set[str] = set()
    for block, path in changes:
        change = an_object(block.get("tool"), path)
        if one_of(change.get("type"), f"{path}.type", ("tool_reference", "tool_definition")) == "tool_definition":
            tool = _function(change.get("definition"), f"{path}.definition", ignore_hosted=False)
            name = tool["function"]["name"]
            tools[name] = tool
        else:
            name = a_text(change.get("name"), f"{path}.name")
            if name not in tools:
                raise refusal(f"{path}.name", f"{name[:64]!r} is not one of the tools of the request")
            if block["type"] == "tool_addition":
                function = tools[name]["function"]
                tools[name] = _as_function({field: function[field] for field in function if field != "defer_loading"})
        (removed.add if block["type"] == "tool_removal" else removed.discard)(name)
    return [tool for name, tool in tools.items() if name not in removed]


def _changes(body: Mapping[str, Any]) -> Iterator[tuple[Json, str]]:
    """Yield the blocks that add or remove tools, each with the path of its tool; the turns are already validated."""
    for n, message in enumerate(body.get("messages") or ()):
        content = message["content"] if message["role"] == "system" else None
        for number, block in enumerate(content if isinstance(content, list) else ()):
            if block["type"] in TOOL_CHANGES:
                yield block, f"messages.{n}.content.{number}.tool"


def _choice(choice: Json, *, offers: bool) -> Json:
    """Return the fields of the tool choice; without tools, defaults are omitted, since vLLM 0.32 refuses them."""
    kind = one_of(choice.get("type"), "tool_choice.type", _CHOICES)
    fields: Json = {}
    if kind == "tool":
        fields["tool_choice"] = _as_function({"name": required(a_text, choice, "name", "tool_choice")})
    elif offers or kind == "any":
        fields["tool_choice"] = _CHOICES[kind]
    if optional(a_flag, choice, "disable_parallel_tool_use", "tool_choice") and offers:
        fields["parallel_tool_calls"] = False
    return fields
