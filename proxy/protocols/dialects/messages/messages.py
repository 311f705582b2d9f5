"""The turns of a conversation, as chat messages.

`system` and `messages` are read as in vLLM 0.32's own endpoint (entrypoints/anthropic/serving.py:352-594), so the prompt is
the one that the engine itself would make.
"""

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, Final

from proxy.protocols.dialects.messages.tool_arguments import restored
from proxy.protocols.dialects.translation import Json, TranslationOptions
from proxy.protocols.dialects.validation import a_flag, a_list, a_text, an_object, one_of, refusal


def blocks_of(content: Any, at: str) -> list[tuple[str, Json]]:
    """Return the blocks of a message's content, each with its path. A string is one text block."""
    if isinstance(content, str):
        return [(at, {"type": "text", "text": content})]
    return [(f"{at}.{n}", an_object(block, f"{at}.{n}")) for n, block in enumerate(a_list(content, at))]


def parts_of(block: Json, at: str) -> list[Json]:
    """Return the chat message parts of this block."""
    kind = a_text(block.get("type"), f"{at}.type")
    if kind == "text":
        return [_text(a_text(block.get("text"), f"{at}.text"))]
    if kind == "image":
        return [_image(an_object(block.get("source"), f"{at}.source"), f"{at}.source")]
    if kind == "document":
        return _document(block, at)
    if kind == "search_result":
        return _titled(block, ("title", "source"), _all_parts(block.get("content"), f"{at}.content"), at)
    raise refusal(f"{at}.type", f"blocks of type {kind[:64]!r} cannot be translated to chat")


def result_of(block: Json, at: str) -> list[Json]:
    """The chat messages of a tool's result, as vLLM 0.32's endpoint has them (entrypoints/anthropic/serving.py:538).

    A tool message of its texts; then a user's message of its images, and a tool message of its references to tools, if it has
    any. `is_error` has no place in chat.
    """
    parts = [] if block.get("content") is None else _result_parts(block["content"], f"{at}.content")
    if block.get("is_error") is not None:
        a_flag(block["is_error"], f"{at}.is_error")
    message: Json = {"role": "tool", "tool_call_id": a_text(block.get("tool_use_id"), f"{at}.tool_use_id")}
    references = [part for part in parts if part["type"] == "tool_reference"]
    images = [part for part in parts if part["type"] == "image_url"]
    messages = [{**message, "content": "\n".join(part["text"] for part in parts if part["type"] == "text")}]
    messages += [{"role": "user", "content": images}] if images else []
    return messages + ([{**message, "content": references}] if references else [])


def said_in(parts: list[Json]) -> str | list[Json]:
    """Return chat content with these parts: a single text is a string."""
    text: str | list[Json] = parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts
    return text


def _result_parts(content: Any, at: str) -> list[Json]:
    parts: list[Json] = []
    for place, block in blocks_of(content, at):
        if block.get("type") == "tool_reference":
            parts.append({"type": "tool_reference", "name": a_text(block.get("tool_name"), f"{place}.tool_name")})
        else:
            parts += parts_of(block, place)
    return parts


def _all_parts(content: Any, at: str) -> list[Json]:
    return [part for place, block in blocks_of(content, at) for part in parts_of(block, place)]


def _text(text: str) -> Json:
    return {"type": "text", "text": text}


def _image(source: Json, at: str) -> Json:
    if one_of(source.get("type"), f"{at}.type", ("base64", "url")) == "url":
        url = a_text(source.get("url"), f"{at}.url")
    else:
        kind, data = a_text(source.get("media_type"), f"{at}.media_type"), a_text(source.get("data"), f"{at}.data")
        url = f"data:{kind};base64,{data}"
    return {"type": "image_url", "image_url": {"url": url}}


def _document(block: Json, at: str) -> list[Json]:
    """A document, if it is of text: engines read no PDF, and have no files."""
    source = an_object(block.get("source"), f"{at}.source")
    kind = a_text(source.get("type"), f"{at}.source.type")
    if kind == "text":
        parts = [_text(a_text(source.get("data"), f"{at}.source.data"))]
    elif kind == "content":
        parts = _all_parts(source.get("content"), f"{at}.source.content")
    else:
        raise refusal(f"{at}.source", f"documents of {kind[:64]!r} cannot be translated to chat; send their text")
    return _titled(block, ("title", "context"), parts, at)


def _titled(block: Json, names: tuple[str, ...], parts: list[Json], at: str) -> list[Json]:
    """Parts, after what the block says of them."""
    return [*_heads(block, names, at), *parts]


def _heads(block: Json, names: tuple[str, ...], at: str) -> Iterator[Json]:
    for name in names:
        if block.get(name) is not None:
            yield _text(a_text(block[name], f"{at}.{name}"))


Blocks = list[tuple[str, Json]]

