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

LOGPROBS: Final = "message.output_text.logprobs"  # what `include` says of wanting them

# Fields that are no part of the dialect, which engines know all the same (tests hold them against proxy.protocols.plan).
PASSED: Final = frozenset({
    "temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "min_tokens", "stop", "stop_token_ids", "ignore_eos",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words",
    "use_beam_search", "structured_outputs",
})  # fmt: skip

_TEMPLATE: Final = "chat_template_kwargs"


def read(
    body: Mapping[str, Any],
    options: TranslationOptions,
    resolved: ResolvedReferences = ResolvedReferences(),  # noqa: B008 - frozen
) -> Json:
    """Return the chat body.

    Raises:
        UnprocessableRequest: A value has a wrong type.
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
    return chat | _logprobs(body) | _format(body) | _thinking(body, options)


def included(body: Mapping[str, Any]) -> frozenset[str]:
    """What the client wants to see beside the usual."""
    return frozenset(strings(optional(body, "include", list) or [], "include"))


def _refuse(body: Mapping[str, Any]) -> None:
    """Refuse what cannot be served, and what is of a wrong type though nothing of it is sent."""
    if optional(body, "background", bool):
        raise refused("background", "`background` is not supported: the response is returned by the call; remove it")
    if body.get("conversation") is not None:
        raise refused(
            "conversation",
            "`conversation` is not supported: set `previous_response_id`, or send the items of the previous response",
        )
    if body.get("prompt") is not None:
        raise refused(
            "prompt", "`prompt` names a template that OpenAI keeps: send `instructions` and `input` in its place"
        )
    metadata = optional(body, "metadata", dict) or {}
    strings(list(metadata.values()), "metadata")
    for name in ("previous_response_id", "prompt_cache_key", "safety_identifier", "user"):
        optional(body, name, str)
    optional(body, "store", bool)
    optional(body, "max_tool_calls", int)
    truncation = optional(body, "truncation", str)
    if truncation not in {None, "auto", "disabled"}:
        raise unknown("truncation", str(truncation), "it is auto or disabled")


def _messages(body: Mapping[str, Any], options: TranslationOptions, resolved: ResolvedReferences) -> list[Json]:
    """Instructions, what was said before, and the call's own items.

    An engine whose chat takes developers gets what its own endpoint would give it: with a template that knows none, vLLM
    0.32 makes one system message of all of them and of the systems (renderers/hf.py:531). For others a developer is a
    system, and the texts of systems at the beginning are one message: many templates take one only, and only there.
    """
    instructions = optional(body, "instructions", str)
    first = [{"role": "system", "content": instructions}] if instructions else []
    messages = [*first, *resolved.messages, *read_items(body.get("input"), options, resolved)]
    if options.has_developers:
        return messages
    messages = [{**said, "role": "system"} if said["role"] == "developer" else said for said in messages]
    leading = list(takewhile(lambda said: said["role"] == "system" and _texts(said["content"]) is not None, messages))
    if len(leading) < 2:
        return messages
    joined = "\n\n".join(text for said in leading for text in _texts(said["content"]) or ())
    return [{"role": "system", "content": joined}, *messages[len(leading) :]]


def _texts(content: str | list[Json]) -> list[str] | None:
    """The texts of a message that holds nothing else."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [part["text"] for part in parts] if all(part["type"] == "text" for part in parts) else None


def _logprobs(body: Mapping[str, Any]) -> Json:
    """They are asked for by `include`; `top_logprobs` says how many alternatives come with each."""
    count = optional(body, "top_logprobs", int)
    return {"logprobs": True, "top_logprobs": count or 0} if LOGPROBS in included(body) else {}


def _format(body: Mapping[str, Any]) -> Json:
    """`text.format`, whose schema stands one level deeper in chat."""
    form = optional(optional(body, "text", dict) or {}, "format", dict, "text")
    if form is None:
        return {}
    at = "text.format"
    kind = required(form, "type", str, at)
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"response_format": {"type": kind}}
    if kind != "json_schema":
        raise unknown(f"{at}.type", kind, "it is text, json_object or json_schema")
    fields = {
        "name": required(form, "name", str, at),
        "description": optional(form, "description", str, at),
        "schema": required(form, "schema", dict, at),
        "strict": optional(form, "strict", bool, at),
    }
    told = {name: value for name, value in fields.items() if value is not None}
    return {"response_format": {"type": kind, "json_schema": told}}


def _thinking(body: Mapping[str, Any], options: TranslationOptions) -> Json:
    """How much to think: in the client's word, and by the configuration's fields, before which its own template fields go."""
    template = optional(body, _TEMPLATE, dict)
    own: Json = {} if template is None else {_TEMPLATE: template}
    reasoning = optional(body, "reasoning", dict) or {}
    optional(reasoning, "summary", str, "reasoning")
    effort = optional(reasoning, "effort", str, "reasoning")
    if effort is None:
        return own
    # Engines know the same words (vLLM 0.32.0: chat_completion/protocol.py:252; SGLang: openai/protocol.py).
    asked: Json = {"reasoning_effort": effort, **(options.not_thinking if effort == "none" else options.thinking)}
    if isinstance(asked.get(_TEMPLATE), Mapping) and template is not None:
        own = {_TEMPLATE: {**asked[_TEMPLATE], **template}}
    return asked | own
