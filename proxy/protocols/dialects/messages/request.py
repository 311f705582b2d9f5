"""A Messages request, read as a chat call.

Fields without an equivalent in chat (`metadata`, `context_management`, …) are recorded with the client's body, and not sent.
"""

from collections.abc import Mapping
from typing import Any, Final

from proxy.protocols.dialects.messages.messages import conversation_of
from proxy.protocols.dialects.messages.tools import tools_of
from proxy.protocols.dialects.translation import Json, ResolvedReferences, TranslationOptions
from proxy.protocols.dialects.validation import a_count, a_flag, a_list, a_number, a_text, an_object, one_of, refusal

# Engines' own sampling fields are forwarded unchanged: the engine validates them.
PASSED: Final = (
    "min_p", "typical_p", "seed", "min_tokens", "stop_token_ids", "ignore_eos", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "use_beam_search", "structured_outputs",
    "response_format", "chat_template_kwargs",
)  # fmt: skip
_THINKS: Final = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}


def read(body: Mapping[str, Any], options: TranslationOptions, resolved: ResolvedReferences) -> Json:
    """Return the chat body of a request. Raises UnprocessableRequest, naming the field."""
    chat: Json = {}
    if body.get("thread") not in (None, False):
        raise refusal("thread", "no conversation is held here: send all of it with each call, without `thread`")
    if body.get("model") is not None:
        chat["model"] = a_text(body["model"], "model")
    chat["messages"] = conversation_of(body, options, resolved.items)
    chat |= {**_sampling(body), **tools_of(body, ignore_hosted=options.ignore_hosted_tools), **_form(body)}
    chat |= {name: body[name] for name in PASSED if body.get(name) is not None}
    _continue(chat, body["messages"][-1]["role"], options.thought)
    _think(chat, body, options)
    if body.get("stream") is not None and a_flag(body["stream"], "stream"):
        # The beginning of the stream tells how many tokens came in: counts that come with each chunk say it in time.
        chat |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    return chat


def _sampling(body: Mapping[str, Any]) -> Json:
    """How to sample, where the dialect has a field for it."""
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


def _form(body: Mapping[str, Any]) -> Json:
    """The form that the answer must have: `output_config.format`, or `output_format` as betas spelt it."""
    config = body.get("output_config")
    given, at = body.get("output_format"), "output_format"
    if config is not None and an_object(config, "output_config").get("format") is not None:
        given, at = config["format"], "output_config.format"
    if given is None:
        return {}
    form = an_object(given, at)
    one_of(form.get("type"), f"{at}.type", ("json_schema",))
    schema = {"name": "output", "schema": an_object(form.get("schema"), f"{at}.schema"), "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _continue(chat: Json, last_role: str, thought: str) -> None:
    """Where the last turn is a reply, the model goes on with it; an empty one is none yet.

    `last_role` is that of the last turn of the request: after a system that is moved to the beginning, or a turn that says
    nothing, the last chat message is a reply that is over.
    """
    last = chat["messages"][-1] if chat["messages"] else {}
    if last_role == "assistant" and "tool_calls" in last:
        raise refusal("messages", "the last message calls tools; add their results")
    if last_role == last.get("role") == "assistant":
        if last["content"] or last.get(thought):
            chat |= {"continue_final_message": True, "add_generation_prompt": False}
        else:
            chat["messages"] = chat["messages"][:-1]
    if not chat["messages"]:
        raise refusal("messages", "at least one message must have content")


def _think(chat: Json, body: Mapping[str, Any], options: TranslationOptions) -> None:
    """Whether and how much to reason, as vLLM 0.32's endpoint has it (entrypoints/anthropic/serving.py:629).

    `output_config.effort` is the effort; reasoning that is forbidden is an effort of "none". On top are the configuration's
    fields for either; what the body says itself wins over those.
    """
    config, given = body.get("output_config"), body.get("thinking")
    effort = None if config is None else config.get("effort")  # read by `_form`: it is an object
    if effort is not None:
        chat["reasoning_effort"] = a_text(effort, "output_config.effort")
    if given is None:
        return
    asks = _THINKS[one_of(an_object(given, "thinking").get("type"), "thinking.type", _THINKS)]
    if not asks:
        chat.pop("reasoning_effort", None)
    for name, value in (options.thinking if asks else {"reasoning_effort": "none", **options.not_thinking}).items():
        said = chat.get(name)
        if isinstance(said, dict) and isinstance(value, Mapping):
            chat[name] = {**value, **said}
        elif said is None:
            chat[name] = value
