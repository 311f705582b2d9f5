"""A call that samples: what its client sent, its rollout, its plan for an endpoint, and its progress."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import orjson
from aiohttp import web
from aiohttp.client_exceptions import ClientConnectionResetError

from proxy.api.auth import Caller
from proxy.api.context import Context
from proxy.api.failures import CLIENT_CLOSED_REQUEST, RESPONSE_STARTED
from proxy.api.requests import downstream
from proxy.errors import EngineError, ProxyError
from proxy.protocols.dialects import DIALECTS
from proxy.protocols.dialects.base import Dialect, is_on
from proxy.protocols.engines.base import CallOptions
from proxy.protocols.exchange import Exchange
from proxy.protocols.json_texts import LongText
from proxy.protocols.plan import (
    CallAdapter,
    Plan,
    PreparedPlans,
    SessionPlace,
    TranslatedCall,
    has_lists,
    prepare,
    template_of,
    with_session,
)
from proxy.protocols.response import TokenAnnotations
from proxy.protocols.resume import refusal, restarted_plan, resumed_plan
from proxy.protocols.sampling import NO_RULES, engine_model
from proxy.rollouts.admission import Admitted
from proxy.rollouts.idempotency import Attempt
from proxy.rollouts.playback import Recorded, as_recorded
from proxy.rollouts.policy import Policy
from proxy.rollouts.rollout import Rollout
from proxy.trajectory.images import IMAGES
from proxy.trajectory.step import Step, Timing
from proxy.upstream.concurrency import LARGE_BYTES, in_thread, off_loop
from proxy.upstream.context_window import options_for, tokens_left, with_placeholders
from proxy.upstream.endpoint import Endpoint
from proxy.upstream.http_client import ROLLOUT_HEADER, STEP_HEADER


class Trace(Protocol):
    """The spans of a call: see `CallTrace`. No method raises an exception."""

    def queued(self, call: "Call") -> None:
        """Note that the call waits for a slot of its engine."""
        ...

    def sending(self, call: "Call", headers: list[tuple[str, str]]) -> list[tuple[str, str]] | None:
        """Note that the call is sent; return the headers to send, or None to send these."""
        ...

    def failed(self, call: "Call", fault: ProxyError) -> None:
        """Note an error of the engine or of the store."""
        ...

    def stored(self, call: "Call") -> None:
        """Note that the step is stored."""
        ...

    def ended(self, call: "Call", status: int) -> None:
        """End the spans; `status` is the HTTP status of the response."""
        ...


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request of the model API."""

    request: web.Request
    context: Context
    endpoint: str  # of engines
    rollout_id: str | None  # that the path names
    caller: Caller
    fields: Mapping[str, Any] | None = None  # of the body, that the URL has in this dialect


