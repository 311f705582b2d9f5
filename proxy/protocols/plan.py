"""The plan of a call: the request to send upstream, and how it differs from the client's.

It applies model names, the rollout's sampling rules and tools, and what the engine injects. The client's body is not
modified.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import orjson

from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects.base import GENERATES, Dialect, ErrorDialect, ResponseOptions, requested_usage
from proxy.protocols.dialects.translation import Translator
from proxy.protocols.engines.base import Engine, EngineCall, FollowUpRequest, Injection, Json, LogprobsLevel, Traits
from proxy.protocols.engines.quirks import Framing, Streaming, applicable, choose_framing
from proxy.protocols.response import ClientView
from proxy.protocols.sampling import SAMPLING_FIELDS, Sampling, apply_rules, served_as
from proxy.protocols.sse import EVENT_STREAM, StreamFormat
from proxy.protocols.token_annotations import TokenAnnotations
from proxy.protocols.whole_response import error_events
from proxy.trajectory.images import IMAGES, names_in
from proxy.trajectory.step import DEFAULT_POLICY, EXPERTS_START, EngineFacts

_STREAM = frozenset({"stream", "stream_options"})
_NO_CODES = frozenset[str]()
_SAMPLING = frozenset(SAMPLING_FIELDS)


@dataclass(frozen=True, slots=True)
class SessionPlace:
    """Where a call names its session for a router in front of engines: a header, or a field of the body with up to one dot.

    `of_thread`: it names its thread, by `agent` if the client names it, and not its rollout.
    """

    header: str | None
    field: str | None
    of_thread: bool = False
    agent: str | None = None


@dataclass(frozen=True, slots=True)
class CallOptions:
    """The options of a rollout's calls, from its opening and the configuration.

    `tokens`, `room_left` and `is_translated` are the call's own: `room_left` is the space in the context window, if a cap
    requires it; `is_translated`: the client reads another dialect, which has no options of chat streams.
    """

    sampling: Sampling = field(default_factory=Sampling)
    tools: tuple[Json, ...] = ()
    models: Mapping[str, str] = field(default_factory=dict)
    keep_reasoning: bool = True
    streaming: Streaming = "auto"
    logprobs: LogprobsLevel = "full"
    sampling_masks: bool = False
    routed_experts: bool = False
    tokens: TokenAnnotations | None = None
    room_left: int | None = None
    is_translated: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """A planned call. `request` is the client's body, `body` the one that is sent, `sent` the difference on the top level.

    `framing` is how the call is sent; `expected` are the problems that the engine is known to have with such a call.
    `wants_logprobs`: they are configured or requested, so a step without them lacks them. `translation`: the client's dialect,
    if the engine does not support it. `prompt_ids`: the prompt of a call that continues an earlier step, which replaces the
    messages or the text; `sent` does not repeat it. `abort`: see `Injection`.
    """

    step_id: str
    rollout_id: str
    endpoint: str
    dialect: Dialect
    engine: Engine
    engine_facts: EngineFacts
    response_options: ResponseOptions
    request: Json
    body: Json
    sent: Json
    view: ClientView
    model_asked: str | None
    model_served: str | None
    sampling: Json
    framing: Framing = "whole"
    wants_logprobs: bool = True
    headers: Mapping[str, str] = field(default_factory=dict)
    abort: FollowUpRequest | None = None
    policy: str = DEFAULT_POLICY
    policy_version: str | None = None
    policy_epoch: int = 0
    translation: Translator | None = None
    prompt_ids: list[int] | None = None
    problems: tuple[str, ...] = ()
    expected: frozenset[str] = frozenset()
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def error_dialect(self) -> ErrorDialect:
        """The client's dialect."""
        return self.translation or self.dialect

    @property
    def stream_format(self) -> StreamFormat:
        """The format of a stream to the client that is not the engine's own."""
        renderer = self.view.renderer
        return EVENT_STREAM if renderer is None else renderer.stream_format

    def error_events(self, body: bytes) -> bytes:
        """Return an error event for a stream that has begun, in the client's dialect; `body` is the error's JSON body."""
        renderer = self.view.renderer
        return error_events(body) if renderer is None else renderer.finish(None, body.decode("utf-8", "replace"))


def with_continuation(plan: Plan, ids: list[int] | None, facts: Mapping[str, Any]) -> Plan:
    """Return the plan with its continuation, and with these ids as the prompt. `facts` are recorded with the step."""
    extra = {**plan.extra, "continuation": facts}
    fields = None if ids is None else plan.engine.prompt_ids_fields(plan.dialect.name, ids)
    if fields is None:
        return replace(plan, extra=extra)
    if "return_routed_experts" in plan.sent["set"] and facts.get("kept"):
        # The experts of the last sampled token are known only once it is read as a part of a prompt.
        extra[EXPERTS_START] = fields["routed_experts_start_len"] = facts["kept"] - 1
    return replace(plan, body={**plan.body, **fields}, prompt_ids=ids, extra=extra)


