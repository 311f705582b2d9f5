"""A Gemini request, read as a chat call.

Fields without an equivalent in chat (`safetySettings`, `labels`, `serviceTier`, …) are recorded with the client's body, and not
sent.
"""

from collections.abc import Mapping
from typing import Any, Final

from proxy.protocols.dialects.gemini.contents import read_contents, system_message
from proxy.protocols.dialects.gemini.fields import an_integer, at, one_of_names, optional, texts
from proxy.protocols.dialects.gemini.schemas import json_schema
from proxy.protocols.dialects.gemini.tools import tools_from
from proxy.protocols.dialects.translation import Json, ResolvedReferences, TranslationOptions
from proxy.protocols.dialects.validation import a_flag, a_number, a_text, an_object, refusal

# Engines' own sampling fields are forwarded unchanged: the engine validates them. Google's SDKs add them as `extra_body`.
PASSED: Final = (
    "min_p", "typical_p", "min_tokens", "stop_token_ids", "ignore_eos", "repetition_penalty", "logit_bias", "allowed_token_ids",
    "bad_words", "use_beam_search", "thinking_token_budget", "structured_outputs", "regex", "ebnf", "json_schema",
    "structural_tag", "stop_regex", "custom_logit_processor", "chat_template_kwargs",
)  # fmt: skip
_CONFIG: Final = "generationConfig"
_NUMBERS: Final = {
    "temperature": "temperature", "topP": "top_p", "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
}  # fmt: skip
_INTEGERS: Final = {"topK": "top_k", "maxOutputTokens": "max_tokens", "candidateCount": "n", "seed": "seed"}
_STORED: Final = {
    "cachedContent": "contents are not stored; send all of them with each call",
    "continuationToken": "responses are not continued by a token; send the contents of the model instead",
}
_LEVELS: Final = {
    "THINKING_LEVEL_UNSPECIFIED": None, "MINIMAL": "minimal", "LOW": "low", "MEDIUM": "medium", "HIGH": "high",
    "XHIGH": "xhigh",
}  # fmt: skip


def read(body: Mapping[str, Any], options: TranslationOptions, resolved: ResolvedReferences) -> Json:
    """Return the chat body of a request. Raises UnprocessableRequest, naming the field."""
    for name, reason in _STORED.items():
        if at(body, name)[0] is not None:
            raise refusal(name, reason)
    config = optional(an_object, body, _CONFIG) or {}
    chat: Json = {"model": body["model"]} if body.get("model") else {}
    chat["messages"] = [*system_message(body), *read_contents(body, options.thought, resolved.items)]
    chat |= {name: body[name] for name in PASSED if body.get(name) is not None}
    chat |= {**_sampling(config), **_response_format(config), **_logprobs(config)}
    chat |= tools_from(body, ignore_hosted=options.ignore_hosted_tools)
    _continue(chat, options.thought)
    _set_reasoning(chat, config, options)
    if body.get("stream"):
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    return chat


def shows_thoughts(body: Mapping[str, Any]) -> bool:
    """Return whether the client requests reasoning; Google returns none otherwise."""
    thinking = _inner(_inner(body, _CONFIG), "thinkingConfig")
    return at(thinking, "includeThoughts")[0] is True


def _inner(value: Mapping[str, Any], name: str) -> Json:
    found, _ = at(value, name)
    return found if isinstance(found, dict) else {}


def _sampling(config: Json) -> Json:
    """Return the sampling fields."""
    fields: Json = {}
    for name, field in _NUMBERS.items():
        fields[field] = optional(a_number, config, name, _CONFIG)
    for name, field in _INTEGERS.items():
        fields[field] = optional(an_integer, config, name, _CONFIG)
    fields["stop"] = optional(texts, config, "stopSequences", _CONFIG) or None
    for modality in optional(texts, config, "responseModalities", _CONFIG) or ():
        if modality.upper() not in {"TEXT", "MODALITY_UNSPECIFIED"}:
            raise refusal(f"{_CONFIG}.responseModalities", f"must be TEXT, not {modality[:64]!r}")
    return {field: value for field, value in fields.items() if value is not None}


def _logprobs(config: Json) -> Json:
    count = optional(an_integer, config, "logprobs", _CONFIG)
    if optional(a_flag, config, "responseLogprobs", _CONFIG):
        return {"logprobs": True, "top_logprobs": count} if count else {"logprobs": True}
    if count is not None:
        raise refusal(f"{_CONFIG}.logprobs", "requires responseLogprobs")
    return {}


def _response_format(config: Json) -> Json:
    """Return `response_format` of a MIME type and a schema in one of its two formats."""
    if at(config, "responseFormat")[0] is not None:
        raise refusal(f"{_CONFIG}.responseFormat", "is not supported; use responseMimeType and responseJsonSchema")
    kind = optional(a_text, config, "responseMimeType", _CONFIG) or "text/plain"
    schema = optional(json_schema, config, "responseSchema", _CONFIG)
    plain, path = at(config, "responseJsonSchema", _CONFIG)
    if plain is not None:
        if schema is not None:
            raise refusal(path, "must not be present together with responseSchema")
        schema = an_object(plain, path)
    if kind == "text/plain" and schema is None:
        return {}
    if kind != "application/json":
        known = "application/json" if schema is not None else "text/plain or application/json"
        raise refusal(f"{_CONFIG}.responseMimeType", f"must be {known}, not {kind[:64]!r}")
    if schema is None:
        return {"response_format": {"type": "json_object"}}
    json_format = {"name": "response", "schema": schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": json_format}}


def _continue(chat: Json, reasoning_field: str) -> None:
    """Let the model continue the last content if it is the model's and not empty; remove an empty one."""
    last = chat["messages"][-1]
    if last["role"] != "assistant":
        return
    if last["content"] or last.get(reasoning_field):
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
        return
    chat["messages"] = chat["messages"][:-1]
    if not chat["messages"]:
        raise refusal("contents", "at least one content must have text")


def _set_reasoning(chat: Json, config: Json, options: TranslationOptions) -> None:
    """Set the fields of reasoning: a level is the effort, and a budget of 0 disables reasoning (the effort "none").

    The configured fields are added; fields of the body override them.
    """
    path = f"{_CONFIG}.thinkingConfig"
    thinking = optional(an_object, config, "thinkingConfig", _CONFIG) or {}
    optional(a_flag, thinking, "includeThoughts", path)
    budget = optional(an_integer, thinking, "thinkingBudget", path)
    level, level_path = at(thinking, "thinkingLevel", path)
    effort = None if level is None else one_of_names(level, level_path, _LEVELS)
    if effort is not None and budget is not None:
        raise refusal(level_path, "must not be present together with thinkingBudget")
    if effort is None and budget is None:
        return
    fields: Mapping[str, Any] = options.thinking
    if effort is not None:
        fields = {**fields, "reasoning_effort": effort}
    elif budget == 0:
        fields = {"reasoning_effort": "none", **options.not_thinking}
    for name, value in fields.items():
        own = chat.get(name)
        if isinstance(own, dict) and isinstance(value, Mapping):
            chat[name] = {**value, **own}
        elif own is None:
            chat[name] = value
