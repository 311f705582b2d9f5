"""vLLM's `/inference/v1/generate`: what to ask it, what to hide of its answers, where their tokens are.

Holds for that endpoint what `vllm` holds for chat and completions, and `vllm` calls it. Read off vLLM 0.32.0 with
`--enable-scale-out`.

Rule 1: an unstreamed answer always has all its keys; a chunk has `prompt_token_ids` and `mm_placeholders` only where
        ids of the prompt were asked for. So hiding sets null in the one, and deletes in the other.
Rule 2: neither the ids of the prompt nor logprobs add an event to a stream; `include_usage` adds one, with nothing else in it.
Rule 3: a body that vLLM refuses must stay one that it refuses.
"""

from proxy.dialects.base import is_on
from proxy.engines.base import Ask, Hidden, Json, Sampled, Tokens, Wish
from proxy.engines.choices import has_running_usage, index_of, names_other_ids, usage_options

_OF_THE_PROMPT = ("prompt_token_ids", "mm_placeholders")  # both come by `return_token_ids`


def ask_generate(wish: Wish) -> Ask:
    """The ids of the prompt, which placeholders of images may lengthen, and logprobs. Sampled ids always come."""
    body = wish.body
    sampling = body.get("sampling_params")
    if "token_ids" not in body or not isinstance(sampling, dict):
        return Ask({}, Hidden())  # refused, by a message that shows the body
    fields: Json = {}
    if not wish.asked.token_ids:
        fields["return_token_ids"] = True
    # With `logprob_token_ids`, `logprobs` must be their number, and may then be more than the engine allows.
    if wish.adds_logprobs and sampling.get("logprob_token_ids") is None:
        fields["sampling_params"] = {**sampling, "logprobs": 0}
    if options := usage_options(wish, running=wish.asked.choices != 1):
        fields["stream_options"] = options
    forced = sampling.get("trace_decode_token_ids") is not None
    hidden = Hidden(
        token_ids="return_token_ids" in fields,
        logprobs="sampling_params" in fields,
        usage=bool(options) and not wish.asked.usage,
        running_usage=is_on(options.get("continuous_usage_stats")) and not has_running_usage(body),
    )
    return Ask(fields, hidden, ("forced_tokens",) if forced else ())


def hide_generate(response: Json, hidden: Hidden) -> Json:
    """An unstreamed (or folded) response without what the client did not ask for; a new dict if that differs."""
    if not hidden.of_choices:
        return response
    shown = dict(response)
    if hidden.token_ids:
        shown |= {key: None for key in _OF_THE_PROMPT if key in shown}
    return _without_logprobs(shown, hidden)


def hide_generate_chunk(chunk: Json, hidden: Hidden) -> Json | None:
    """A streamed chunk likewise; the same dict if nothing in it is to be hidden, None for the usage event."""
    if hidden.usage and not chunk.get("choices") and chunk.get("usage") is not None:
        return None
    if hidden.running_usage and chunk.get("choices") and "usage" in chunk:
        chunk = {**chunk, "usage": None}
    said = hidden.token_ids and any(key in chunk for key in _OF_THE_PROMPT)
    if not said and not (hidden.logprobs and chunk.get("choices")):
        return chunk
    shown = {key: value for key, value in chunk.items() if not (said and key in _OF_THE_PROMPT)}
    return _without_logprobs(shown, hidden)


def tokens_of_generate(response: Json) -> Tokens:
    """One prompt, on the top level; all else on the choices."""
    choices = response.get("choices") or ()
    sampled = tuple(_sampled(choice) for choice in choices)
    disagree = any(_disagrees(choice) or names_other_ids(choice, choice.get("token_ids")) for choice in choices)
    problems = ("ids_disagree",) if disagree else ()
    return Tokens(response.get("prompt_token_ids"), sampled, problems)


def _without_logprobs(shown: Json, hidden: Hidden) -> Json:
    choices = shown.get("choices")
    if not hidden.logprobs or not isinstance(choices, list):
        return shown
    return {**shown, "choices": [{**choice, "logprobs": None} for choice in choices]}


def _content(choice: Json) -> list[Json] | None:
    """An entry per sampled token; None if none were given."""
    logprobs = choice.get("logprobs")
    content: list[Json] | None = logprobs.get("content") if isinstance(logprobs, dict) else None
    return content


def _disagrees(choice: Json) -> bool:
    """Whether logprobs are said to be of other ids; those of output mode "text" name none."""
    pairs = zip(_content(choice) or (), choice.get("token_ids") or (), strict=False)
    return any(entry.get("token_id", token_id) != token_id for entry, token_id in pairs)


def _sampled(choice: Json) -> Sampled:
    content = _content(choice)
    versions = choice.get("weight_versions")
    return Sampled(
        index=index_of(choice),
        prompt_ids=None,
        ids=choice.get("token_ids"),
        logprobs=None if content is None else [entry["logprob"] for entry in content],
        finish_reason=choice.get("finish_reason"),
        stop_reason=choice.get("stop_reason"),
        spans=None if versions is None else tuple((span["start"], span["end"], span["version"]) for span in versions),
        routed_experts=choice.get("routed_experts"),
        sampling_mask=choice.get("sampling_mask"),
    )