def with_image_tokens(plan: Plan, tokens: Sequence[int]) -> Plan:
    """Return the plan of a call with images, with the tokens that may be their placeholder in the prompt."""
    return replace(plan, extra={**plan.extra, IMAGES: {**plan.extra[IMAGES], "candidates": tokens}})


def with_session(plan: Plan, place: SessionPlace, headers: Mapping[str, str]) -> Plan:
    """Return the plan with the name of its session; unchanged if the client itself names one, in `headers` or the body."""
    thread = (place.agent or _opening(plan.body)) if place.of_thread else ""
    name = blake2b(f"{plan.rollout_id}\0{thread}".encode(errors="surrogatepass"), digest_size=16).hexdigest()
    if place.header is not None:
        return plan if place.header.lower() in headers else replace(plan, headers={**plan.headers, place.header: name})
    outer, _, inner = (place.field or "").partition(".")
    value = plan.body.get(outer)
    if value is not None and (not inner or not isinstance(value, dict) or value.get(inner) is not None):
        return plan
    fields = {outer: {**(value or {}), inner: name} if inner else name}
    return replace(plan, body={**plan.body, **fields}, sent={**plan.sent, "set": {**plan.sent["set"], **fields}})


def _opening(body: Json) -> str:
    """Return a digest of the messages up to the first one of the user; empty for a body without messages."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return ""
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
    first = roles.index("user") + 1 if "user" in roles else len(messages)
    return blake2b(orjson.dumps(messages[:first]), digest_size=16).hexdigest()


def edit(body: Json, options: CallOptions, dialect: Dialect) -> tuple[Json, set[str]]:
    """Return the fields that the options set in a body, and those they remove from it (TokenTape's own fields)."""
    fields = {} if options.tokens is None else options.tokens.fields(body)
    model = body.get("model")
    if options.models and isinstance(model, str) and (served := served_as(model, options.models)) is not None:
        fields["model"] = served
    if dialect.name == "chat" and type(body.get("logprobs")) is int and body["logprobs"] == 1:
        fields["logprobs"] = True  # verifiers (fa7f5fa) sends 1; vLLM reads it as true, llama.cpp's server ignores it
    if options.tools and dialect.name not in GENERATES and not body.get("tools"):
        fields["tools"] = list(options.tools)
    placed, unset = dialect.place_sampling(
        body, *apply_rules(dialect.sampling(body), options.sampling, options.room_left)
    )
    return {**fields, **placed}, unset | ({"rollout_id"} & body.keys())


def make_plan(  # noqa: PLR0913 - a plan is all of this, and every argument has its name
    body: Json,
    *,
    options: CallOptions,
    step_id: str,
    rollout_id: str,
    endpoint: str,
    dialect: Dialect,
    engine: Engine,
    engine_facts: EngineFacts,
    logprobs_mode: str | None,
    traits: Traits | None = None,
    headers: Mapping[str, str] | None = None,
    policy: str = DEFAULT_POLICY,
    policy_at: tuple[str | None, int] = (None, 0),
    extra: Mapping[str, Any] | None = None,
) -> Plan:
    """Plan a call. `headers` are the client's; `policy_at` is the announced version and epoch. Raises UnprocessableRequest."""
    fields, unset = edits = edit(body, options, dialect)
    call = _engine_call(dialect, body, edits, traits or Traits(engine.kind), options, headers, step_id=step_id)
    images, framing = _images(body), _framing(engine, options, call)
    removed = _STREAM if framing == "replay" else frozenset[str]()
    call = replace(call, body=_without(call.body, removed)) if removed else call
    sent_body = {**call.body, **(injection := engine.inject(call)).fields}
    return Plan(
        step_id=step_id,
        rollout_id=rollout_id,
        endpoint=endpoint,
        dialect=dialect,
        engine=engine,
        engine_facts=engine_facts,
        response_options=call.response_options,
        request=body,
        body=sent_body,
        sent={"set": _changed(body, {**fields, **injection.fields}), "unset": sorted(unset | (removed & body.keys()))},
        view=_view(dialect, engine, injection, call.response_options, options, body, sent_body, framing),
        model_asked=_name(body.get("model")),
        model_served=_name(sent_body.get("model")) or call.traits.model,
        sampling=_sampling(dialect, sent_body, engine, call.traits, logprobs_mode or engine.logprobs_mode),
        framing=framing,
        wants_logprobs=call.wants_logprobs,
        headers=injection.headers,
        abort=injection.abort,
        policy=policy,
        policy_version=policy_at[0],
        policy_epoch=policy_at[1],
        problems=injection.problems,
        expected=_expected_problems(engine, call, framing),
        extra={**(extra or {}), **({} if framing == "whole" else {"streaming": framing}), **images},
    )


def _images(body: Json) -> Json:
    """Return the names of the images in a body, for `extra`; empty if it has none."""
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            for part in content:
                if isinstance(part, dict) and part.get("image_url") is not None:
                    return {IMAGES: {"ids": names_in(messages), "candidates": ()}}
    return {}


def _engine_call(
    dialect: Dialect,
    body: Json,
    edits: tuple[Json, Collection[str]],
    traits: Traits,
    options: CallOptions,
    headers: Mapping[str, str] | None,
    *,
    step_id: str,
) -> EngineCall:
    fields, unset = edits
    edited = _without(body, unset) | fields if unset or fields else body
    response_options = _response_options(dialect, body, edited)
    return EngineCall(
        dialect.name,
        edited,
        response_options,
        traits,
        options.keep_reasoning,
        options.logprobs,
        headers or {},
        step_id,
        sampling_masks=options.sampling_masks,
        routed_experts=options.routed_experts,
    )


def _expected_problems(engine: Engine, call: EngineCall, framing: Framing) -> frozenset[str]:
    found = applicable(engine.kind, call, live=framing == "live")
    return frozenset([code for quirk in found for code in quirk.codes]) if found else _NO_CODES


def _view(  # noqa: PLR0917 - the values of a plan that the client's view depends on
    dialect: Dialect,
    engine: Engine,
    injection: Injection,
    response_options: ResponseOptions,
    options: CallOptions,
    body: Json,
    sent_body: Json,
    framing: Framing,
) -> ClientView:
    model_asked, model_served = _name(body.get("model")), _name(sent_body.get("model"))
    is_counted, are_choices_counted = requested_usage(sent_body)
    return ClientView(
        dialect,
        engine,
        injection.strip_rules,
        response_options.choices,
        model=model_asked if model_asked != model_served else None,
        replay=framing == "replay",
        usage=response_options.usage,
        is_counted=is_counted,
        are_choices_counted=are_choices_counted,
        tokens=options.tokens,
    )


def _response_options(dialect: Dialect, body: Json, edited: Json) -> ResponseOptions:
    """Return the client's own options, with the number of choices of the body that is sent."""
    own = dialect.response_options(body)
    if edited is body:
        return own
    sent = dialect.response_options(edited)
    if (sent.samples, sent.choices) == (own.samples, own.choices):
        return own
    return replace(own, samples=sent.samples, choices=sent.choices)


def _without(body: Mapping[str, Any], fields: Collection[str]) -> Json:
    return {key: value for key, value in body.items() if key not in fields}


def _framing(engine: Engine, options: CallOptions, call: EngineCall) -> Framing:
    """Return how the call is sent upstream."""
    can_replay = engine.can_replay(call.dialect, call.body)
    if options.is_translated:
        call = replace(call, body=_without(call.body, {"stream_options"}))
    if options.tokens is None:
        return choose_framing(options.streaming, engine.kind, call, can_replay=can_replay)
    framing = choose_framing("replay", engine.kind, call, can_replay=can_replay)
    if framing == "live":
        raise UnprocessableRequest(
            "X-Reply-Tokens and X-Reply-Ids require an unstreamed call to the engine, which is not "
            "possible for this stream. Remove `stream` or the fields that require it.",
            param="stream",
        )
    return framing


def _changed(body: Json, fields: Json) -> Json:
    """Return the fields that differ from the client's."""
    return {key: value for key, value in fields.items() if key not in body or body[key] != value}


def _sampling(dialect: Dialect, body: Json, engine: Engine, traits: Traits, logprobs_mode: str | None) -> Json:
    """Return the sampling parameters: as sent, else the engine's default, if it is known; and the logprobs mode.

    The defaults apply to chat and completions: vLLM (0.32.0) and SGLang (0.5.23) use none of them for their generate endpoints.
    """
    sent = {key: value for key, value in dialect.sampling(body).items() if value is not None}
    defaults = (traits.sampling_defaults or {}) if dialect.name not in GENERATES else {}
    recorded = {} if _SAMPLING.isdisjoint(sent) else {key: sent[key] for key in SAMPLING_FIELDS if key in sent}
    is_constrained = engine.constrains({**defaults, **sent}, logprobs_mode)
    return {**defaults, **recorded, "logprobs_mode": logprobs_mode, "constrained": is_constrained}


def _name(value: Any) -> str | None:
    return value if isinstance(value, str) else None
