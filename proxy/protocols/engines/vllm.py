"""vLLM: ids and logprobs on request, streamed and unstreamed.

Verified on vLLM 0.32.0 (V1 engine, CPU build, parsers hermes and qwen3).

Rule 1: injection never adds or removes a key of a response; it turns null into a value and adds stream events. Stripping
        sets the value to null again and drops the added events.
Rule 2: each stream must count its tokens: ids alone cannot show a lost or repeated event. `include_usage` adds an event and
        moves `system_fingerprint` to it from the finish; both are undone. With several choices, each event counts its own
        choice (`continuous_usage_stats`), since a sum cannot show that one choice lost what another repeated.
Rule 3: vLLM must still refuse a body that it refuses without injection.
Rule 4: a call that is aborted by its id returns what it sampled until then; an unstreamed call that is disconnected returns
        nothing. On a server that can abort by id, calls therefore get one (`request_id`), in the format of the server's.
        Such an abort finds nothing behind a gateway that sets X-Request-Id, or at another API server (--api-server-count,
        read): the call is then disconnected as elsewhere.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from proxy.protocols.dialects.base import DialectName, Json, TranslationOptions, is_on, text_or_none
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
    FollowUpRequest,
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
    has_other_ids_as_names,
    has_running_usage,
    index_of,
    logprobs_of,
    requests_no_tokens,
    sampling_defaults,
    spans_of,
    tools_of,
    usage_options,
    version_numbers,
)
from proxy.trajectory.step import PROCESSED

_OF_THE_PROMPT = ("prompt_token_ids", "mm_placeholders")  # both are returned by `return_token_ids`


def _inject_generate(body: Mapping[str, Any], options: CallOptions, call_id: CallId | None) -> Injection:
    """Request the prompt's ids, which image placeholders may lengthen, and logprobs. Sampled ids are always returned."""
    sampling = body.get("sampling_params")
    if "token_ids" not in body or not isinstance(sampling, dict):
        return Injection()  # refused, with an error message that shows the body
    fields: Json = {}
    if not options.requested.token_ids:
        fields["return_token_ids"] = True
    # With `logprob_token_ids`, `logprobs` must equal their number, and may then exceed the engine's limit.
    if options.adds_logprobs and sampling.get("logprob_token_ids") is None:
        fields["sampling_params"] = {**sampling, "logprobs": 0}
    if usage := usage_options(body, running=options.requested.choices != 1):
        fields["stream_options"] = usage
    forced = sampling.get("trace_decode_token_ids") is not None
    rules = StripRules(
        token_ids="return_token_ids" in fields,
        logprobs="sampling_params" in fields,
        usage=_strips_usage(options, usage),
        running_usage=_strips_running_usage(body, options, usage),
    )
    return Injection(fields, rules, ("forced_tokens",) if forced else (), call_id=call_id)


def _strips_usage(options: CallOptions, usage: Json) -> bool:
    """Return whether to strip the usage event that these injected `stream_options` add: not if the server always sends it."""
    return bool(usage) and not options.requested.usage and not options.traits.forces_usage


def _strips_running_usage(body: Mapping[str, Any], options: CallOptions, usage: Json) -> bool:
    is_added = is_on(usage.get("continuous_usage_stats")) and not has_running_usage(body)
    return is_added and not options.traits.forces_usage


def _strip_generate(response: Json, rules: StripRules) -> Json:
    if not rules.of_choices:
        return response
    shown = dict(response)
    if rules.token_ids:
        shown |= {key: None for key in _OF_THE_PROMPT if key in shown}
    return _without_logprobs(shown, rules)


def _strip_generate_chunk(chunk: Json, rules: StripRules) -> Json | None:
    if rules.usage and not chunk.get("choices") and chunk.get("usage") is not None:
        return None
    if rules.running_usage and chunk.get("choices") and "usage" in chunk:
        chunk = {**chunk, "usage": None}
    has_prompt = rules.token_ids and any(key in chunk for key in _OF_THE_PROMPT)
    if not has_prompt and not (rules.logprobs and chunk.get("choices")):
        return chunk
    shown = {key: value for key, value in chunk.items() if not (has_prompt and key in _OF_THE_PROMPT)}
    return _without_logprobs(shown, rules)


def _without_logprobs(shown: Json, rules: StripRules) -> Json:
    choices = shown.get("choices")
    if not rules.logprobs or not isinstance(choices, list):
        return shown
    return {**shown, "choices": [{**choice, "logprobs": None} for choice in choices]}