# Claude Code's first block of `system`, with a hash of each request: read as text it would end every prefix there. vLLM's own
# Messages endpoint leaves it out as well (entrypoints/anthropic/serving.py:371).
_ATTRIBUTION: Final = "x-anthropic-billing-header"
_ROLES: Final = ("user", "assistant", "system")
TOOL_CHANGES: Final = ("tool_addition", "tool_removal")  # blocks of systems; what they change is read with the tools


def conversation_of(body: Mapping[str, Any], options: TranslationOptions, sampled: Mapping[str, Json]) -> list[Json]:
    """The chat messages of a body. `sampled` are calls of earlier replies, by the id they were told by.

    Where the engine's template takes systems at the beginning alone, all of them are one message there.
    """
    messages = [*_first(body.get("system"), options.system_joint), *_turns(body.get("messages"), options, sampled)]
    systems = [message["content"] for message in messages if message["role"] == "system"]
    if not options.merges_systems or not systems:
        return messages
    merged = {"role": "system", "content": options.system_joint.join(systems)}
    return [merged, *(message for message in messages if message["role"] != "system")]


def _first(given: Any, joint: str) -> list[Json]:
    """The system message, if there is one. A string is said as it stands."""
    if given is None or given == "":
        return []
    if isinstance(given, str):
        return [{"role": "system", "content": given}]
    return _system(blocks_of(given, "system"), joint)


def _turns(given: Any, options: TranslationOptions, sampled: Mapping[str, Json]) -> list[Json]:
    if not a_list(given, "messages"):
        raise refusal("messages", "must have at least one entry")
    messages: list[Json] = []
    for n, item in enumerate(given):
        turn = an_object(item, f"messages.{n}")
        role = one_of(turn.get("role"), f"messages.{n}.role", _ROLES)
        blocks = blocks_of(turn.get("content"), f"messages.{n}.content")
        if role == "assistant":
            messages.append(_reply(blocks, options.thought, sampled))
        elif role == "system":
            messages += _system(blocks, options.system_joint)
        else:
            messages += _user(blocks, is_string=isinstance(turn["content"], str))
    return messages


def _system(blocks: Blocks, joint: str) -> list[Json]:
    texts = []
    for at, block in blocks:
        if one_of(block.get("type"), f"{at}.type", ("text", *TOOL_CHANGES)) == "text":
            texts.append(a_text(block.get("text"), f"{at}.text"))
    said = [text for text in texts if text and not text.startswith(_ATTRIBUTION)]
    return [{"role": "system", "content": joint.join(said)}] if said else []


def _user(blocks: Blocks, *, is_string: bool) -> list[Json]:
    """A user's turn: results of tools are messages of their own, before what else it says. Nothing at all is no message."""
    messages: list[Json] = []
    parts: list[Json] = []
    for at, block in blocks:
        if block.get("type") == "tool_result":
            messages += result_of(block, at)
        else:
            parts += parts_of(block, at)
    said = parts if is_string else [part for part in parts if part.get("text") != ""]
    return [*messages, {"role": "user", "content": said_in(said)}] if said else messages


def _reply(blocks: Blocks, thought: str, sampled: Mapping[str, Json]) -> Json:
    """A reply that came back. No text at all is null, as engines have it; an empty text is empty."""
    thoughts: list[str] = []
    calls: list[Json] = []
    for at, block in blocks:
        kind = a_text(block.get("type"), f"{at}.type")
        if kind == "thinking":
            thoughts.append(a_text(block.get("thinking"), f"{at}.thinking"))
        elif kind == "tool_use":
            calls.append(_call(block, at, sampled))
        elif kind not in {"text", "redacted_thinking"}:  # the latter is opaque, and none of ours
            raise refusal(
                f"{at}.type", f"blocks of type {kind[:64]!r} cannot be translated to chat in an assistant turn"
            )
    message: Json = {"role": "assistant", "content": _said(blocks)}
    if thoughts:
        message[thought] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _said(blocks: Blocks) -> str | list[Json] | None:
    """The content of a reply.

    Texts that follow one another are parts. Text around a call or a thought is one text: chat has one content, so it was
    sampled as one, which a stream had to tell in pieces; any other joint would be text that was never sampled.
    """
    found = False
    parts: list[str] = []
    for is_text, run in groupby(blocks, lambda entry: entry[1]["type"] == "text"):
        if not is_text:
            continue
        texts = [a_text(block.get("text"), f"{at}.text") for at, block in run]
        found, texts = True, [text for text in texts if text]
        if parts and texts:
            parts[-1] += texts.pop(0)
        parts += texts
    if not parts:
        return "" if found else None
    return said_in([{"type": "text", "text": text} for text in parts])


def _call(block: Json, at: str, sampled: Mapping[str, Json]) -> Json:
    name, told = a_text(block.get("name"), f"{at}.name"), a_text(block.get("id"), f"{at}.id")
    given = an_object(block.get("input"), f"{at}.input")
    arguments = restored(given, name, sampled.get(told), f"{at}.input")
    return {"id": told, "type": "function", "function": {"name": name, "arguments": arguments}}
