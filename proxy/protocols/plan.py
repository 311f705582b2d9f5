"""The plan of a call: the request to send upstream, and how it differs from the client's.

It applies model names, the rollout's sampling rules and tools, and what the engine injects. The client's body is not
modified. A plan depends on the body without its prompt, so it is prepared once for the calls with the same other fields.

A call in another format has an adapter. A call of a dialect that is translated to chat is sent as a chat call; its response is
rendered in the client's dialect, also from a stored step.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import chain
from typing import Any, Final, Self

import orjson

from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects import DIALECTS, METHODS, TRANSLATORS
from proxy.protocols.dialects.base import (
    GENERATES,
    NO_REFERENCES,
    CallIdentity,
    Dialect,
    ErrorDialect,
    Json,
    References,
    ResolvedReferences,
    ResponseOptions,
    ResponseRenderer,
    TranslationOptions,
    Translator,
    is_on,
    requested_usage,
    text_or_none,
)
from proxy.protocols.engines import ENGINES
from proxy.protocols.engines.base import (
    CallId,
    CallOptions,
    Engine,
    FollowUpRequest,
    Framing,
    Injection,
    has_more_than_text,
)
from proxy.protocols.json_texts import KnownPrompt
from proxy.protocols.response import MALFORMED, ClientView, TokenAnnotations
from proxy.protocols.sampling import SAMPLING_FIELDS, Sampling, apply_rules, served_as
from proxy.protocols.whole_response import error_events, render_as_stream
from proxy.trajectory.images import IMAGES, has_images, names_in
from proxy.trajectory.json_bytes import to_json_bytes
from proxy.trajectory.step import DEFAULT_POLICY, EXPERTS_START, EngineFacts, Step

_STREAM: Final = frozenset({"stream", "stream_options"})
_BYTES_PER_PLAN: Final = 4096
_NO_EXTRA: Final[Mapping[str, Any]] = {}


@dataclass(frozen=True, slots=True)
class SessionPlace:
    """Where a call names its session for a router in front of engines."""

    header: str | None
    field: str | None  # of the body, with up to one dot
    of_thread: bool = False  # it names its thread instead of its rollout
    agent: str | None = None  # the thread, if the client names one


@dataclass(frozen=True, slots=True)
class Plan:
    """A planned call."""

    # Of all calls of the same form.
    endpoint: str
    dialect: Dialect
    engine: Engine
    engine_facts: EngineFacts
    response_options: ResponseOptions
    sent: Json  # the difference between the client's body and the sent one on the top level
    view: ClientView
    model_asked: str | None
    model_served: str | None
    sampling: Json
    framing: Framing
    wants_logprobs: bool  # they are configured or requested, so their absence is a problem
    headers: Mapping[str, str]
    problems: tuple[str, ...]
    expected: frozenset[str]  # the engine's known problems with such a call
    extra: Mapping[str, Any]

    # Of the call.
    step_id: str = ""
    rollout_id: str = ""
    request: Json = field(default_factory=dict)  # the client's body
    body: Json = field(default_factory=dict)  # the sent body
    abort: FollowUpRequest | None = None  # the request that ends the call (see `Injection`)
    policy: str = DEFAULT_POLICY
    policy_version: str | None = None
    policy_epoch: int = 0
    translation: Translator | None = None  # the client's dialect, if the engine does not support it
    # The ids of a call that continues an earlier step, which replace the messages or the text; `sent` does not repeat them.
    prompt: KnownPrompt | None = None
    before: Step | None = None  # what was sampled before, of a resumed call: its ids are the end of `prompt`

    @property
    def error_dialect(self) -> ErrorDialect:
        """The client's dialect."""
        return self.translation or self.dialect

    def error_events(self, body: bytes) -> bytes:
        """Return an error event for a stream that has begun, in the client's dialect; `body` is the error's JSON body."""
        renderer = self.view.renderer
        return error_events(body) if renderer is None else renderer.finish(None, body.decode("utf-8", "replace"))


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished call."""

    end: bytes  # withheld from the client until the step is stored
    step: Step
    broken: bool  # the client's connection must end like the engine's: without a proper end
    status: int | None = None  # replaces the engine's if its response could not be converted


def with_continuation(plan: Plan, prompt: KnownPrompt | None, facts: Mapping[str, Any]) -> Plan:
    """Return the plan with its continuation, and with these ids as the prompt. `facts` are recorded with the step."""
    extra = {**plan.extra, "continuation": facts}
    given = None if prompt is None else orjson.Fragment(b"[%b]" % prompt.text)
    is_ids = given is None or plan.dialect.name in GENERATES  # the client's own
    fields = None if is_ids else plan.engine.prompt_ids_fields(plan.dialect.name, given)
    if fields is None:
        return replace(plan, extra=extra)
    if "return_routed_experts" in plan.sent["set"] and facts.get("kept"):
        # The experts of the last sampled token are known only once it is read as a part of a prompt.
        extra[EXPERTS_START] = fields["routed_experts_start_len"] = facts["kept"] - 1
    return replace(plan, body={**plan.body, **fields}, prompt=prompt, extra=extra)


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
    """Return the fields that the options set in a body, and the fields that they remove (TokenTape's own)."""
    fields: Json = {}
    model = body.get("model")
    if options.models and isinstance(model, str) and (served := served_as(model, options.models)) is not None:
        fields["model"] = served
    if dialect.name == "chat" and type(body.get("logprobs")) is int and body["logprobs"] == 1:
        fields["logprobs"] = True  # verifiers (fa7f5fa) sends 1; vLLM reads it as true, llama.cpp's server ignores it
    if options.tools and dialect.name not in GENERATES and not body.get("tools"):
        fields["tools"] = list(options.tools)
    unset = {"rollout_id"} & body.keys()
    rules = options.sampling
    if not (rules.override or rules.default or rules.cap):
        return fields, unset
    changes = apply_rules(dialect.sampling(body), rules, options.room_left)
    placed, removed = dialect.place_sampling(body, *changes)
    return {**fields, **placed}, unset | removed


@dataclass(frozen=True, slots=True)
class PreparedPlan:
    """What the plans of calls with the same `template_of` and options have in common.

    `plan` lacks what is a call's own. `fields` are set in the body once `unset` are removed. `call_id`: see `Injection`.
    """

    plan: Plan
    fields: Json
    unset: set[str]
    call_id: CallId | None

    def for_call(
        self,
        body: Json,
        *,
        step_id: str,
        rollout_id: str,
        policy: str = DEFAULT_POLICY,
        policy_at: tuple[str | None, int] = (None, 0),
        extra: Mapping[str, Any] = _NO_EXTRA,
        may_have_images: bool = True,
    ) -> Plan:
        """Return the plan of a call. `policy_at` is the announced version and epoch."""
        plan, fields, sent, abort = self.plan, self.fields, self.plan.sent, None
        if self.call_id is not None:
            call_id = blake2b(step_id.encode(), digest_size=16).hexdigest()
            abort = FollowUpRequest(self.call_id.path, self.call_id.aborting(call_id))
            added = {self.call_id.field: call_id}
            fields, sent = fields | added, {**sent, "set": sent["set"] | added}
        kept = {key: value for key, value in body.items() if key not in self.unset} if self.unset else body
        extra = {**extra, **plan.extra}
        if may_have_images and has_images(messages := body.get("messages")):
            extra[IMAGES] = {"ids": names_in(messages), "candidates": ()}
        return replace(
            plan,
            step_id=step_id,
            rollout_id=rollout_id,
            request=body,
            body={**kept, **fields},
            sent=sent,
            abort=abort,
            policy=policy,
            policy_version=policy_at[0],
            policy_epoch=policy_at[1],
            extra=extra,
        )


class PreparedPlans(dict[bytes, PreparedPlan]):
    """The prepared plans of the calls of an endpoint, by all that they depend on, of at most about `max_bytes`.

    It is a dict, because each call reads it. `size`: their approximate memory in bytes.
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._max_bytes = max_bytes
        self.size = 0

    def keep(self, key: bytes, plan: PreparedPlan) -> None:
        """Keep a plan; all earlier plans are dropped if there is no room for it."""
        size = _BYTES_PER_PLAN + 3 * len(key)  # the plan refers to the values of the template
        if self.size + size > self._max_bytes:
            self.clear()
            self.size = 0
        if size <= self._max_bytes:
            self.size += size
            self[key] = plan


def has_lists(messages: Any) -> bool:
    """Return whether the content of a message is a list of parts."""
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and isinstance(message.get("content"), list):
            return True
    return False


def template_of(body: Json, dialect: Dialect, rules: Sampling, *, has_lists: bool) -> Json | None:
    """Return a body with only the facts about its prompt that a plan depends on, in place of the prompt.

    None if a plan may depend on the whole prompt, or if a rule replaces it. `has_lists`: messages have lists of parts.
    """
    name = dialect.prompt_field
    prompt = body.get(name)
    if isinstance(prompt, str):
        form: Any = ""
    elif isinstance(prompt, list) and name in {"messages", "token_ids"}:
        form = [has_more_than_text(body)] if has_lists else []
    else:
        return None
    return None if name in rules.override else {**body, name: form}


def prepare(
    body: Json,
    *,
    endpoint: str,
    options: CallOptions,
    engine: Engine,
    engine_facts: EngineFacts,
    logprobs_mode: str | None,
    tokens: TokenAnnotations | None = None,
) -> PreparedPlan:
    """Prepare the plans of calls like this one. `logprobs_mode` is the configured mode. Raises UnprocessableRequest."""
    dialect = DIALECTS[endpoint]
    edited, requested = body, dialect.response_options(body)
    fields, unset = edit(body, options, dialect)
    if tokens is not None:
        fields = {**tokens.fields(body), **fields}
    if fields or unset:
        edited = {key: value for key, value in body.items() if key not in unset} | fields
        sent = dialect.response_options(edited)
        requested = replace(requested, samples=sent.samples, choices=sent.choices)
    if requested != options.requested:
        options = replace(options, requested=requested)
    framing = _framing(edited, dialect, engine, options, must_replay=tokens is not None)
    if framing == "replay":
        unset |= _STREAM
        edited = {key: value for key, value in edited.items() if key not in _STREAM}
    quirks = engine.expected_quirks(dialect.name, edited, options, live=framing == "live")
    injection = engine.inject(dialect.name, edited, options)
    sent_body, fields = {**edited, **injection.fields}, {**fields, **injection.fields}
    changed = {key: value for key, value in fields.items() if key not in body or body[key] != value}
    plan = Plan(
        endpoint=endpoint,
        dialect=dialect,
        engine=engine,
        engine_facts=engine_facts,
        response_options=requested,
        sent={"set": changed, "unset": sorted(unset & body.keys())},
        view=_view(dialect, engine, injection, options, body, sent_body, tokens, framing),
        model_asked=text_or_none(body.get("model")),
        model_served=text_or_none(sent_body.get("model")) or options.traits.model,
        sampling=_sampling(dialect, sent_body, engine, options, logprobs_mode or engine.logprobs_mode),
        framing=framing,
        wants_logprobs=options.wants_logprobs,
        headers=injection.headers,
        problems=injection.problems,
        expected=frozenset([code for quirk in quirks for code in quirk.codes]),
        extra={} if framing == "whole" else {"streaming": framing},
    )
    fields = {key: value for key, value in fields.items() if key in sent_body}  # without `stream` if it is replayed
    return PreparedPlan(plan, fields, unset, injection.call_id)


def _framing(body: Json, dialect: Dialect, engine: Engine, options: CallOptions, *, must_replay: bool) -> Framing:
    if must_replay:
        options = replace(options, streaming="replay")
    framing = engine.framing(dialect.name, body, options)
    if must_replay and framing == "live":
        raise UnprocessableRequest(
            "X-Reply-Tokens and X-Reply-Ids require an unstreamed call to the engine, which is not "
            "possible for this stream. Remove `stream` or the fields that require it.",
            param="stream",
        )
    return framing


def _view(  # noqa: PLR0917 - the values of a plan that the client's view depends on
    dialect: Dialect,
    engine: Engine,
    injection: Injection,
    options: CallOptions,
    body: Json,
    sent_body: Json,
    tokens: TokenAnnotations | None,
    framing: Framing,
) -> ClientView:
    model_asked = text_or_none(body.get("model"))
    is_counted, are_choices_counted = requested_usage(sent_body)
    return ClientView(
        dialect,
        engine,
        injection.strip_rules,
        options.requested.choices,
        model=model_asked if model_asked != text_or_none(sent_body.get("model")) else None,
        replay=framing == "replay",
        usage=options.requested.usage,
        is_counted=is_counted,
        are_choices_counted=are_choices_counted,
        tokens=tokens,
    )


def _sampling(dialect: Dialect, body: Json, engine: Engine, options: CallOptions, logprobs_mode: str | None) -> Json:
    """Return the sampling parameters: as sent, else the engine's default, if it is known; and the logprobs mode.

    The defaults apply to chat and completions: vLLM (0.32.0) and SGLang (0.5.23) use none of them for their generate endpoints.
    """
    defaults = (options.traits.sampling_defaults or {}) if dialect.name not in GENERATES else {}
    sent = {key: value for key, value in dialect.sampling(body).items() if value is not None}
    recorded = {key: sent[key] for key in SAMPLING_FIELDS if key in sent}
    is_constrained = engine.constrains({**defaults, **sent}, logprobs_mode)
    return {**defaults, **recorded, "logprobs_mode": logprobs_mode, "constrained": is_constrained}


CHAT: Final = "/v1/chat/completions"

# raised by a stored response that does not have chat's format: it cannot be rendered again
_ODD_SHAPE: Final = (*MALFORMED, UnprocessableRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallAdapter:
    """A call in another format: it is converted to an engine's format, and its response converted back."""

    request: Mapping[str, Any]  # the client's body
    body: dict[str, Any]  # in the dialect of `endpoint`
    endpoint: str = CHAT  # of engines
    own: Mapping[str, str] = field(default_factory=dict)  # endpoints that take `request` as it is, by kind of engine
    returns_logprobs: bool = False  # the response has logprobs, so they are requested regardless of the configuration
    retries_by_body: bool = False  # the same body again in a rollout is a retry, without an idempotency key
    needs_steps: bool = False  # the response requires the rollout's earlier steps

    def with_steps(self, steps: Sequence[Step]) -> Self:
        """Return the adapter with the rollout's earlier steps."""
        return self

    def native(self, models: Mapping[str, str], kind: str | None = None) -> dict[str, Any]:
        """Return the body for an engine of this kind (None: unknown). Raises UnprocessableRequest if it cannot serve it."""
        return self.body

    def recorded(self, plan: Plan) -> Plan:
        """Return the plan with the client's body, and with the differences between that body and the one sent."""
        asked = self.request
        changed = {name: value for name, value in plan.body.items() if name not in asked or asked[name] != value}
        return replace(
            plan, request=dict(asked), sent={"set": changed, "unset": sorted(asked.keys() - plan.body.keys())}
        )

    def reshape(self, outcome: Outcome) -> Outcome:
        """Return the end of the call in the client's format. Errors of the engine are unchanged."""
        return outcome

    def answer(self, step: Step) -> bytes | None:
        """Return the response of a step in the client's format; None if the dialect of the step renders it."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslatedCall(CallAdapter):
    """One call of a dialect that is translated to chat."""

    translation: Translator
    options: TranslationOptions  # with which `body` was read, of the engine that is expected to serve the call
    references: References
    received: float = 0.0  # its time of arrival in unix seconds
    resolved: ResolvedReferences = NO_REFERENCES

    def read_for(self, options: TranslationOptions) -> dict[str, Any]:
        """Return the chat body, from which an engine with these options makes the prompt that its own endpoint would make."""
        if options == self.options and self.resolved is NO_REFERENCES and not self.references.items:
            return self.body
        return self.translation.read(self.request, options, self.resolved)

    def recorded(self, plan: Plan) -> Plan:
        """Return the chat call's plan with the client's dialect; it may be called for several endpoints one after the other."""
        model = self.request.get("model")
        requested_model = model if isinstance(model, str) else None
        identity = CallIdentity(plan.step_id, int(self.received), requested_model or "", plan.rollout_id)
        renderer = self.translation.renderer(self.request, identity)
        plan = CallAdapter.recorded(self, plan)
        return replace(
            plan,
            model_asked=requested_model,
            translation=self.translation,
            view=replace(plan.view, translation=self.translation, renderer=renderer),
        )


def read_translated_call(endpoint: str, body: Mapping[str, Any], options: TranslationOptions) -> TranslatedCall | None:
    """Return the call of a dialect that is translated to chat; None for other endpoints.

    Raises UnprocessableRequest, except for a call that refers to items, which is read after they are found.
    """
    translation = TRANSLATORS.get(endpoint) or METHODS.get(endpoint)
    if translation is None:
        return None
    references = translation.references(body)
    chat = {} if references.items else translation.read(body, options)
    return TranslatedCall(translation=translation, request=body, body=chat, options=options, references=references)


def _all() -> Iterable[Translator]:
    return chain(TRANSLATORS.values(), METHODS.values())


def error_dialect_for(endpoint: str, headers: Mapping[str, str]) -> Translator | None:
    """Return the error dialect of a path that samples nothing; None: OpenAI's."""
    return next((translator for translator in _all() if translator.is_spoken(endpoint, headers)), None)


def translator_of(step: Step) -> Translator | None:
    """Return the translator of a step's dialect; None for a dialect that engines support."""
    return next((translator for translator in _all() if translator.name == step.dialect), None)


def renderer_for(step: Step) -> ResponseRenderer | None:
    """Return the renderer of a step's response, as it was rendered originally; None for a dialect that engines support.

    Raises UnprocessableRequest for a damaged request.
    """
    translator = translator_of(step)
    return None if translator is None else translator.renderer(step.request, CallIdentity.of(step))


def client_response(step: Step) -> dict[str, Any] | None:
    """Return the unstreamed response of a step; None if it is incomplete or not in chat's format."""
    if step.status != "complete" or step.response is None:
        return None
    try:
        renderer = renderer_for(step)
        return None if renderer is None else renderer.whole(dict(step.response))
    except _ODD_SHAPE:
        return None


def client_response_bytes(step: Step) -> bytes | None:
    """Return the client's response: a JSON body, or a stream, possibly in fewer events; None as in `client_response`."""
    engine = ENGINES.get(step.engine.kind)
    if step.status != "complete" or step.response is None or engine is None:
        return None
    if is_on(step.request.get("stream")):
        try:
            renderer = renderer_for(step)
            return None if renderer is None else render_as_stream(engine, renderer, dict(step.response))
        except _ODD_SHAPE:
            return None
    whole = client_response(step)
    return None if whole is None else to_json_bytes(whole)