def _disagrees(choice: Json) -> bool:
    """Return whether the logprobs of generate are of other ids; with output mode "text" they have no ids."""
    content = (choice.get("logprobs") or {}).get("content") or ()
    pairs = zip(content, choice.get("token_ids") or (), strict=False)
    return any(entry.get("token_id", token_id) != token_id for entry, token_id in pairs)


_CALL_HEADER = "x-request-id"  # precedes the body's `request_id` (0.32.0, run)
# With --enable-scale-out, and with VLLM_SERVER_DEV_MODE=1 (0.32.0, run).
_ABORTS = ("/inference/v1/abort_requests", "/abort_requests")
_PARSE: Final = "/v1/chat/completions/derender"
_NOT_PARSED: Final = frozenset(
    {"stream", "stream_options", "kv_transfer_params", "prompt_token_ids", "logprobs", "top_logprobs"}
)
_GRAMMARS = ("structured_outputs",)  # 0.32.0 ignores the guided_ fields, which vLLM had before 0.12

_QUIRKS: Final[tuple[Quirk, ...]] = (
    Quirk(
        CHAT, "always", "`include_reasoning: false` with any parser: no ids and no logprobs (overridden by "
        "default).", ("reasoning_withheld",),
        "seen on 0.32.0; chat_completion/serving.py:702-715, 1004-1008",
        lambda body, options: body.get("include_reasoning") is False and not options.keep_reasoning,
    ),
    Quirk(
        COMPLETIONS, "always", "`echo` with ids omits the echoed prompt, so no ids are requested.", ("echo",),
        "seen on 0.32.0; completion/serving.py:341, 537", has("echo"),
    ),
    Quirk(
        COMPLETIONS, "always", "`max_tokens: 0` still samples one token.", ("phantom_token",),
        "seen on 0.32.0; completion/protocol.py:377", requests_no_tokens,
    ),
    Quirk(
        BOTH, "always", "Beam search: the logprobs are not those of a sampled path.", ("beam_search",),
        "seen on 0.32.0", has("use_beam_search"),
    ),
    Quirk(
        CHAT, "always", "`top_logprobs` without `logprobs`: the engine returns 400.", ("no_logprobs",),
        "seen on 0.32.0; chat_completion/protocol.py:884",
        lambda body, _: bool(body.get("top_logprobs")) and not is_on(body.get("logprobs")),
    ),
)  # fmt: skip

# Since this version, developer messages are passed to templates without a developer role (renderers/hf.py:804). Earlier
# versions may drop them (Qwen3's template does). The exact version is unknown (PR #43590 was merged after 0.22).
_DEVELOPERS: Final = (0, 32)


