"""SGLang: ids by its own flags, which its chat streams refuse; logprobs after temperature.

Verified on SGLang 0.5.23, on a CPU (tests/system/real_engines), and by reading its source.

Rule 1: keys that the injected flags add are absent otherwise, so stripping deletes them; `logprobs` is always present,
        so stripping sets it to null.
Rule 2: `return_token_ids` and `return_meta_info` are never sent with a chat stream, where they are a 400. Ids then arrive
        in a named event (`x-sglext-ids-framed`), after the finish.
Rule 3: older servers ignore all of these flags with status 200: only the response shows what was returned.
Rule 4: a call that is aborted by its id (`rid`) returns what it sampled until then; a disconnected call returns nothing.
        Calls therefore get an id, in the format of the server's ids.
Rule 5: each stream must count its tokens. The usage event is dropped again, also on a server that sends one by default
        (stream_response_default_include_usage), because its streams look the same.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from proxy.errors import InvalidValue
from proxy.protocols.dialects.base import GENERATES, DialectName, Json, ResponseOptions, is_on, text_or_none
from proxy.protocols.dialects.generate import SglangGenerate, has_beams
from proxy.protocols.engines.base import (
    ALL,
    BIASES,
    BOTH,
    CHAT,
    COMPLETIONS,
    PROMPT_FIELDS,
    CallId,
    CallOptions,
    Engine,
    Injection,
    Probed,
    Quirk,
    Sampled,
    StreamShape,
    StripRules,
    Tokens,
    Traits,
    TraitsRequest,
    changes_distribution,
    has,
    has_grammar,
    has_more_than_text,
    has_other_ids_as_names,
    index_of,
    logprobs_of,
    several,
    spans_of,
    usage_options,
    version_numbers,
    without,
)
from proxy.trajectory.step import CACHED_TOKENS, PROCESSED

_IDS: dict[DialectName, str] = {"chat": "input_ids", "completions": "prompt", "sglang_generate": "input_ids"}
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
_IDS_BOTH, _META = "return_token_ids", "return_meta_info"
_INPUT, _OUTPUT = "return_input_ids_in_sglext", "return_output_ids_in_sglext"
_HEADERS = {_INPUT: "x-sglext-return-input-ids", _OUTPUT: "x-sglext-return-output-ids"}
_FRAMED = "x-sglext-ids-framed"
_CALL_ID = CallId("rid", "/abort_request", lambda each: {"rid": each})
_NATIVE = SglangGenerate()
# What `return_logprob` adds to `meta_info`; the logprobs of sampling masks have a separate flag.
_LOGPROB_KEYS = (
    "input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs", "output_token_logprobs", "output_top_logprobs",
    "output_token_ids_logprobs",
)  # fmt: skip
_MASK = "return_sampling_mask"
_EXPERTS = "return_routed_experts"
_NOT_STREAMED = (_IDS_BOTH, _META, "return_prompt_token_ids")
# The keys that each flag adds to choices or to `sglext`.
_BROUGHT: dict[str, frozenset[str]] = {
    _IDS_BOTH: frozenset({"prompt_token_ids", "response_token_ids", "token_ids"}),
    _META: frozenset({"meta_info"}),
    _MASK: frozenset(),
    _EXPERTS: frozenset(),
    _INPUT: frozenset({"input_ids"}),
    _OUTPUT: frozenset({"output_ids", "token_ids"}),  # token_ids: deltas that a later version may add (PR #37365)
}
_META_LOGPROBS = frozenset({"input_token_logprobs", "output_token_logprobs", "output_token_logprobs_length"})


# Keys of `meta_info`. The logprobs are of the distribution that was sampled from, over the tokens of the mask.
_MASKS, _MASKED_LOGPROBS = "output_token_sampling_mask", "output_token_sampling_logprobs"
_OF_MASKS: frozenset[str] = frozenset({_MASKS, _MASKED_LOGPROBS, "output_token_sampling_mask_length"})
# The keys that each injected field adds to `meta_info`.
_IN_META = {_MASK: _OF_MASKS, _EXPERTS: frozenset({"routed_experts"}), "logprobs": _META_LOGPROBS}
# A call with a mask is refused without a top_k up to --sampling-mask-max-tokens, by default 4,096, and aborted if ties make
# the mask longer (0.5.23).
MASK_TOP_K = 4000


def returns_mask(body: Mapping[str, Any], options: CallOptions) -> bool:
    """Return whether to request the mask of a call: it is configured, and the server does not refuse the call for it."""
    if not options.sampling_masks:
        return False
    top_k = body.get("top_k", (options.traits.sampling_defaults or {}).get("top_k"))
    return type(top_k) is int and 1 <= top_k <= MASK_TOP_K and not body.get("custom_logit_processor")


def _is_older(_body: Mapping[str, Any], options: CallOptions) -> bool:
    """Return whether the version is older than the first with ids in chat, or unknown."""
    version = options.traits.version
    return version is None or version_numbers(version) < (0, 5, 23)


def _several_in_all(body: Mapping[str, Any], options: CallOptions) -> bool:
    """Return whether a completions call may have more than one choice over all its prompts."""
    prompt = body.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and type(prompt[0]) is not int else 1
    return several(body, options) or prompts > 1


_NATIVE_ONLY: Final[tuple[DialectName, ...]] = ("sglang_generate",)
_QUIRKS: Final[tuple[Quirk, ...]] = (
    Quirk(
        CHAT, "streams", "Without a parser, events without text, such as the EOS, have no logprobs.",
        ("logprob_count",), "seen on 0.5.23; serving_chat.py:1054-1080",
        lambda _, options: options.wants_logprobs and not options.traits.has_parser,
    ),
    Quirk(
        CHAT, "streams", "Before 0.5.23 or of unknown version: ids may be missing.",
        ("no_token_ids", "no_prompt_ids"), "read; PR #34488 (August 2026)", _is_older,
    ),
    Quirk(
        CHAT, "always", "Images and other media are not in the prompt ids.",
        ("prompt_count",), "read in 0.5.23; tokenizer_manager.py:948", has_more_than_text,
    ),
    Quirk(
        COMPLETIONS, "streams", "Several choices or prompts: usage is only their sum, so errors may cancel "
        "out.", ("uncounted",), "seen on 0.5.23; serving_completions.py", _several_in_all,
    ),
    Quirk(
        BOTH, "always", "`echo` and beam search: the response has another format.", ("echo", "beam_search"),
        "seen (`echo`) and read in 0.5.23", has("echo", "use_beam_search"),
    ),
    Quirk(
        _NATIVE_ONLY, "always", "Images and other media, and the earlier turns of `session_params`, are not in the prompt "
        "ids.", ("prompt_count",), "read in 0.5.23; tokenizer_manager.py:948",
        has("image_data", "video_data", "audio_data", "session_params"),
    ),
    Quirk(
        _NATIVE_ONLY, "always", "`input_embeds`: no prompt ids.", ("no_prompt_ids",), "read in 0.5.23",
        has("input_embeds"),
    ),
    Quirk(
        _NATIVE_ONLY, "always", "Beam search (`beam_width`): the best sequence without logprobs.",
        ("beam_search", "no_logprobs"), "run on 0.5.23", lambda body, _: has_beams(body.get("sampling_params")),
    ),
)  # fmt: skip

# SGLang reports the size of its vocabulary only in this error (0.5.23, run): it checks the ids of biases before a request
# reaches the scheduler, but not the ids of prompts. An earlier version may not check biases.
_VOCABULARY: Final = TraitsRequest(
    "/generate",
    {"input_ids": [0], "sampling_params": {"max_new_tokens": 0, "logit_bias": {str(2**31 - 1): 0}}},
    lambda answer: {"vocabulary_size": read_vocabulary_size(answer.error)},
)
_CHECKS_BIASES: Final = (0, 5, 23)
_LAST_ID: Final = re.compile(r"logit_bias must has keys in \[0, (\d{1,9})\]")


def read_vocabulary_size(error: str) -> int | None:
    """Return the size of the vocabulary in an error for a bias of an unknown id; None if it is another error."""
    last = _LAST_ID.search(error)
    return int(last[1]) + 1 if last else None


class Sglang(Engine):
    """SGLang ≥ 0.5.23 (the first with ids in chat); calls of older servers are recorded and flagged."""

    kind = "sglang"
    quirks = _QUIRKS
    # log_softmax of logits / temperature, after penalties and bias, before top-k and top-p (layers/sampler.py:208-331).
    logprobs_mode = "after_temperature_logprobs"
    returns_prompt_ids = True
    hides_ends = True  # 0.5.23 samples one more token, which it does not look at (schedule_batch.py:2011)
    verifies_renderings = True  # run on 0.5.23 with `input_ids`
    unnamed_model = "default"
    headers_read = tuple(_HEADERS.values())
    probe_paths = ("/server_info", "/get_server_info", "/model_info", "/get_model_info")  # two under older names
    owners = ("sglang",)
    tokenize_path = "/v1/tokenize"
    detokenize_path = "/v1/detokenize"
    detokenized_field = "text"
    # Otherwise it drops special tokens (run on 0.5.23), and the end of a turn is one.
    detokenize_fields: Mapping[str, Any] = {"skip_special_tokens": False}
    counts_messages = True
    translation: Mapping[str, Any] = {"thought": "reasoning_content", "system_joint": "\n"}
    shape = StreamShape(
        head=frozenset({"id", "object", "created", "model"}),
        role={"reasoning_content": None, "role": "assistant", "content": ""},
        delta={"reasoning_content": None},
        call_delta={"role": None, "content": None, "reasoning_content": None},
        more_call={"id": None, "type": "function"},
        more_function={"name": None},
        choice=("matched_stop",),
        alone=("sglext",),
        no_usage_yet=True,
    )

    def identify(self, probed: Probed) -> Traits | None:
        """It reports the version of its weights. Its flags show whether a reasoning or tool parser is configured."""
        models = probed.facts("/model_info", "/get_model_info")
        if "weight_version" not in models and probed.owner not in self.owners:
            return None
        facts = {**probed.facts("/server_info", "/get_server_info"), **models}
        parsers = [facts[name] for name in ("reasoning_parser", "tool_call_parser") if name in facts]
        version, model = (text_or_none(facts.get(name)) for name in ("version", "served_model_name"))
        return Traits(self.kind, version, any(map(bool, parsers)) if parsers else None, model=model)

    def traits_requests(self, traits: Traits) -> tuple[TraitsRequest, ...]:
        return (_VOCABULARY,) if version_numbers(traits.version or "") >= _CHECKS_BIASES else ()

    def inject(self, dialect: DialectName, body: Mapping[str, Any], options: CallOptions) -> Injection:
        """Request ids by the flags of the framing, logprobs, weight versions. Raises InvalidValue for an unknown prompt id."""
        requested = options.requested
        _check_ids(dialect, body, options.traits)
        if dialect == "sglang_generate":
            return _inject_native(body, options)
        if PROMPT_FIELDS.get(dialect) not in body:
            return Injection()  # refused, or vLLM's own endpoint
        problems = _problems(dialect, body, requested)
        if "echo" in problems:
            return Injection(problems=problems)
        streamed = dialect == "chat" and is_on(body.get("stream"))
        flags = _flags(dialect, body, options, streamed=streamed)
        missing = [
            flag
            for flag in flags
            if not is_on(body.get(flag)) and not is_on(options.headers.get(_HEADERS.get(flag, "")))
        ]
        fields: Json = dict.fromkeys(missing, True)
        if options.adds_logprobs:
            # In completions the number counts alternatives, and 0 returns the sampled token's own logprob (run on 0.5.23).
            fields["logprobs"] = True if dialect == "chat" else 0 if options.logprobs == "sampled" else 1
        if usage := usage_options(body, running=False):
            fields["stream_options"] = usage
        kept = {key for flag, keys in _BROUGHT.items() if is_on(body.get(flag)) for key in keys}
        kept |= {"prompt_token_ids"} if is_on(body.get("return_prompt_token_ids")) else set()
        rules = StripRules(
            logprobs="logprobs" in fields,
            empty_deltas=streamed and not requested.logprobs,
            usage=bool(usage) and not requested.usage and not options.traits.forces_usage,
            keys=frozenset(key for flag in missing for key in _BROUGHT[flag]) - kept,
            meta_keys=frozenset(key for name in fields if _META not in missing for key in _IN_META.get(name, ())),
        )
        # Framed ids arrive in a separate event, which can be dropped as a whole, unless the client reads it itself.
        framed = {_FRAMED: "1"} if streamed and len(missing) == len(flags) else {}
        return Injection(fields, rules, problems, framed, _call_id(body, requested))

    def constrains(self, sampling: Mapping[str, Any], logprobs_mode: str | None) -> bool:
        """Return true for grammars, biases and penalties in every mode; top-k, top-p and min-p are applied after the logprobs.

        Penalties, the grammar's mask and `logit_bias` are applied in that order before the sampler computes logprobs
        (sampling_batch_info.py, sampler.py).
        """
        return has_grammar(sampling, _GRAMMARS) or changes_distribution(
            sampling, ALL if logprobs_mode in PROCESSED else BIASES
        )

    def can_replay(self, dialect: DialectName, body: Mapping[str, Any]) -> bool:
        """Return false for a chat stream with these flags: a 400 that must remain one."""
        return dialect != "sglang_generate" and (
            dialect != "chat" or not any(is_on(body.get(flag)) for flag in _NOT_STREAMED)
        )

    def must_replay(self, dialect: DialectName, body: Mapping[str, Any], options: CallOptions) -> bool:
        """Return true for chat with masks, which streams lack, or with experts, which they have of one choice only."""
        return dialect == "chat" and (returns_mask(body, options) or options.routed_experts)

    def strip(self, dialect: DialectName, response: Json, rules: StripRules) -> Json:
        if not rules.anything:
            return response
        if dialect == "sglang_generate":
            return {**response, "choices": [_native_without(choice, rules) for choice in response["choices"]]}
        shown = _without_ids(response, rules)
        choices = response.get("choices")
        if isinstance(choices, list):
            shown["choices"] = [without(choice, rules) for choice in choices]
        return shown

    def strip_chunk(self, dialect: DialectName, chunk: Json, rules: StripRules) -> Json | None:
        """Strip a chunk; drop the event with the ids, and events that only carry logprobs."""
        if not rules.anything:
            return chunk
        if dialect == "sglang_generate":
            return _native_without(chunk, rules)
        choices = chunk.get("choices")
        if choices:
            shown = [without(choice, rules) for choice in choices]
            if rules.empty_deltas and all(map(_only_carries_logprobs, choices)):
                return None
            return {**_without_ids(chunk, rules), "choices": shown}
        if rules.usage and chunk.get("usage") is not None and chunk.get("sglext") is None:
            return None
        if "sglext" not in chunk:
            return chunk
        rest = _without_ids(chunk, rules)
        # Other parts of sglext that the client requested remain; an otherwise empty chunk is dropped.
        return rest if "sglext" in rest or rest.get("usage") else None

    def prompt_ids_fields(self, dialect: DialectName, ids: Any) -> Json | None:
        """Return `input_ids` for chat, which replaces the template (0.5.23), a list for completions."""
        if dialect in GENERATES:
            return None if dialect == "generate" else {"input_ids": ids, "text": None}
        return {"input_ids": ids} if dialect == "chat" else {"prompt": ids}

    def must_send_usage(self, dialect: DialectName, finish: Json) -> bool:
        """Return true for completions, where only usage counts tokens. A chat stream has its ids in one list per choice."""
        return dialect == "completions"

    def tokens(self, dialect: DialectName, body: Mapping[str, Any], response: Json, found: Any = None) -> Tokens:
        """Unstreamed: in the choices. Streamed chat: in `sglext`, one list per choice."""
        extension = response.get("sglext") or {}
        choices: Sequence[Json] = response.get("choices") or ()
        is_native = dialect == "sglang_generate"
        if is_native:
            choices = _openai_choices(body, choices)
        outputs = extension.get("output_ids")
        sampled, problems, retractions = [], [], 0
        if isinstance(outputs, list) and len(outputs) != len(choices):
            problems.append("choice_count")
        versions = (response.get("metadata") or {}).get("weight_versions") if len(choices) == 1 else None
        for choice in choices:
            meta = choice.get("meta_info") or {}
            found_ids = _found_ids(choice, meta, outputs)
            sampled_choice = _sampled(choice, meta, found_ids, versions)
            if sampled_choice.routed_experts is None and len(choices) == 1:
                sampled_choice = replace(sampled_choice, routed_experts=extension.get("routed_experts"))
            sampled.append(sampled_choice)
            retractions += meta.get("num_retractions") or 0
            if is_native and sampled_choice.counted is None:
                problems.append("no_usage")
            if any(ids != found_ids[0] for ids in found_ids) or has_other_ids_as_names(choice, sampled_choice.ids):
                problems.append("ids_disagree")
        # Retracted tokens are recomputed, possibly under new weights.
        notes: Json = {"retractions": retractions} if retractions else {}
        # Of the first choice of each prompt: for the others, all of it is in the prefix cache. Usage has the count only on a
        # server with --enable-cache-report.
        firsts = choices[:: _samples(body)] if is_native else choices[:1]
        counts = [(choice.get("meta_info") or {}).get("cached_tokens") for choice in firsts]
        if cached := sum([count for count in counts if type(count) is int and count > 0]):
            notes[CACHED_TOKENS] = cached
        are_masked = any(_masked_logprobs(choice.get("meta_info")) for choice in choices)
        sampling = {"logprobs_mode": "processed_logprobs"} if are_masked else None
        return Tokens(extension.get("input_ids"), tuple(sampled), tuple(problems), notes, sampling)


def _check_ids(dialect: DialectName, body: Mapping[str, Any], traits: Traits) -> None:
    """Raise InvalidValue for a number in a prompt, or in one of several, that is no id: the server would exit (0.5.23, run).

    A text may be read as a number.
    """
    size, name = traits.vocabulary_size, _IDS.get(dialect, "")
    value = body.get(name)
    if size is None or not isinstance(value, list):
        return
    for ids in value if value and isinstance(value[0], list) else [value]:
        if not isinstance(ids, list) or not ids or (name == "prompt" and isinstance(ids[0], str)):
            continue
        for each in (min(ids), max(ids)) if set(map(type, ids)) == {int} else ids:
            with suppress(TypeError, ValueError, OverflowError):
                if not 0 <= int(each) < size:
                    message = f"{name}: {str(each)[:20]} is no token id of the engine, which has {size} of them."
                    raise InvalidValue(message, param=name)


def _problems(dialect: DialectName, body: Mapping[str, Any], requested: ResponseOptions) -> tuple[str, ...]:
    has_echo = dialect == "completions" and is_on(body.get("echo"))
    flagged = {
        "echo": has_echo,
        "beam_search": is_on(body.get("use_beam_search")),
        # Usage is the sum of all choices: lost and repeated tokens may cancel out.
        "uncounted": dialect == "completions" and not has_echo and is_on(body.get("stream")) and requested.choices != 1,
    }
    return tuple([code for code, holds in flagged.items() if holds])


def _flags(dialect: DialectName, body: Mapping[str, Any], options: CallOptions, *, streamed: bool) -> list[str]:
    """Return the flags for ids, and for what is configured beside them."""
    if streamed:
        flags = [_INPUT, _OUTPUT]
    elif dialect == "chat":
        flags = [_IDS_BOTH, _META]
        flags += [_MASK] if returns_mask(body, options) else []
        flags += [_EXPERTS] if options.routed_experts else []
    else:
        flags = [_IDS_BOTH]
    if is_on(body.get(_EXPERTS)) and not is_on(body.get(_META)):
        # The client reads experts in sglext, from which SGLang moves them to meta_info if that is requested.
        flags = [flag for flag in flags if flag not in {_META, _MASK}]
    return flags


def _call_id(body: Mapping[str, Any], requested: ResponseOptions) -> CallId | None:
    """Return how a call gets an id; None if it gets none.

    Several choices get other ids from the server. It aborts by prefix (0.5.23): an id that the client chose may match
    other calls as well, so it is not aborted.
    """
    return None if requested.choices != 1 or body.get("rid") is not None else _CALL_ID


def _inject_native(body: Mapping[str, Any], options: CallOptions) -> Injection:
    """Request logprobs of the sampled tokens, and the ids of prompts.

    A stream repeats the ids of its prompt in each event, so they are not requested if the request has them.
    """
    requested = options.requested
    has_text, has_ids = body.get("text") is not None, body.get("input_ids") is not None
    if not has_text and not has_ids and body.get("input_embeds") is None:
        return Injection()  # refused
    fields: Json = {}
    if not requested.token_ids and (has_text or (has_ids and not is_on(body.get("stream")))):
        fields["return_prompt_token_ids"] = True
    flags = body.get("return_logprob")
    if isinstance(flags, list):  # one for each prompt; the server refuses it for several samples
        if options.logprobs != "off" and requested.samples == 1 and len(flags) == requested.choices:
            fields |= _with_all_logprobs(body, [is_on(flag) for flag in flags])
    elif options.adds_logprobs:
        fields |= _with_all_logprobs(body, [False])
    with_logprobs = [index for index, flag in enumerate(flags) if is_on(flag)] if isinstance(flags, list) else []
    rules = StripRules(
        logprobs="return_logprob" in fields,
        keys=frozenset({"prompt_token_ids"} if "return_prompt_token_ids" in fields else ()),
        with_logprobs=frozenset(with_logprobs),
    )
    problems = ("beam_search",) if has_beams(body.get("sampling_params")) else ()
    return Injection(fields, rules, problems, call_id=_call_id(body, requested))


def _with_all_logprobs(body: Mapping[str, Any], requested: list[bool]) -> Json:
    """Return the fields that add logprobs of sampled tokens where they are not requested; empty if all are.

    `logprob_start_len` has no effect without logprobs, and must not have one then.
    """
    start = body.get("logprob_start_len")
    if all(requested):
        return {}
    if start in (None, -1):
        return {"return_logprob": True}
    starts = start if isinstance(start, list) else [start] * len(requested)
    kept = [own if flag else -1 for own, flag in zip(starts, requested, strict=False)]
    return {"return_logprob": True, "logprob_start_len": kept if any(requested) else -1}


def _native_without(choice: Json, rules: StripRules) -> Json:
    shown = {key: value for key, value in choice.items() if key not in rules.keys}
    if rules.logprobs and choice.get("index", 0) not in rules.with_logprobs:
        shown["meta_info"] = {
            key: value for key, value in choice["meta_info"].items() if not key.startswith(_LOGPROB_KEYS)
        }
    return shown


def _openai_choices(body: Mapping[str, Any], choices: Sequence[Json]) -> list[Json]:
    sent, samples = _NATIVE.prompt_ids(body), _samples(body)
    found = []
    for choice in choices:
        index, reason = choice.get("index", 0), choice["meta_info"].get("finish_reason")
        prompt = choice.get("prompt_token_ids")
        if prompt is None and sent is not None and index // samples < len(sent):
            prompt = sent[index // samples]
        found.append(
            {
                "index": index,
                "prompt_token_ids": prompt,
                "token_ids": choice["output_ids"],
                "finish_reason": reason.get("type") if isinstance(reason, dict) else reason,
                "matched_stop": reason.get("matched") if isinstance(reason, dict) else None,
                "meta_info": choice["meta_info"],
            }
        )
    return found


def _samples(body: Mapping[str, Any]) -> int:
    return _NATIVE.response_options(body).samples or 1


def _without_ids(response: Json, rules: StripRules) -> Json:
    """Return a copy of the top level without the stripped keys of `sglext`, and without `sglext` if it is then empty."""
    extension = response.get("sglext")
    if not isinstance(extension, dict) or not rules.keys:
        return dict(response)
    rest = {key: value for key, value in extension.items() if key not in rules.keys}
    has_content = any(value is not None for value in rest.values())
    return {
        key: rest if key == "sglext" else value for key, value in response.items() if key != "sglext" or has_content
    }


def _only_carries_logprobs(choice: Json) -> bool:
    """Return whether an event has only logprobs: with a parser, SGLang sends such events only if they were requested."""
    delta = choice.get("delta")
    has_content = delta is None or any(value is not None for value in delta.values())
    return not has_content and choice.get("finish_reason") is None and choice.get("logprobs") is not None


def _found_ids(choice: Json, meta: Json, outputs: Any) -> list[Any]:
    """Return one choice's ids from each place that has them."""
    index, pairs = index_of(choice), meta.get("output_token_logprobs")
    places = [choice.get("response_token_ids"), choice.get("token_ids")]
    if isinstance(outputs, list) and index < len(outputs):
        places.append(outputs[index])
    if pairs:
        places.append([pair[1] for pair in pairs])
    return [ids for ids in places if ids is not None]