@dataclass(slots=True, eq=False)
class Call:
    """A call that samples, from its parsed request to its recorded step. Times are monotonic, but for `received`."""

    context: Context
    request: web.Request
    rollout_id: str
    is_named: bool  # false if the call names no rollout and got a new one
    path: str  # the engine's path that serves the call
    dialect: Dialect  # of that path
    body: dict[str, Any]  # in that dialect
    body_bytes: int
    # The bytes that take time to process: the body, and the response once it is read, without what the previous call of the
    # rollout already had.
    work_bytes: int
    digest: str  # of the body
    received: float  # in Unix seconds
    started: float
    adapter: CallAdapter | None = None  # None if the client itself sent this dialect
    tokens: TokenAnnotations | None = None  # the requested token annotations
    long: LongText | None = None  # its body in pieces

    # Once it is admitted.
    admitted: Admitted = field(init=False)
    rollout: Rollout = field(init=False)
    policy: Policy = field(init=False)
    attempt: Attempt = field(init=False)

    # Once it is planned for an endpoint, and again for each next one.
    left: list[Endpoint] = field(init=False)  # the endpoints that may be tried next
    endpoint: Endpoint = field(init=False)
    plan: Plan = field(init=False)
    fault: EngineError | None = None  # known before anything is sent
    failed: list[Mapping[str, Any]] = field(default_factory=list)  # the endpoints that failed, and their errors
    moves: bool = False  # to the next endpoint
    recorded: Recorded | None = None  # a live call of a playback: what its tape has of it
    are_ids_refused: bool = False  # by the engine: the call was sent again as the client sent it

    # While it is relayed.
    task: "asyncio.Task[Any] | None" = None
    trace: Trace | None = None
    exchange: Exchange | None = None  # with the current endpoint
    response_bytes: int = 0  # that the engine has sent
    parsed_bytes: int = 0  # of memory that is reserved to parse them
    sent: float | None = None
    first_byte: float | None = None
    last_byte: float | None = None
    step: Step | None = None
    cut: str | None = None  # why TokenTape itself ended the call
    interrupted: str | None = None  # why it is to go on after its policy's pause, or at another endpoint

    # Once its engine has ended it early (`resuming`).
    before: Step | None = None  # what is kept of its parts so far
    is_stream_begun: bool = False  # its client has received events of an engine
    is_told: bool = False  # its rest is withheld, until the reply of all parts is told
    shown: Step | None = None  # nothing is kept, but the client has received the head of a stream
    resumed: int = 0
    losses: int = 0  # of connections
    go_on_until: float = 0.0
    is_waiting: bool = False  # it has left its engine, and is not sent again yet
    is_aborted: bool = False  # at the engine: what still arrives is recorded, and not written

    @property
    def over_sampled(self) -> tuple[str, str] | None:
        """Its rollout and the incarnation, if its group may not need it."""
        rollout = self.rollout
        return (rollout.rollout_id, rollout.incarnation) if rollout.is_over_sampled else None

    def stop(self, reason: str) -> None:
        """Cancel the call: its partial step has what arrived until now, and this reason. Again, it does nothing."""
        if self.task is not None and self.cut is None:
            self.cut = reason
            self.task.cancel()

    def interrupt(self, reason: str, *, is_last: bool) -> None:
        """Have the call go on elsewhere, or after its policy's pause, with what was sampled until now; again, it does nothing.

        A call that would lose that is interrupted only if `is_last`: its engine can neither abort it by an id nor return it in
        a stream, or it cannot be resumed from its ids.
        """
        if self.task is None or self.step is not None or self.interrupted or self.cut is not None or self.is_waiting:
            return
        exchange = self.exchange
        if exchange is not None and (exchange.is_whole or (exchange.response.has_ended and not is_last)):
            return  # the engine has sent all of it, or samples no more
        if is_last or self.sent is None or self._keeps_sampled():
            self.interrupted = reason
            self.task.cancel()

    def _keeps_sampled(self) -> bool:
        """Return whether an interruption now keeps what was sampled, as far as it is known."""
        plan, exchange = self.plan, self.exchange
        if (plan.abort is None and plan.framing != "live") or self.resumed >= self.context.settings.agents.max_resumes:
            return False
        traits = self.endpoint.known(self.rollout.rollout_id)
        is_undecided = exchange is not None and exchange.response.is_undecided
        reason = refusal(plan, None, has_parser=traits.has_parser)
        return (not is_undecided and reason is None) or (reason in {None, "parser"} and traits.parses_ids)

    def adapter_of(self, step: Step) -> CallAdapter | None:
        """Return its adapter, if it was applied for this step."""
        adapter = self.adapter
        return None if adapter is None or step.endpoint in adapter.own.values() else adapter

    def note_fault(self, fault: ProxyError) -> None:
        """Note an error in the trace of the call, if it has one."""
        if self.trace is not None:
            self.trace.failed(self, fault)

    def timing(self, stored: float | None = None) -> Timing:
        """Return the times for the step, in Unix seconds. `stored`: when it is passed to the recorder, if that is now."""
        unix = self.received - self.started  # of the zero of the monotonic clock
        sent, first, last = self.sent, self.first_byte, self.last_byte
        return Timing(
            self.received,
            None if sent is None else unix + sent,
            None if first is None else unix + first,
            None if last is None else unix + last,
            stored,
        )