class Vllm(Engine):
    """vLLM ≥ 0.10 (the first with `return_token_ids` on both endpoints); verified on 0.32.0.

    `has_prompt_field`: its chat requests have the field `prompt_token_ids` (vllm-project/vllm#55771, in review).
    `abort_path`: where it aborts calls by their ids.
    """

    def __init__(self, *, has_prompt_field: bool = False, abort_path: str | None = None) -> None:
        self._has_prompt_field = has_prompt_field
        self._call_ids: Mapping[DialectName, CallId] = {}
        if abort_path is not None:
            self.headers_read = (_CALL_HEADER,)
            self._call_ids = {
                "chat": CallId("request_id", abort_path, lambda each: {"request_ids": [f"chatcmpl-{each}"]}),
                # Each prompt has an id of its own, which ends in its index.
                "completions": CallId("request_id", abort_path, lambda each: {"request_ids": [f"cmpl-{each}-0"]}),
                "generate": CallId("request_id", abort_path, lambda each: {"request_ids": [f"generate-tokens-{each}"]}),
            }

    kind = "vllm"
    quirks = _QUIRKS
    logprobs_mode = "raw_logprobs"
    returns_prompt_ids = True
    drops_half_characters = True  # 0.32.0; SGLang 0.5.23 does not
    names_alternatives = True
    probe_paths = ("/version",)
    owners = ("vllm", "tokentape-simulator")
    tokenize_path = "/tokenize"
    detokenize_path = "/detokenize"
    detokenized_field = "prompt"
    counts_messages = True
    loads_adapters = True
    shape = StreamShape(
        head=frozenset({"id", "object", "created", "model"}),
        call_delta={"content": None},
        call={},
        choice=("stop_reason",),
        early=("token_ids",),
        first=("prompt_token_ids", "prompt_text"),
        last=("system_fingerprint",),
        null_usage=False,
    )

    def identify(self, probed: Probed) -> Traits | None:
        """It has /version only, or is the owner of its models."""
        version = text_or_none(probed.facts("/version").get("version"))
        return Traits(self.kind, version) if version is not None or probed.owner in self.owners else None

    def traits_requests(self, traits: Traits) -> tuple[TraitsRequest, ...]:
        """Request its sampling defaults, whether chat requests have a field for prompt ids, and where it aborts calls.

        The defaults, for chat and completions, are of the model's generation_config.json and --override-generation-config. Only
        a rendered request shows them, which is a 403 without --enable-scale-out.
        """
        render = TraitsRequest(
            "/v1/chat/completions/render",
            {"messages": [{"role": "user", "content": "."}], "max_tokens": 1},
            lambda answer: {"sampling_defaults": sampling_defaults(answer.body, "sampling_params")},
        )
        openapi = TraitsRequest(
            "/openapi.json",
            None,
            lambda answer: {
                "has_prompt_field": has_prompt_field(answer.body),
                "abort_path": abort_path(answer.body),
                "parses_ids": _has_path(answer.body, _PARSE),
            },
        )
        return render, openapi

    def for_traits(self, traits: Traits) -> Engine:
        if not traits.has_prompt_field and traits.abort_path is None:
            return self
        return Vllm(has_prompt_field=traits.has_prompt_field, abort_path=traits.abort_path)

    def translation_options(self, configured: TranslationOptions, version: str | None) -> TranslationOptions:
        has_developers = version_numbers(version or "") >= _DEVELOPERS
        return replace(super().translation_options(configured, version), has_developers=has_developers)

    def template_fields(self, body: Mapping[str, Any]) -> Json:
        """Return the template arguments that chat derives from `reasoning_effort`, which the tokenize endpoint does not accept.

        vLLM 0.32.0: entrypoints/openai/chat_completion/protocol.py:621.
        """
        fields = super().template_fields(body)
        effort = fields.pop("reasoning_effort", None)
        if effort is None:
            return fields
        own = fields.get("chat_template_kwargs")
        own = own if isinstance(own, Mapping) else {}
        kwargs = {"enable_thinking": effort != "none", **own, "reasoning_effort": effort}
        return {**fields, "chat_template_kwargs": kwargs}

    def inject(self, dialect: DialectName, body: Mapping[str, Any], options: CallOptions) -> Injection:
        """Request `return_token_ids`, and `logprobs` if they are configured, unless the call does not permit them."""
        requested = options.requested
        if dialect == "generate":
            return _inject_generate(body, options, self._call_id(dialect, body, options))
        if PROMPT_FIELDS.get(dialect) not in body:
            return Injection()  # refused, with an error message that has the number of fields of the body
        problems = tuple(_problems(dialect, body, keep_reasoning=options.keep_reasoning))
        if "echo" in problems:
            # With ids the echoed prompt disappears from `text`; with logprobs, the prompt's are included.
            return Injection(problems=problems)
        fields: Json = {}
        if not requested.token_ids:
            fields["return_token_ids"] = True
        # In chat, `top_logprobs` without logprobs must remain a 400.
        if options.adds_logprobs and (dialect == "completions" or not body.get("top_logprobs")):
            fields["logprobs"] = True if dialect == "chat" else 0
        withheld = dialect == "chat" and body.get("include_reasoning") is False and options.keep_reasoning
        if withheld:
            fields["include_reasoning"] = True
        if usage := usage_options(body, running=requested.choices != 1):
            fields["stream_options"] = usage
        rules = StripRules(
            token_ids="return_token_ids" in fields,
            logprobs="logprobs" in fields,
            # If the client requests either, vLLM itself sends the events with an empty delta.
            empty_deltas=dialect == "chat" and not requested.token_ids and not requested.logprobs,
            reasoning=withheld,
            usage=_strips_usage(options, usage),
            running_usage=_strips_running_usage(body, options, usage),
        )
        return Injection(fields, rules, problems, call_id=self._call_id(dialect, body, options))

    def _call_id(self, dialect: DialectName, body: Mapping[str, Any], options: CallOptions) -> CallId | None:
        """Return how a call gets an id; None if its client chooses one, or if it has several choices, whose ids differ."""
        is_named = "request_id" in body or is_on(options.headers.get(_CALL_HEADER))
        has_one = options.requested.choices == 1 and not is_on(body.get("use_beam_search"))
        return self._call_ids.get(dialect) if has_one and not is_named else None

    def constrains(self, sampling: Mapping[str, Any], logprobs_mode: str | None) -> bool:
        """Return true for a grammar in any mode: its bitmask is applied before the sampler (gpu_model_runner.py).

        Everything else affects the `processed` modes only. `tool_choice: auto` has a grammar if a tool is strict, or if
        `parallel_tool_calls` is false (parser/abstract_parser.py; with most tool parsers).
        """
        single_call = sampling.get("parallel_tool_calls") is False and sampling.get("tool_choice") != "none"
        return (
            has_grammar(sampling, _GRAMMARS)
            or (single_call and bool(tools_of(sampling)))
            or (logprobs_mode in PROCESSED and changes_distribution(sampling, ALL))
        )

    def can_replay(self, dialect: DialectName, body: Mapping[str, Any]) -> bool:
        """Return false with prompt logprobs, which are a 400 in a stream, and for generate: its streams lose nothing."""
        return dialect != "generate" and body.get("prompt_logprobs") is None

    def strip(self, dialect: DialectName, response: Json, rules: StripRules) -> Json:
        if dialect == "generate":
            return _strip_generate(response, rules)
        if not rules.of_choices:
            return response
        shown = {**response}
        if rules.token_ids and shown.get("prompt_token_ids") is not None:
            shown["prompt_token_ids"] = None
        if isinstance(shown.get("choices"), list):
            shown["choices"] = _strip_choices(shown["choices"], rules)
        return shown

    def strip_chunk(self, dialect: DialectName, chunk: Json, rules: StripRules) -> Json | None:
        """Set injected values to null; drop events that injection caused."""
        if dialect == "generate":
            return _strip_generate_chunk(chunk, rules)
        choices = chunk.get("choices")
        if not choices:
            return None if rules.usage and chunk.get("usage") is not None else chunk
        if rules.running_usage and "usage" in chunk:
            chunk = {key: value for key, value in chunk.items() if key != "usage"}
        if not rules.of_choices:
            return chunk
        hid = _strip_choices(choices, rules)
        # vLLM sends an empty delta only if ids or logprobs were requested. `{"content": null}` and `{"content": ""}` occur
        # without any flag and remain.
        may_be_empty = rules.empty_deltas and not hid[0].get("delta")
        if may_be_empty and all(each.get("delta") == {} and each.get("finish_reason") is None for each in hid):
            return None
        shown = {**chunk, "choices": hid}
        if rules.token_ids and shown.get("prompt_token_ids") is not None:
            shown["prompt_token_ids"] = None
        return shown

    def prompt_ids_fields(self, dialect: DialectName, ids: Any) -> Json | None:
        """Return a list for completions; for chat the field, or `kv_transfer_params` (0.32.0), which replace the rendering."""
        if dialect == "generate":
            return {"token_ids": ids}
        if dialect == "chat" and self._has_prompt_field:
            return {"prompt_token_ids": ids}
        return {"kv_transfer_params": {"prompt_token_ids": ids}} if dialect == "chat" else {"prompt": ids}

    def parse_request(
        self, body: Mapping[str, Any], prompt: Iterable[int], ids: Iterable[int]
    ) -> FollowUpRequest | None:
        """Return a request to derender them, which 0.32.0 has with --enable-scale-out."""
        chat = {key: value for key, value in body.items() if key not in _NOT_PARSED}
        choice = {"index": 0, "token_ids": [*ids], "finish_reason": "stop", "stop_reason": None}
        given = [*prompt]
        response = {"request_id": "", "choices": [choice], "prompt_token_ids": given, "output_mode": "tokens"}
        fields = {"generate_response": response, "prompt_token_ids": given, "prompt_tokens": len(given)}
        return FollowUpRequest(_PARSE, {"model": body.get("model"), **fields, "chat_request": chat})

    def must_send_usage(self, dialect: DialectName, finish: Json) -> bool:
        """Return true for a finish without the fingerprint, which is then on the usage event. Streams of generate have none."""
        return dialect != "generate" and "system_fingerprint" not in finish

    def tokens(self, dialect: DialectName, body: Mapping[str, Any], response: Json, found: Any = None) -> Tokens:
        """Chat and generate: one prompt, on the top level. Completions: each choice has its own.

        With --return-sampling-mask, which requires processed logprobs (0.32.0, config/vllm.py), generate returns masks, and the
        logprobs are over their tokens: only penalties, biases and a grammar change them from the model's.
        """
        is_generate = dialect == "generate"
        sampled: list[Sampled] = []
        problems: tuple[str, ...] = ()
        for choice in response.get("choices") or ():
            ids = choice.get("token_ids")
            sampled.append(
                Sampled(
                    index=index_of(choice),
                    prompt_ids=choice.get("prompt_token_ids"),
                    ids=ids,
                    logprobs=logprobs_of(choice),
                    finish_reason=choice.get("finish_reason"),
                    stop_reason=choice.get("stop_reason"),
                    spans=spans_of(choice.get("weight_versions")) if is_generate else None,
                    routed_experts=choice.get("routed_experts"),
                    sampling_mask=choice.get("sampling_mask") if is_generate else None,
                )
            )
            if has_other_ids_as_names(choice, ids) or (is_generate and _disagrees(choice)):
                problems = ("ids_disagree",)
        prompt = response.get("prompt_token_ids")
        if not is_generate or all(each.sampling_mask is None for each in sampled):
            return Tokens(prompt, tuple(sampled), problems)
        sent = sent if isinstance(sent := body.get("sampling_params"), dict) else {}
        is_constrained = has_grammar(sent, _GRAMMARS) or changes_distribution(sent, BIASES)
        sampling = {"logprobs_mode": "processed_logprobs", "constrained": is_constrained}
        return Tokens(prompt, tuple(sampled), problems, sampling=sampling)


