"""A Messages request, read as a chat call: its conversation, its tools and its options.

`system` and `messages` are translated as in vLLM 0.32's own endpoint (entrypoints/anthropic/serving.py:352-594), so the prompt
is the same. Fields without an equivalent in chat (`metadata`, `context_management`, …) are recorded with the client's body, and
not sent.
"""

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, Final

from proxy.protocols.dialects.base import NO_REFERENCES, Json, ResolvedReferences, TranslationOptions
from proxy.protocols.dialects.translation import (
    SampledCalls,
    a_count,
    a_flag,
    a_list,
    a_number,
    a_text,
    add_configured,
    an_object,
    chat_call,
    chat_content,
    chat_function,
    continue_last,
    one_of,
    optional,
    passed_fields,
    refusal,
    required,
    schema_format,
    text_part,
)

Blocks = list[tuple[str, Json]]  # with their paths

# Claude Code's first block of `system` contains a hash of the request, which would make every prompt different. vLLM's own
# Messages endpoint removes it as well (entrypoints/anthropic/serving.py:371).
_ATTRIBUTION: Final = "x-anthropic-billing-header"
_ROLES: Final = ("user", "assistant", "system")
TOOL_CHANGES: Final = ("tool_addition", "tool_removal")  # blocks of system messages, from which `tools_from` reads them


def blocks_from(content: Any, path: str) -> Blocks:
    """Return the blocks of a message's content, each with its path. A string is one text block."""
    if isinstance(content, str):
        return [(path, text_part(content))]
    return [(f"{path}.{n}", an_object(block, f"{path}.{n}")) for n, block in enumerate(a_list(content, path))]


def parts_from(block: Json, path: str) -> list[Json]:
    """Return the chat message parts of this block."""
    kind = required(a_text, block, "type", path)
    if kind == "text":
        return [text_part(required(a_text, block, "text", path))]
    if kind == "image":
        return [_image(required(an_object, block, "source", path), f"{path}.source")]
    if kind == "document":
        return _document(block, path)
    if kind == "search_result":
        parts = _all_parts(block.get("content"), f"{path}.content")
        return [*_headings(block, ("title", "source"), path), *parts]
    raise refusal(f"{path}.type", f"blocks of type {kind[:64]!r} cannot be translated to chat")


def tool_result_messages(block: Json, path: str) -> list[Json]:
    """Return the chat messages of a tool result, as in vLLM 0.32's endpoint (entrypoints/anthropic/serving.py:538).

    A tool message with its texts; then a user message with its images, and a tool message with its references to tools, if
    it has any. `is_error` has no equivalent in chat.
    """
    parts = [] if block.get("content") is None else _result_parts(block["content"], f"{path}.content")
    optional(a_flag, block, "is_error", path)
    message: Json = {"role": "tool", "tool_call_id": required(a_text, block, "tool_use_id", path)}
    references = [part for part in parts if part["type"] == "tool_reference"]
    images = [part for part in parts if part["type"] == "image_url"]
    messages = [{**message, "content": "\n".join(part["text"] for part in parts if part["type"] == "text")}]
    messages += [{"role": "user", "content": images}] if images else []
    return messages + ([{**message, "content": references}] if references else [])


def _result_parts(content: Any, path: str) -> list[Json]:
    parts: list[Json] = []
    for block_path, block in blocks_from(content, path):
        if block.get("type") == "tool_reference":
            parts.append({"type": "tool_reference", "name": required(a_text, block, "tool_name", block_path)})
        else:
            parts += parts_from(block, block_path)
    return parts


def _all_parts(content: Any, path: str) -> list[Json]:
    return [part for block_path, block in blocks_from(content, path) for part in parts_from(block, block_path)]


def _image(source: Json, path: str) -> Json:
    if one_of(source.get("type"), f"{path}.type", ("base64", "url")) == "url":
        url = required(a_text, source, "url", path)
    else:
        kind, data = (required(a_text, source, name, path) for name in ("media_type", "data"))
        url = f"data:{kind};base64,{data}"
    return {"type": "image_url", "image_url": {"url": url}}


def _document(block: Json, path: str) -> list[Json]:
    """Return the parts of a text document; other documents are refused: engines read no PDF and store no files."""
    source, source_path = required(an_object, block, "source", path), f"{path}.source"
    kind = required(a_text, source, "type", source_path)
    if kind == "text":
        parts = [text_part(required(a_text, source, "data", source_path))]
    elif kind == "content":
        parts = _all_parts(source.get("content"), f"{source_path}.content")
    else:
        raise refusal(source_path, f"documents of {kind[:64]!r} cannot be translated to chat; send their text")
    return [*_headings(block, ("title", "context"), path), *parts]


def _headings(block: Json, names: tuple[str, ...], path: str) -> Iterator[Json]:
    for name in names:
        if (text := optional(a_text, block, name, path)) is not None:
            yield text_part(text)