class ClientStream:
    """The response to the client: the head is written with the first bytes of the body."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.status = CLIENT_CLOSED_REQUEST
        self.only_keepalives_sent = False
        self.is_stream = False  # what the client reads: a stream of events
        self._headers: list[tuple[str, str]] = []
        self._is_stream = False  # what the engine sends
        self._written: float | None = None  # when the last bytes were forwarded, as `Call.last_byte`
        self._stream: web.StreamResponse | None = None

    @property
    def body_started(self) -> bool:
        """Whether a byte of the engine's response was written; keep-alive comments do not count."""
        return self.headers_sent and not self.only_keepalives_sent

    @property
    def headers_sent(self) -> bool:
        """Whether the head was written: the status cannot change any more."""
        return self._stream is not None

    def set_head(self, status: int, headers: Mapping[str, str], *, content_type: str | None = None) -> None:
        """Set the head from the engine's; nothing is written yet. `content_type` replaces the engine's."""
        plan = self._call.plan
        self.status = status
        body_type = content_type or headers.get("Content-Type", "")
        self._is_stream = body_type.startswith("text/event-stream") or body_type == plan.view.stream_format.content_type
        if self._stream is None:
            self.is_stream = self._is_stream
        shown = [*downstream(headers.items()), (ROLLOUT_HEADER, plan.rollout_id), (STEP_HEADER, plan.step_id)]
        if content_type is not None:
            shown = [pair for pair in shown if pair[0].lower() != "content-type"] + [("Content-Type", content_type)]
        self._headers = shown

    async def keep_alive(self) -> None:
        """Write to a stream that waits for its engine what has no meaning in it; the first time with the head (status 200)."""
        stream_format = self._call.plan.view.stream_format
        if self._stream is None:
            self.set_head(200, {}, content_type=stream_format.content_type)
            self.only_keepalives_sent = True
        await self.write(stream_format.keep_alive)

    async def forward(self, shown: bytes, interval_s: float) -> None:
        """Write bytes of the engine's response; while all of a stream is held, a keep-alive comment at intervals."""
        now = self._call.last_byte or 0.0
        if shown:
            await self.write(shown)
            self.only_keepalives_sent = False
        elif now - (self._written or self._call.first_byte or now) < interval_s:
            return
        else:
            await self.keep_alive()
        self._written = now

    async def write(self, shown: bytes) -> None:
        """Write bytes of the body. Raises ClientConnectionResetError if the client has disconnected."""
        if self._stream is None:
            self._call.request[RESPONSE_STARTED] = True
            self._stream = web.StreamResponse(status=self.status, headers=self._headers)
            await self._stream.prepare(self._call.request)
        await self._stream.write(shown)

    async def end(self, end: bytes, *, broken: bool) -> web.StreamResponse:
        """Write the withheld end: the whole response with its Content-Length if nothing was written yet.

        `broken`: the engine disconnected early, and the client's connection is closed early as well. Raises
        ClientConnectionResetError if the client has disconnected.
        """
        if self._stream is None:
            response = web.Response(status=self.status, headers=self._headers, body=end)
            await response.prepare(self._call.request)
            await response.write_eof()
            return response
        if self.only_keepalives_sent and not self._is_stream:
            end = self._call.plan.error_events(end)  # status 200 was sent already
        if end:
            await self._stream.write(end)
        if broken:
            return self.cut()
        transport = self._call.request.transport
        if transport is None or transport.is_closing():
            raise ClientConnectionResetError("the client disconnected before the end was written")
        await self._stream.write_eof()
        return self._stream

    def cut(self) -> web.StreamResponse:
        """Close the connection before the last chunk, so that the client sees an incomplete response."""
        transport = self._call.request.transport
        if transport is not None:
            transport.close()
        assert self._stream is not None
        return self._stream