def _has_path(described: Any, path: str) -> bool:
    """Return whether an OpenAPI document has a path; vLLM 0.32.0 does not list a disabled one."""
    paths = described.get("paths") if isinstance(described, dict) else None
    return isinstance(paths, dict) and path in paths


def has_prompt_field(described: Any) -> bool:
    """Return whether an OpenAPI document has `prompt_token_ids` among the fields of chat requests."""
    for name in ("components", "schemas", "ChatCompletionRequest", "properties"):
        described = described.get(name) if isinstance(described, dict) else None
    return isinstance(described, dict) and "prompt_token_ids" in described


def abort_path(described: Any) -> str | None:
    """Return the path of an OpenAPI document at which calls are aborted by their ids; None if it has none.

    A server that serves none of them describes neither (0.32.0, run).
    """
    return next((path for path in _ABORTS if _has_path(described, path)), None)


def _problems(dialect: DialectName, body: Mapping[str, Any], *, keep_reasoning: bool) -> list[str]:
    problems = []
    if dialect == "completions" and is_on(body.get("echo")):
        problems.append("echo")
    if is_on(body.get("use_beam_search")):
        problems.append("beam_search")  # its logprobs belong to no sampled path
    if dialect == "completions" and body.get("max_tokens") == 0:
        problems.append("phantom_token")  # the engine samples one token anyway
    if dialect == "chat" and body.get("include_reasoning") is False and not keep_reasoning:
        problems.append("reasoning_withheld")
    return problems


