"""The traces of calls: a span by OpenTelemetry's GenAI conventions, with children for pauses, the queue, each request to an
engine, and the store; and the span of a rollout, above those of its calls that have no other parent.

It is imported only if traces are exported. The spans have the times that the call notes anyway.
"""

from collections.abc import Callable, Mapping
from typing import Any, Concatenate, Final, ParamSpec, TypeVar
from urllib.parse import urlsplit

from multidict import CIMultiDictProxy
from opentelemetry import propagate
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import Getter
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanKind,
    Status,
    StatusCode,
    get_current_span,
    set_span_in_context,
)

from proxy.api.model.call import Call
from proxy.clock import Clock
from proxy.errors import ProxyError, StoreUnavailable
from proxy.rollouts.finishing import FAILED
from proxy.rollouts.rollout import Rollout
from proxy.telemetry.logs import LOG
from proxy.telemetry.span_attributes import (
    error_of_step,
    first_attributes,
    request_attributes,
    span_name,
    step_attributes,
)
from proxy.telemetry.tracing import Tracing

_P = ParamSpec("_P")
_R = TypeVar("_R")
_ROLLOUT: Final = "invoke_agent"  # the convention's name of a span with all calls of an agent
_PORTS: Final = {"http": 80, "https": 443}


class CallTracer:
    """Starts the traces of calls. `content`: whether messages are exported."""

    def __init__(self, tracing: Tracing, clock: Clock, *, content: bool) -> None:
        self._tracing = tracing
        self._clock = clock
        self._content = content

    def __call__(self, call: Call) -> "CallTrace":
        """Start the trace of a planned call, below the span that its `traceparent` names, else below its rollout's, if any."""
        trace = CallTrace(self._tracing, self._clock, content=self._content)
        trace.start(call)
        return trace

    def rollout_ended(self, rollout: Rollout) -> None:
        """Export the span of a rollout that this process has finished, if it has one."""
        if not _has_span(rollout):
            return
        attributes = {
            "gen_ai.operation.name": _ROLLOUT,
            "gen_ai.conversation.id": rollout.rollout_id,
            "tokentape.rollout.status": rollout.status,
            "tokentape.rollout.steps": rollout.counts.get("steps", 0),
            "tokentape.rollout.reward": rollout.reward,
            "tokentape.group.id": rollout.group_id,
        }
        error = None
        if rollout.status in FAILED:
            attributes["error.type"], error = rollout.status, rollout.reason or rollout.status
        known = {name: value for name, value in attributes.items() if value is not None}
        ended_ms = rollout.created_ms if rollout.finished_ms is None else rollout.finished_ms
        try:
            self._tracing.end_root(_ROLLOUT, _key(rollout), rollout.created_ms, ended_ms, known, error)
        except Exception:  # noqa: BLE001 - a sampler may be a plugin
            LOG.exception("The span of a rollout is not exported")


def _has_span(rollout: Rollout) -> bool:
    """Whether a rollout was opened by a request: one that a call opened is often never finished."""
    return rollout.group_id is not None or "opened_with" in rollout.origin.fields


def _key(rollout: Rollout) -> str:
    return f"{rollout.rollout_id} {rollout.incarnation}"


def _harmless(
    method: Callable[Concatenate["CallTrace", _P], _R],
) -> Callable[Concatenate["CallTrace", _P], _R | None]:
    """Log exceptions: samplers and propagators may be plugins, and a call does not fail because of its trace."""

    def guarded(trace: "CallTrace", /, *args: _P.args, **named: _P.kwargs) -> _R | None:
        if trace.is_broken:
            return None
        try:
            return method(trace, *args, **named)
        except Exception:  # noqa: BLE001 - a plugin can raise any exception
            trace.is_broken = True
            LOG.exception("The trace of a call is incomplete")
            return None

    return guarded