async def plan_for(call: Call, endpoint: Endpoint, *, as_ids: bool = True) -> None:
    """Plan a call for an endpoint, as ids if it may be; set why it cannot be called, if known. Raises UnprocessableRequest."""
    context, headers = call.context, call.request.headers
    adapter, path, body = call.adapter, call.path, call.body
    fault = None if endpoint.is_detected else await context.upstream.ensure_detected(endpoint)
    if adapter is not None and endpoint.kind in adapter.own:
        path, body, adapter = adapter.own[endpoint.kind], dict(adapter.request), None
    plans, options = endpoint.plans, _options(call, endpoint, adapter)  # together: a detection replaces both
    if adapter is not None:
        reachable = endpoint if fault is None else None
        body = await _native(context, reachable, adapter, options.models, call.work_bytes)
    if "auto" in options.sampling.cap.values():
        left = await tokens_left(context.upstream, endpoint, options, DIALECTS[path], body, body_bytes=call.body_bytes)
        options = replace(options, room_left=left)
    planned = partial(_planned, call, endpoint, plans, path, body, options)
    plan = planned() if call.work_bytes <= LARGE_BYTES else await in_thread(planned)
    if endpoint.plans is not plans:  # a detection has found another engine meanwhile
        await plan_for(call, endpoint, as_ids=as_ids)
        return
    if (session := endpoint.settings.session) is not None:
        place = SessionPlace(session.header_name, session.field, session.of == "thread", plan.extra.get("agent"))
        plan = await off_loop(call.work_bytes, LARGE_BYTES, with_session, plan, place, headers)
    if adapter is not None:
        plan = await off_loop(call.work_bytes, LARGE_BYTES, adapter.recorded, plan)
    if IMAGES in plan.extra and fault is None:
        plan = await with_placeholders(context.upstream, endpoint, plan)
    if call.resumed:
        plan = await off_loop(call.work_bytes, LARGE_BYTES, _going_on, call, plan)
    elif fault is None:
        continuation = context.continuation
        plan = (
            await _from_tape(call, call.recorded, plan, endpoint, as_ids=as_ids)
            if call.recorded is not None
            else await continuation.continued(plan, call.admitted, endpoint, headers, call.work_bytes)
            if as_ids
            else continuation.refused(plan)
        )
    call.endpoint, call.plan, call.fault = endpoint, plan, fault


async def _from_tape(call: Call, recorded: Recorded, plan: Plan, endpoint: Endpoint, *, as_ids: bool) -> Plan:
    """Return the plan of a live call of a playback: with the ids of the step that it branches from, else by continuation."""
    continuation = call.context.continuation
    takes_ids = as_ids and not endpoint.continuation_fault.for_rollout(call.rollout.rollout_id)
    plan = await off_loop(call.body_bytes, LARGE_BYTES, as_recorded, plan, recorded, as_ids=takes_ids)
    if not as_ids:
        return continuation.refused(plan)
    if plan.prompt is not None:
        return plan
    return await continuation.continued(plan, call.admitted, endpoint, call.request.headers, call.work_bytes)


def _going_on(call: Call, plan: Plan) -> Plan:
    """Return the plan of a call that goes on; what its client reads of a stream continues."""
    renderer = call.plan.view.renderer if call.is_stream_begun else None
    if call.before is not None:
        return resumed_plan(plan, call.before, renderer, is_withheld=call.is_told, is_stream=call.is_stream_begun)
    return plan if call.shown is None else restarted_plan(plan, call.shown, renderer)