def _strip_choices(choices: list[Json], rules: StripRules) -> list[Json]:
    """Return choices with injected values set to null. No key is added or removed; the order is kept."""
    stripped: list[Json] = []
    for choice in choices:
        shown = {**choice}
        if rules.token_ids:
            for key in ("token_ids", "prompt_token_ids"):
                if key in shown:
                    shown[key] = None
        if rules.logprobs and "logprobs" in shown:
            shown["logprobs"] = None
        if rules.reasoning:
            for key in ("message", "delta"):
                if isinstance(shown.get(key), dict):
                    shown[key] = _without_reasoning(shown[key], is_delta=key == "delta")
        stripped.append(shown)
    return stripped


def _without_reasoning(message: Json, *, is_delta: bool) -> Json:
    """Return a message as vLLM sends it without reasoning (seen on 0.32.0, with a parser).

    The reasoning is null in a whole message and in a delta with content or tool calls; another delta becomes empty.
    """
    if not is_delta:
        return message if message.get("reasoning") is None else {**message, "reasoning": None}
    rest = {key: value for key, value in message.items() if key != "reasoning"}
    if not (rest.get("content") or rest.get("tool_calls")):
        return {} if rest == {"content": None} else rest
    first: Json = {key: rest.pop(key) for key in ("role", "content") if key in rest}
    return {**first, "reasoning": None, **rest}