def _sampled(choice: Json, meta: Json, found_ids: list[Any], versions: Any) -> Sampled:
    """Return one choice's tokens; logprobs are those paired with ids where possible."""
    ids, pairs = found_ids[0] if found_ids else None, meta.get("output_token_logprobs")
    logprobs: list[float | None] | None = [pair[0] for pair in pairs] if pairs else logprobs_of(choice)
    if masked := _masked_logprobs(meta):
        logprobs = list(masked)
    if ids == [] and choice.get("finish_reason") == "abort":
        logprobs = []  # SGLang may return one anyway (output_streamer.py:613)
    return Sampled(
        index=index_of(choice),
        prompt_ids=choice.get("prompt_token_ids"),
        ids=ids,
        logprobs=logprobs,
        finish_reason=choice.get("finish_reason"),
        stop_reason=choice.get("matched_stop"),
        counted=meta.get("completion_tokens"),
        prompt_counted=meta.get("prompt_tokens"),
        spans=spans_of(meta.get("weight_versions") or versions or None),
        routed_experts=meta.get("routed_experts"),
        sampling_mask=meta.get(_MASKS),
    )


def _masked_logprobs(meta: Any) -> list[float] | None:
    """Return the logprobs over the masks; None without them, and for lists (`sampling_logprobs_mode: support`)."""
    values = meta.get(_MASKED_LOGPROBS) if isinstance(meta, dict) and meta.get(_MASKS) else None
    return values if isinstance(values, list) and all(type(value) is float for value in values) else None