def _planned(
    call: Call, endpoint: Endpoint, plans: PreparedPlans, path: str, body: dict[str, Any], options: CallOptions
) -> Plan:
    """Return the plan of a call, as an earlier call of the same form had it. Raises UnprocessableRequest."""
    rollout, engine, attempt = call.rollout, endpoint.engine, call.attempt
    may_have_images = has_lists(body.get("messages"))
    template = template_of(body, DIALECTS[path], options.sampling, has_lists=may_have_images)
    prepared, key = None, b""
    if template is not None and call.tokens is None:
        of_rollout = rollout.sampling, rollout.tools, rollout.model
        terms = *of_rollout, options.room_left, options.is_translated, options.logprobs, call.is_told
        flags = map(is_on, map(options.headers.get, engine.headers_read))
        key = orjson.dumps((template, path, terms, options.traits.forces_usage, *flags))
        prepared = plans.get(key)
    if prepared is None:
        prepared = prepare(
            body,
            endpoint=path,
            options=options,
            engine=engine,
            engine_facts=endpoint.facts,
            logprobs_mode=endpoint.settings.logprobs_mode,
            tokens=call.tokens,
        )
        if key:
            plans.keep(key, prepared)
    versions, announced = call.policy.version, call.policy.version.announced
    return prepared.for_call(
        body,
        step_id=attempt.step_id,
        rollout_id=rollout.rollout_id,
        policy=call.policy.name,
        policy_at=versions.at(endpoint.label) if versions.is_rolling else (announced.version, announced.epoch),
        extra={**attempt.extra, "attempts": list(call.failed)} if call.failed else attempt.extra,
        may_have_images=may_have_images,
    )


def _options(call: Call, endpoint: Endpoint, adapter: CallAdapter | None) -> CallOptions:
    """Return the options of a call: the configuration, overridden by the terms of its rollout."""
    context, rollout, record = call.context, call.rollout, call.context.settings.record
    return CallOptions(
        sampling=context.sampling if rollout.sampling is NO_RULES else rollout.sampling.over(context.sampling),
        tools=rollout.tools,
        models=models_of(context, rollout),
        keep_reasoning=record.include_reasoning == "override",
        streaming="replay" if call.is_told else endpoint.settings.streaming or record.streaming,
        logprobs="full" if adapter is not None and adapter.returns_logprobs else record.logprobs,
        sampling_masks=record.sampling_masks,
        routed_experts=record.routed_experts,
        is_translated=isinstance(adapter, TranslatedCall),
        traits=endpoint.known(rollout.rollout_id),
        headers=call.request.headers,
    )


async def _native(
    context: Context, endpoint: Endpoint | None, adapter: CallAdapter, models: Mapping[str, str], work_bytes: int
) -> dict[str, Any]:
    """Return the body of an adapted call for this engine; `endpoint` is None if it is unreachable."""
    if not isinstance(adapter, TranslatedCall):
        return await off_loop(
            work_bytes, LARGE_BYTES, adapter.native, models, None if endpoint is None else endpoint.kind
        )
    options = adapter.options
    if endpoint is not None:
        options = await options_for(context.upstream, endpoint, adapter, models)
    return await off_loop(work_bytes, LARGE_BYTES, adapter.read_for, options)


def models_of(context: Context, rollout: Rollout) -> Mapping[str, str]:
    """Map requested models to the engine's names: every model to the rollout's model if it has one, else as configured."""
    return {"*": rollout.model} if rollout.model else context.settings.models


def model_of(call: Call, rollout: Rollout) -> str | None:
    """Return the engine's name of the model of a call; None if it names none."""
    models, body, adapter = models_of(call.context, rollout), call.body, call.adapter
    if adapter is not None and not isinstance(adapter, TranslatedCall):  # a translation does not change the model
        body = adapter.native(models, None)
    return engine_model(body, models, rollout.sampling.over(call.context.sampling))


async def endpoints_of(call: Call) -> Sequence[Endpoint]:
    """Return the endpoints that may serve a call."""
    upstream = call.context.upstream
    if not upstream.routes_by_model:
        return upstream.endpoints
    return await upstream.endpoints_for(model_of(call, call.rollout))
