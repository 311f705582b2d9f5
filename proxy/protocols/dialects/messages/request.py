"""A Messages request, read as a chat call.

Fields without an equivalent in chat (`metadata`, `context_management`, …) are recorded with the client's body, and not sent.
"""

from collections.abc import Mapping
from typing import Any, Final

from proxy.protocols.dialects.messages.messages import read_conversation
from proxy.protocols.dialects.messages.tools import tools_from
from proxy.protocols.dialects.translation import Json, ResolvedReferences, TranslationOptions
from proxy.protocols.dialects.validation import a_count, a_flag, a_list, a_number, a_text, an_object, one_of, refusal

# Engines' own sampling fields are forwarded unchanged: the engine validates them.
PASSED: Final = (
    "min_p", "typical_p", "seed", "min_tokens", "stop_token_ids", "ignore_eos", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "use_beam_search", "thinking_token_budget",
    "structured_outputs", "regex", "ebnf", "json_schema", "structural_tag", "stop_regex", "custom_logit_processor",
    "response_format", "chat_template_kwargs",
)  # fmt: skip
_THINKING_TYPES: Final = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}


def read(body: Mapping[str, Any], options: TranslationOptions, resolved: ResolvedReferences) -> Json:
    """Return the chat body of a request. Raises UnprocessableRequest, naming the field."""
    chat: Json = {}
    if body.get("thread") not in (None, False):
        raise refusal(
            "thread", "conversations are not stored; send the whole conversation with each call and remove `thread`"
        )
    if body.get("model") is not None:
        chat["model"] = a_text(body["model"], "model")
    chat["messages"] = read_conversation(body, options, resolved.items)
    chat |= {**_sampling(body), **tools_from(body, ignore_hosted=options.ignore_hosted_tools), **_response_format(body)}
    chat |= {name: body[name] for name in PASSED if body.get(name) is not None}
    _continue(chat, body["messages"][-1]["role"], options.thought)
    _set_reasoning(chat, body, options)
    if body.get("stream") is not None and a_flag(body["stream"], "stream"):
        # The first event has the number of prompt tokens, which is known in time only if each chunk has usage.
        chat |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    return chat


def _sampling(body: Mapping[str, Any]) -> Json:
    """Return the sampling fields."""
    if body.get("n") not in (None, 1):
        raise refusal("n", "must be 1: Messages returns one response per call")
    fields: Json = {}
    for name in ("max_tokens", "top_k"):
        if body.get(name) is not None:
            fields[name] = a_count(body[name], name)
    for name in ("temperature", "top_p"):
        if body.get(name) is not None:
            fields[name] = a_number(body[name], name)
    stops = body.get("stop_sequences")
    if stops is not None:
        read = [a_text(stop, f"stop_sequences.{n}") for n, stop in enumerate(a_list(stops, "stop_sequences"))]
        fields |= {"stop": read} if read else {}
    return fields


def _response_format(body: Mapping[str, Any]) -> Json:
    """Return `response_format` of `output_config.format`, or of `output_format` (its name in betas)."""
    config = body.get("output_config")
    value, path = body.get("output_format"), "output_format"
    if config is not None and an_object(config, "output_config").get("format") is not None:
        value, path = config["format"], "output_config.format"
    if value is None:
        return {}
    output_format = an_object(value, path)
    one_of(output_format.get("type"), f"{path}.type", ("json_schema",))
    schema = {"name": "output", "schema": an_object(output_format.get("schema"), f"{path}.schema"), "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _continue(chat: Json, last_role: str, reasoning_field: str) -> None:
    """Let the model continue the last turn if it is the assistant's and not empty; remove an empty one.

    `last_role` is the role of the request's last turn, since the last chat message may be another one: a system message is
    moved to the beginning, and an empty turn has no message.
    """
    last = chat["messages"][-1] if chat["messages"] else {}
    if last_role == "assistant" and "tool_calls" in last:
        raise refusal("messages", "the last message calls tools; add their results")
    if last_role == last.get("role") == "assistant":
        if last["content"] or last.get(reasoning_field):
            chat |= {"continue_final_message": True, "add_generation_prompt": False}
        else:
            chat["messages"] = chat["messages"][:-1]
    if not chat["messages"]:
        raise refusal("messages", "at least one message must have content")


def _set_reasoning(chat: Json, body: Mapping[str, Any], options: TranslationOptions) -> None:
    """Set the fields of reasoning, as vLLM 0.32's endpoint does (entrypoints/anthropic/serving.py:629).

    `output_config.effort` is the effort; disabled reasoning is the effort "none". The configured fields are added; fields of
    the body override them.
    """
    config, thinking = body.get("output_config"), body.get("thinking")
    effort = None if config is None else config.get("effort")  # `_response_format` has checked that it is an object
    if effort is not None:
        chat["reasoning_effort"] = a_text(effort, "output_config.effort")
    if thinking is None:
        return
    enabled = _THINKING_TYPES[one_of(an_object(thinking, "thinking").get("type"), "thinking.type", _THINKING_TYPES)]
    if not enabled:
        chat.pop("reasoning_effort", None)
    for name, value in (options.thinking if enabled else {"reasoning_effort": "none", **options.not_thinking}).items():
        own = chat.get(name)
        if isinstance(own, dict) and isinstance(value, Mapping):
            chat[name] = {**value, **own}
        elif own is None:
            chat[name] = value
