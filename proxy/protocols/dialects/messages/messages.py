"""Translation of `system` and `messages` to chat messages.

They are translated as in vLLM 0.32's own endpoint (entrypoints/anthropic/serving.py:352-594), so the prompt is the same.
"""

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, Final

from proxy.protocols.dialects.base import Json, TranslationOptions
from proxy.protocols.dialects.chat_format import chat_call, chat_content
from proxy.protocols.dialects.tool_arguments import SampledCalls
from proxy.protocols.dialects.validation import a_flag, a_list, a_text, an_object, one_of, optional, refusal, required

Blocks = list[tuple[str, Json]]  # with their paths

# Claude Code's first block of `system` contains a hash of the request, which would make every prompt different. vLLM's own
# Messages endpoint removes it as well (entrypoints/anthropic/serving.py:371).
_ATTRIBUTION: Final = "x-anthropic-billing-header"
_ROLES: Final = ("user", "assistant", "system")
TOOL_CHANGES: Final = ("tool_addition", "tool_removal")  # blocks of system messages; `request` reads them


def blocks_from(content: Any, path: str) -> Blocks:
    """Return the blocks of a message's content, each with its path. A string is one text block."""
    if isinstance(content, str):
        return [(path, {"type": "text", "text": content})]
    return [(f"{path}.{n}", an_object(block, f"{path}.{n}")) for n, block in enumerate(a_list(content, path))]


def parts_from(block: Json, path: str) -> list[Json]:
    """Return the chat message parts of this block."""
    kind = required(a_text, block, "type", path)
    if kind == "text":
        return [_text(required(a_text, block, "text", path))]
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


def _text(text: str) -> Json:
    return {"type": "text", "text": text}


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
        parts = [_text(required(a_text, source, "data", source_path))]
    elif kind == "content":
        parts = _all_parts(source.get("content"), f"{source_path}.content")
    else:
        raise refusal(source_path, f"documents of {kind[:64]!r} cannot be translated to chat; send their text")
    return [*_headings(block, ("title", "context"), path), *parts]


def _headings(block: Json, names: tuple[str, ...], path: str) -> Iterator[Json]:
    for name in names:
        if (text := optional(a_text, block, name, path)) is not None:
            yield _text(text)


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
    return chat_content([{"type": "text", "text": "".join(pieces)} for pieces in parts])


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
