"""Messages of a step in the form of OpenTelemetry's GenAI conventions: roles, and parts with a type.

The values are JSON strings. Their size is limited: the newest messages are kept, and long texts are cut.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

import orjson

from proxy.trajectory.json_bytes import size_of, to_json_bytes
from proxy.trajectory.step import Step, answers_of, messages_of

MAX_TEXT: Final = 16_384  # characters of one text
MAX_BYTES: Final = 65_536  # of the messages of one attribute
_MAX_PARTS: Final = 256
_MAX_TOOLS: Final = 16 * MAX_BYTES  # with the weight of their values: more are certainly too large
_MAX_URI: Final = 256  # an image as a data URL is longer
_CUT: Final = "…"


def clean(text: str, limit: int = MAX_TEXT) -> str:
    """Return a text that protobuf can encode, of at most `limit` characters."""
    whole = text if len(text) <= limit else text[: limit - 1] + _CUT
    return whole if whole.isascii() else whole.encode("utf-8", "replace").decode()


def input_messages(step: Step) -> tuple[str | None, int]:
    """Return the messages or the prompt as they were sent, and the number of older messages that are omitted."""
    if step.is_chat:
        return _newest([message for message in messages_of(step) if isinstance(message, dict)])
    prompts = step.body.get("prompt")
    texts = prompts if isinstance(prompts, list) else [prompts]
    return _newest([{"role": "user", "content": text} for text in texts if isinstance(text, str)])


def output_messages(step: Step) -> str | None:
    """Return a message for each choice of the response."""
    if not isinstance(step.response, dict):
        return None
    choices = islice(answers_of(step).values(), _MAX_PARTS)
    messages = [_message(_answer(choice), "assistant") for choice in choices]
    return _json(messages) if messages else None


def tool_definitions(step: Step) -> str | None:
    """Return the definitions of the tools; None if there are none, or if they are too large."""
    tools = step.body.get("tools")
    if size_of([tools], _MAX_TOOLS) > _MAX_TOOLS:
        return None
    found = [_tool(tool) for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    text = _json(found) if found else None
    return text if text is not None and len(text) <= MAX_BYTES else None


def _newest(messages: list[dict[str, Any]]) -> tuple[str | None, int]:
    """Return the newest messages that fit, at least one, in their order."""
    kept: list[bytes] = []
    size = 0
    for message in reversed(messages):
        encoded = _encoded(_message(message, "user"))
        size += len(encoded)
        if kept and size > MAX_BYTES:
            break
        kept.append(encoded)
    if not kept:
        return None, 0
    return (b"[" + b",".join(reversed(kept)) + b"]").decode(), len(messages) - len(kept)


def _answer(choice: Mapping[str, Any]) -> dict[str, Any]:
    message = choice.get("message")
    return message if isinstance(message, dict) else {"content": choice.get("text")}


def _message(message: Mapping[str, Any], role: str) -> dict[str, Any]:
    given = message.get("role")
    return {
        "role": clean(given, 64) if isinstance(given, str) else role,
        "parts": list(_limited(_parts(message))),
    }


def _limited(parts: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield parts until their texts have the maximum size."""
    left = MAX_BYTES
    for part in islice(parts, _MAX_PARTS):
        left -= len(_encoded(part))
        if left < 0:
            return
        yield part


def _parts(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the reasoning, the content and the tool calls of a message."""
    for name in ("reasoning_content", "reasoning"):
        if isinstance(message.get(name), str) and message[name]:
            yield {"type": "reasoning", "content": clean(message[name])}
            break
    content = message.get("content")
    if message.get("role") == "tool":
        response = clean(content) if isinstance(content, str) else list(_content(content))
        yield {"type": "tool_call_response", "id": _name(message.get("tool_call_id")), "response": response}
    else:
        yield from _content(content)
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict) and isinstance(function := call.get("function"), dict):
            yield {
                "type": "tool_call",
                "id": _name(call.get("id")),
                "name": _name(function.get("name")) or "",
                "arguments": _arguments(function.get("arguments")),
            }


def _content(content: Any) -> Iterator[dict[str, Any]]:
    """Yield the parts of a content: a text, or a list of texts and images."""
    if isinstance(content, str) and content:
        yield {"type": "text", "content": clean(content)}
    for item in content if isinstance(content, list) else ():
        if not isinstance(item, dict):
            continue
        if isinstance(item.get("text"), str):
            yield {"type": "text", "content": clean(item["text"])}
        elif isinstance(image := item.get("image_url"), dict) and isinstance(image.get("url"), str):
            yield {"type": "uri", "modality": "image", "uri": clean(image["url"], _MAX_URI)}


def _arguments(arguments: Any) -> Any:
    """Return the arguments of a tool call as JSON, or as text if they are none or long."""
    if not isinstance(arguments, str):
        return arguments if isinstance(arguments, dict) else None
    if len(arguments) <= MAX_TEXT:
        try:
            return orjson.loads(arguments)
        except (orjson.JSONDecodeError, UnicodeEncodeError):
            pass
    return clean(arguments)


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    definition = function if isinstance(function, dict) else tool
    fields = {name: definition[name] for name in ("description", "parameters") if definition.get(name) is not None}
    return {"type": _name(tool.get("type")) or "function", "name": _name(definition.get("name")) or "", **fields}


def _name(value: Any) -> str | None:
    return clean(value, 1024) if isinstance(value, str) else None


def _json(value: Any) -> str:
    return _encoded(value).decode()


def _encoded(value: Any) -> bytes:
    """Return JSON; a placeholder for values that JSON cannot represent."""
    try:
        return to_json_bytes(value)
    except (TypeError, RecursionError):
        return b'{"type":"text","content":"(not valid JSON)"}'
