"""A Responses request, read as a chat call.

Fields without an equivalent in chat are not sent; they are recorded with the client's body.
"""

from collections.abc import Mapping
from itertools import takewhile
from typing import Any, Final

from proxy.errors import BadRequest
from proxy.protocols.dialects.base import NO_REFERENCES, Json, ResolvedReferences, TranslationOptions
from proxy.protocols.dialects.chat_format import CONTINUES, add_configured, passed_fields, schema_format
from proxy.protocols.dialects.responses.input_items import is_unfinished, read_items
from proxy.protocols.dialects.responses.tools import choose, read_tools
from proxy.protocols.dialects.validation import (
    a_count,
    a_flag,
    a_number,
    a_text,
    an_object,
    optional,
    required,
    texts,
    unknown,
)

# Values of `include` that request them.
LOGPROBS: Final = "message.output_text.logprobs"
ENCRYPTED: Final = "reasoning.encrypted_content"

# Sampling fields with another name or another form here.
TRANSLATED: Final = frozenset({"n", "max_tokens", "max_completion_tokens", "response_format", "tool_choice"})
_TEMPLATE: Final = "chat_template_kwargs"


def read(body: Mapping[str, Any], options: TranslationOptions, resolved: ResolvedReferences = NO_REFERENCES) -> Json:
    """Return the chat body.

    Raises:
        InvalidValue: A value has a wrong type.
        BadRequest: A feature is not supported.
    """
    _refuse(body)
    tools = read_tools(body, ignore_hosted=options.ignore_hosted_tools)
    chat: Json = {"messages": _messages(body, options, resolved)}
    if (model := optional(a_text, body, "model")) is not None:
        chat["model"] = model
    for name in ("temperature", "top_p"):
        optional(a_number, body, name)
    chat |= passed_fields(body, TRANSLATED)
    if (bound := optional(a_count, body, "max_output_tokens")) is not None:
        chat["max_tokens"] = bound
    if optional(a_flag, body, "stream"):
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    if is_unfinished(body.get("input"), chat["messages"], options.thought):
        chat |= CONTINUES
    chat |= choose(body, tools, ignore_hosted=options.ignore_hosted_tools)
    chat |= _logprobs(body) | _format(body)
    _set_reasoning(chat, body, options)
    return chat


def included(body: Mapping[str, Any]) -> frozenset[str]:
    """Return the values of `include`."""
    return frozenset(optional(texts, body, "include") or ())


def _refuse(body: Mapping[str, Any]) -> None:
    """Refuse unsupported features, and wrong types of fields that are not sent."""
    if optional(a_flag, body, "background"):
        raise BadRequest(
            "`background` is not supported: the response is returned by the call; remove it", param="background"
        )
    if body.get("conversation") is not None:
        raise BadRequest(
            "`conversation` is not supported: set `previous_response_id`, or send the items of the previous response",
            param="conversation",
        )
    if body.get("prompt") is not None:
        raise BadRequest(
            "`prompt` is not supported: OpenAI stores these templates; send `instructions` and `input` instead",
            param="prompt",
        )
    texts(list((optional(an_object, body, "metadata") or {}).values()), "metadata")
    for name in ("previous_response_id", "prompt_cache_key", "safety_identifier", "user"):
        optional(a_text, body, name)
    optional(a_flag, body, "store")
    optional(a_count, body, "max_tool_calls")
    truncation = optional(a_text, body, "truncation")
    if truncation not in {None, "auto", "disabled"}:
        raise unknown("truncation", str(truncation), "use auto or disabled")


def _messages(body: Mapping[str, Any], options: TranslationOptions, resolved: ResolvedReferences) -> list[Json]:
    """Return the instructions, the messages of earlier turns, and the messages from `input`.

    Engines that accept developer messages in chat receive them unchanged: if the template does not know them, vLLM 0.32 merges
    all developer and system messages into one (renderers/hf.py:531). For other engines, developer messages become system
    messages, and all at the beginning are merged: many templates accept only one, and only there.
    """
    instructions = optional(a_text, body, "instructions")
    first = [{"role": "system", "content": instructions}] if instructions else []
    messages = [*first, *resolved.messages, *read_items(body.get("input"), options, resolved)]
    if options.has_developers:
        return messages
    messages = [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]
    leading = list(takewhile(lambda it: it["role"] == "system" and _texts(it["content"]) is not None, messages))
    if len(leading) < 2:
        return messages
    joined = "\n\n".join(text for message in leading for text in _texts(message["content"]) or ())
    return [{"role": "system", "content": joined}, *messages[len(leading) :]]


def _texts(content: str | list[Json]) -> list[str] | None:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [part["text"] for part in parts] if all(part["type"] == "text" for part in parts) else None


def _logprobs(body: Mapping[str, Any]) -> Json:
    """Return the fields of logprobs: `include` requests them, `top_logprobs` is the number of alternatives."""
    count = optional(a_count, body, "top_logprobs")
    return {"logprobs": True, "top_logprobs": count or 0} if LOGPROBS in included(body) else {}


def _format(body: Mapping[str, Any]) -> Json:
    """Return `response_format` of `text.format`; chat nests the schema one level deeper."""
    text_format = optional(an_object, optional(an_object, body, "text") or {}, "format", "text")
    if text_format is None:
        return {}
    path = "text.format"
    kind = required(a_text, text_format, "type", path)
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"response_format": {"type": kind}}
    if kind != "json_schema":
        raise unknown(f"{path}.type", kind, "use text, json_object or json_schema")
    fields = {
        "name": required(a_text, text_format, "name", path),
        "description": optional(a_text, text_format, "description", path),
        "schema": required(an_object, text_format, "schema", path),
        "strict": optional(a_flag, text_format, "strict", path),
    }
    return schema_format({name: value for name, value in fields.items() if value is not None})


def _set_reasoning(chat: Json, body: Mapping[str, Any], options: TranslationOptions) -> None:
    """Set the fields of reasoning: the client's effort, and the configured fields; the client's template fields win."""
    if (template := optional(an_object, body, _TEMPLATE)) is not None:
        chat[_TEMPLATE] = template
    reasoning = optional(an_object, body, "reasoning") or {}
    optional(a_text, reasoning, "summary", "reasoning")
    effort = optional(a_text, reasoning, "effort", "reasoning")
    if effort is not None:
        # Engines accept the same values (vLLM 0.32.0: chat_completion/protocol.py:252; SGLang: openai/protocol.py).
        configured = options.not_thinking if effort == "none" else options.thinking
        add_configured(chat, {"reasoning_effort": effort, **configured})