def read_conversation(
    body: Mapping[str, Any], options: TranslationOptions, sampled: Mapping[str, Mapping[str, Any]]
) -> list[Json]:
    """Return the chat messages of a body. `sampled` are the functions of earlier calls by id.

    If the engine's template accepts system messages only at the beginning, they are merged into one there.
    """
    messages = [
        *_first(body.get("system"), options.system_joint),
        *_turns(body.get("messages"), options, SampledCalls(sampled)),
    ]
    systems = [message["content"] for message in messages if message["role"] == "system"]
    if not options.merges_systems or not systems:
        return messages
    merged = {"role": "system", "content": options.system_joint.join(systems)}
    return [merged, *(message for message in messages if message["role"] != "system")]


def _first(system: Any, joint: str) -> list[Json]:
    """Return the system message of the field `system`, if present. A string is used unchanged."""
    if system is None or system == "":
        return []
    if isinstance(system, str):
        return [{"role": "system", "content": system}]
    return _system(blocks_from(system, "system"), joint)


def _turns(entries: Any, options: TranslationOptions, sampled: SampledCalls) -> list[Json]:
    if not a_list(entries, "messages"):
        raise refusal("messages", "must have at least one entry")
    messages: list[Json] = []
    for n, item in enumerate(entries):
        turn = an_object(item, f"messages.{n}")
        role = one_of(turn.get("role"), f"messages.{n}.role", _ROLES)
        blocks = blocks_from(turn.get("content"), f"messages.{n}.content")
        if role == "assistant":
            messages.append(_reply(blocks, options.thought, sampled))
        elif role == "system":
            messages += _system(blocks, options.system_joint)
        else:
            messages += _user(blocks, is_string=isinstance(turn["content"], str))
    return messages


def _system(blocks: Blocks, joint: str) -> list[Json]:
    texts = []
    for path, block in blocks:
        if one_of(block.get("type"), f"{path}.type", ("text", *TOOL_CHANGES)) == "text":
            texts.append(required(a_text, block, "text", path))
    texts = [text for text in texts if text and not text.startswith(_ATTRIBUTION)]
    return [{"role": "system", "content": joint.join(texts)}] if texts else []


def _user(blocks: Blocks, *, is_string: bool) -> list[Json]:
    """Return the messages of a user turn: tool results first, then its other content, if it has any."""
    messages: list[Json] = []
    parts: list[Json] = []
    for path, block in blocks:
        if block.get("type") == "tool_result":
            messages += tool_result_messages(block, path)
        else:
            parts += parts_from(block, path)
    parts = parts if is_string else [part for part in parts if part.get("text") != ""]
    return [*messages, {"role": "user", "content": chat_content(parts)}] if parts else messages


def _reply(blocks: Blocks, thought: str, sampled: SampledCalls) -> Json:
    """Return the message of an assistant turn. Without a text block, its content is null, as engines return it."""
    thoughts: list[str] = []
    calls: list[Json] = []
    for path, block in blocks:
        kind = required(a_text, block, "type", path)
        if kind == "thinking":
            thoughts.append(required(a_text, block, "thinking", path))
        elif kind == "tool_use":
            calls.append(_call(block, path, sampled))
        elif kind not in {"text", "redacted_thinking"}:  # the latter is opaque, and never rendered here
            raise refusal(
                f"{path}.type", f"blocks of type {kind[:64]!r} cannot be translated to chat in an assistant turn"
            )
    message: Json = {"role": "assistant", "content": _assistant_content(blocks)}
    if thoughts:
        message[thought] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _assistant_content(blocks: Blocks) -> str | list[Json] | None:
    """Return the content of an assistant turn.

    Adjacent texts are parts. Texts separated by a call or by reasoning are joined without a separator: chat has one content,
    so they were sampled as one text, and a separator would be text that was never sampled.
    """
    found = False
    parts: list[list[str]] = []  # the pieces of each
    for is_text, run in groupby(blocks, lambda entry: entry[1]["type"] == "text"):
        if not is_text:
            continue
        texts = [required(a_text, block, "text", path) for path, block in run]
        found, texts = True, [text for text in texts if text]
        if parts and texts:
            parts[-1].append(texts[0])
            texts = texts[1:]
        parts += [[text] for text in texts]
    if not parts:
        return "" if found else None
    return chat_content([text_part("".join(pieces)) for pieces in parts])


def _call(block: Json, path: str, sampled: SampledCalls) -> Json:
    name, call_id = (required(a_text, block, field, path) for field in ("name", "id"))
    tool_input = required(an_object, block, "input", path)
    return chat_call(call_id, name, sampled.restored(tool_input, name, call_id, f"{path}.input"))


def tool_call_ids(body: Mapping[str, Any]) -> frozenset[str]:
    """Return the ids of the calls in a body's assistant turns, by which sampled texts are looked up."""
    found = set()
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for block in content if isinstance(content, list) else ():
            if isinstance(block, dict) and block.get("type") == "tool_use" and isinstance(block.get("id"), str):
                found.add(block["id"])
    return frozenset(found)


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
    return chat_function(name, description=description, parameters=parameters, **flags)


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
                tools[name] = chat_function(**{**tools[name]["function"], "defer_loading": None})
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
        fields["tool_choice"] = chat_function(required(a_text, choice, "name", "tool_choice"))
    elif offers or kind == "any":
        fields["tool_choice"] = _CHOICES[kind]
    if optional(a_flag, choice, "disable_parallel_tool_use", "tool_choice") and offers:
        fields["parallel_tool_calls"] = False
    return fields