class CallTrace:
    """The trace of one call. A call that is not sampled has no spans, and passes the decision on to its engine."""

    def __init__(self, tracing: Tracing, clock: Clock, *, content: bool) -> None:
        self.is_broken = False
        self._tracing = tracing
        self._tracer = tracing.tracer
        self._clock = clock
        self._content = content
        self._span: Span
        self._context: Context
        self._queue: Span | None = None
        self._attempt: Span | None = None
        self._fault: ProxyError | None = None
        self._stored: float | None = None

    @_harmless
    def start(self, call: Call) -> None:
        """Start the span of the call, when the call was received."""
        parent = propagate.extract(call.request.headers, getter=_HEADERS)
        if _has_span(call.rollout) and not get_current_span(parent).get_span_context().is_valid:
            root = self._tracing.root(_ROLLOUT, _key(call.rollout))
            parent = set_span_in_context(NonRecordingSpan(root), parent)
        self._span = self._tracer.start_span(
            span_name(call.plan),
            parent,
            kind=SpanKind.CLIENT,
            attributes=first_attributes(call.plan),
            start_time=_ns(call.received),
        )
        self._context = set_span_in_context(self._span, parent)

    @_harmless
    def queued(self, call: Call) -> None:
        """Start the span of the queue: the call waits for a slot of its engine."""
        if self._span.is_recording():
            self._queue = self._child("queue", self._now(call), {"tokentape.engine": call.endpoint.label})

    @_harmless
    def sending(self, call: Call, headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """Start the span of a request to an engine; return its headers, by which the engine's span is a child of it."""
        self._fault = None
        if self._span.is_recording():
            started = _ns(_time(call, call.sent))
            self._end_queue(started)
            self._end_attempt(call, started, error=("prompt_ids_refused", None))  # which is sent again without ids
            name = f"POST {call.plan.endpoint}"
            self._attempt = self._child(name, started, _engine_attributes(call), SpanKind.CLIENT)
        carrier: dict[str, str] = {}
        context = self._context if self._attempt is None else set_span_in_context(self._attempt, self._context)
        propagate.inject(carrier, context)
        replaced = {name.lower() for name in propagate.get_global_textmap().fields}
        return [*(pair for pair in headers if pair[0].lower() not in replaced), *carrier.items()]

    @_harmless
    def failed(self, call: Call, fault: ProxyError) -> None:
        """Note an error. It ends the attempt at the engine as failed, unless the store is unavailable."""
        self._fault = fault
        now = self._now(call)
        if isinstance(fault, StoreUnavailable):
            self._end_attempt(call, now)
            return
        self._end_queue(now, fault)
        if self._attempt is not None:
            _set_error(self._attempt, fault.code, fault.message)
            self._attempt.end(now)
            self._attempt = None

    @_harmless
    def stored(self, call: Call) -> None:
        """Note the time: the step is stored."""
        self._stored = self._clock.monotonic()

    @_harmless
    def ended(self, call: Call, status: int) -> None:
        """End all spans. `status` is the HTTP status that the client receives."""
        now = self._now(call)
        if not self._span.is_recording():
            return
        step, fault = call.step, self._fault
        self._end_queue(now, fault)
        error = (fault.code, fault.message) if fault is not None else error_of_step(step, status)
        self._end_attempt(call, now, status, error)
        for began, ended in call.admitted.pauses:
            pause = self._child("pause", _ns(_time(call, began)), {"tokentape.policy": call.plan.policy})
            pause.end(_ns(_time(call, ended)))
        self._add_store(call, now)
        self._span.set_attributes(request_attributes(call.plan) | _server_attributes(call))
        if call.rollout.group_id is not None:
            self._span.set_attribute("tokentape.group.id", call.rollout.group_id)
        if step is not None:
            self._span.set_attributes(step_attributes(step, content=self._content))
        if call.plan.framing == "live" and call.first_byte is not None and call.sent is not None:
            self._span.set_attribute("gen_ai.response.time_to_first_chunk", call.first_byte - call.sent)
        if error is not None:
            _set_error(self._span, *error)
        self._span.end(now)

    def _child(self, name: str, start: int, attributes: Mapping[str, Any], kind: SpanKind = SpanKind.INTERNAL) -> Span:
        """Start a span below the call's, which is recorded."""
        return self._tracer.start_span(name, self._context, kind=kind, attributes=attributes, start_time=start)

    def _end_queue(self, now: int, fault: ProxyError | None = None) -> None:
        if self._queue is None:
            return
        if fault is not None:
            _set_error(self._queue, fault.code, fault.message)
        self._queue.end(now)
        self._queue = None

    def _end_attempt(
        self, call: Call, now: int, status: int | None = None, error: tuple[str, str | None] | None = None
    ) -> None:
        """End the span of the last request at its last byte."""
        if self._attempt is None:
            return
        if status is not None and call.first_byte is not None:
            self._attempt.set_attribute("http.response.status_code", status)
        if error is not None:
            _set_error(self._attempt, *error)
        self._attempt.end(now if call.last_byte is None else _ns(_time(call, call.last_byte)))
        self._attempt = None

    def _add_store(self, call: Call, now: int) -> None:
        """Add the span of the store, for a step that the call waited for."""
        is_failed = isinstance(self._fault, StoreUnavailable)
        if call.step is None or (self._stored is None and not is_failed):
            return
        began = _ns(call.step.timing.stored or call.step.timing.last_byte or call.received)
        ended = now if self._stored is None else _ns(_time(call, self._stored))
        span = self._child("store", min(began, ended), {"db.operation.name": "append"})
        if self._fault is not None and is_failed:
            _set_error(span, self._fault.code, self._fault.message)
        span.end(ended)

    def _now(self, call: Call) -> int:
        return _ns(_time(call, self._clock.monotonic()))


class _Headers(Getter[CIMultiDictProxy[str]]):
    """Reads the headers of a request."""

    def get(self, carrier: CIMultiDictProxy[str], key: str) -> list[str] | None:
        return carrier.getall(key, None)

    def keys(self, carrier: CIMultiDictProxy[str]) -> list[str]:
        return list(carrier)


_HEADERS: Final = _Headers()


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _time(call: Call, stamp: float | None) -> float:
    return call.received if stamp is None else call.received + (stamp - call.started)


def _server_attributes(call: Call) -> dict[str, Any]:
    """Return host and port of the engine; its URL has no credentials."""
    parts = urlsplit(call.endpoint.settings.url)
    return {"server.address": parts.hostname or "", "server.port": parts.port or _PORTS.get(parts.scheme, 80)}


def _engine_attributes(call: Call) -> dict[str, Any]:
    resent = {"http.request.resend_count": len(call.failed)} if call.failed else {}
    url = call.endpoint.settings.url + call.plan.endpoint
    return {
        "http.request.method": "POST",
        "url.full": url,
        "tokentape.engine": call.endpoint.label,
        **_server_attributes(call),
        **resent,
    }


def _set_error(span: Span, kind: str, description: str | None) -> None:
    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, description))
