"""A Responses request, read as a chat call.

Fields without an equivalent in chat are not sent; they are recorded with the client's body.
"""

from collections.abc import Mapping
from itertools import takewhile
from typing import Any, Final

from proxy.protocols.dialects.responses.input_items import is_unfinished, read_items
from proxy.protocols.dialects.responses.tools import choose, read_tools
from proxy.protocols.dialects.responses.validation import optional, refused, required, strings, unknown
from proxy.protocols.dialects.translation import Json, ResolvedReferences, TranslationOptions

LOGPROBS: Final = "message.output_text.logprobs"  # the value of `include` that requests them

# Engines' own sampling fields are forwarded unchanged (a test compares them with proxy.protocols.sampling).
PASSED: Final = frozenset({
    "temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "min_tokens", "stop", "stop_token_ids", "ignore_eos",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words",
    "use_beam_search", "thinking_token_budget", "structured_outputs", "regex", "ebnf", "json_schema", "structural_tag",
    "stop_regex", "custom_logit_processor",
})  # fmt: skip

_TEMPLATE: Final = "chat_template_kwargs"


def read(
    body: Mapping[str, Any],
    options: TranslationOptions,
    resolved: ResolvedReferences = ResolvedReferences(),  # noqa: B008 - frozen
) -> Json:
    """Return the chat body.

    Raises:
        InvalidValue: A value has a wrong type.
        BadRequest: A feature is not supported.
    """
    _refuse(body)
    tools = read_tools(body, ignore_hosted=options.ignore_hosted_tools)
    chat: Json = {"messages": _messages(body, options, resolved)}
    if (model := optional(body, "model", str)) is not None:
        chat["model"] = model
    chat |= {name: body[name] for name in body if name in PASSED and body[name] is not None}
    for name in ("temperature", "top_p"):
        optional(body, name, float)
    if (bound := optional(body, "max_output_tokens", int)) is not None:
        chat["max_tokens"] = bound
    if optional(body, "stream", bool):
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    if is_unfinished(body.get("input"), chat["messages"], options.thought):
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    chat |= choose(body, tools, ignore_hosted=options.ignore_hosted_tools)
    return chat | _logprobs(body) | _format(body) | _reasoning(body, options)


def included(body: Mapping[str, Any]) -> frozenset[str]:
    """Return the values of `include`."""
    return frozenset(strings(optional(body, "include", list) or [], "include"))


def _refuse(body: Mapping[str, Any]) -> None:
    """Refuse unsupported features, and wrong types of fields that are not sent."""
    if optional(body, "background", bool):
        raise refused("background", "`background` is not supported: the response is returned by the call; remove it")
    if body.get("conversation") is not None:
        raise refused(
            "conversation",
            "`conversation` is not supported: set `previous_response_id`, or send the items of the previous response",
        )
    if body.get("prompt") is not None:
        raise refused(
            "prompt",
            "`prompt` is not supported: OpenAI stores these templates; send `instructions` and `input` instead",
        )
    metadata = optional(body, "metadata", dict) or {}
    strings(list(metadata.values()), "metadata")
    for name in ("previous_response_id", "prompt_cache_key", "safety_identifier", "user"):
        optional(body, name, str)
    optional(body, "store", bool)
    optional(body, "max_tool_calls", int)
    truncation = optional(body, "truncation", str)
    if truncation not in {None, "auto", "disabled"}:
        raise unknown("truncation", str(truncation), "use auto or disabled")


def _messages(body: Mapping[str, Any], options: TranslationOptions, resolved: ResolvedReferences) -> list[Json]:
    """Return the instructions, the messages of earlier turns, and those of the call's own items.

    An engine whose chat accepts developer messages receives them as its own endpoint would: if the template does not know
    them, vLLM 0.32 merges all developer and system messages into one (renderers/hf.py:531). For other engines, developer
    messages become system messages, and those at the beginning are merged: many templates accept only one, and only there.
    """
    instructions = optional(body, "instructions", str)
    first = [{"role": "system", "content": instructions}] if instructions else []
    messages = [*first, *resolved.messages, *read_items(body.get("input"), options, resolved)]
    if options.has_developers:
        return messages
    messages = [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]
    leading = list(takewhile(_is_system_text, messages))
    if len(leading) < 2:
        return messages
    joined = "\n\n".join(text for message in leading for text in _texts(message["content"]) or ())
    return [{"role": "system", "content": joined}, *messages[len(leading) :]]


def _is_system_text(message: Json) -> bool:
    return message["role"] == "system" and _texts(message["content"]) is not None


def _texts(content: str | list[Json]) -> list[str] | None:
    """Return the texts of a message; None if it has other parts."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [part["text"] for part in parts] if all(part["type"] == "text" for part in parts) else None


def _logprobs(body: Mapping[str, Any]) -> Json:
    """Return the fields of logprobs: `include` requests them, `top_logprobs` is the number of alternatives."""
    count = optional(body, "top_logprobs", int)
    return {"logprobs": True, "top_logprobs": count or 0} if LOGPROBS in included(body) else {}


def _format(body: Mapping[str, Any]) -> Json:
    """Return `response_format` of `text.format`; chat nests the schema one level deeper."""
    text_format = optional(optional(body, "text", dict) or {}, "format", dict, "text")
    if text_format is None:
        return {}
    path = "text.format"
    kind = required(text_format, "type", str, path)
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"response_format": {"type": kind}}
    if kind != "json_schema":
        raise unknown(f"{path}.type", kind, "use text, json_object or json_schema")
    fields = {
        "name": required(text_format, "name", str, path),
        "description": optional(text_format, "description", str, path),
        "schema": required(text_format, "schema", dict, path),
        "strict": optional(text_format, "strict", bool, path),
    }
    schema = {name: value for name, value in fields.items() if value is not None}
    return {"response_format": {"type": kind, "json_schema": schema}}


def _reasoning(body: Mapping[str, Any], options: TranslationOptions) -> Json:
    """Return the fields of reasoning: the client's effort, and the configured fields; the client's template fields win."""
    template = optional(body, _TEMPLATE, dict)
    own: Json = {} if template is None else {_TEMPLATE: template}
    reasoning = optional(body, "reasoning", dict) or {}
    optional(reasoning, "summary", str, "reasoning")
    effort = optional(reasoning, "effort", str, "reasoning")
    if effort is None:
        return own
    # Engines accept the same values (vLLM 0.32.0: chat_completion/protocol.py:252; SGLang: openai/protocol.py).
    fields: Json = {"reasoning_effort": effort, **(options.not_thinking if effort == "none" else options.thinking)}
    if isinstance(fields.get(_TEMPLATE), Mapping) and template is not None:
        own = {_TEMPLATE: {**fields[_TEMPLATE], **template}}
    return fields | own
