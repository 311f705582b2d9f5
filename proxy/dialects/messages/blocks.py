"""Blocks of content that a user sends, as parts of a chat message.

Holds what each type of block says: text, images, documents of text, search results, results of tools. What chat cannot say is
refused by its type; `cache_control` and `citations` change nothing that a model sees, and are not read.

Parts stay parts: a template that takes strings gets them joined by line breaks, one that takes parts gets them as they
are, and which of them it is only the engine knows (vLLM 0.32: renderers/chat_utils.py:1883).
"""

from collections.abc import Iterator
from typing import Any

from proxy.dialects.messages.checked import a_flag, a_list, a_text, an_object, one_of, refusal
from proxy.dialects.translated import Json


def blocks_of(content: Any, at: str) -> list[tuple[str, Json]]:
    """The blocks of a message's content, each with its place. A string is one block of text."""
    if isinstance(content, str):
        return [(at, {"type": "text", "text": content})]
    return [(f"{at}.{n}", an_object(block, f"{at}.{n}")) for n, block in enumerate(a_list(content, at))]


def parts_of(block: Json, at: str) -> list[Json]:
    """The parts of a chat message that say what this block says."""
    kind = a_text(block.get("type"), f"{at}.type")
    if kind == "text":
        return [_text(a_text(block.get("text"), f"{at}.text"))]
    if kind == "image":
        return [_image(an_object(block.get("source"), f"{at}.source"), f"{at}.source")]
    if kind == "document":
        return _document(block, at)
    if kind == "search_result":
        return _titled(block, ("title", "source"), _all_parts(block.get("content"), f"{at}.content"), at)
    raise refusal(f"{at}.type", f"blocks of type {kind[:64]!r} cannot be said by way of chat")


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
    """The content of a chat message of these parts: one text is a string."""
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
        raise refusal(f"{at}.source", f"documents of {kind[:64]!r} cannot be said by way of chat; send their text")
    return _titled(block, ("title", "context"), parts, at)


def _titled(block: Json, names: tuple[str, ...], parts: list[Json], at: str) -> list[Json]:
    """Parts, after what the block says of them."""
    return [*_heads(block, names, at), *parts]


def _heads(block: Json, names: tuple[str, ...], at: str) -> Iterator[Json]:
    for name in names:
        if block.get(name) is not None:
            yield _text(a_text(block[name], f"{at}.{name}"))
