"""The state of a call, and the response that is written to its client."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from aiohttp import web
from aiohttp.client_exceptions import ClientConnectionResetError

from proxy.api.adapters import CallAdapter
from proxy.api.auth import Caller
from proxy.api.context import Context
from proxy.api.http import CLIENT_CLOSED_REQUEST, RESPONSE_STARTED
from proxy.errors import EngineError, ProxyError
from proxy.protocols.dialects import Dialect
from proxy.protocols.exchange import Exchange, Outcome
from proxy.protocols.plan import Plan
from proxy.protocols.token_annotations import TokenAnnotations
from proxy.rollouts.policy import Policy
from proxy.trajectory.step import Step, Timing
from proxy.upstream import Endpoint
from proxy.upstream.endpoint import Failover
from proxy.upstream.headers import downstream


class Planner(Protocol):
    """Plans a call for one endpoint, and again for each next one, with the attempts that failed before."""

    async def plan(
        self, endpoint: Endpoint, failed: Sequence[Mapping[str, Any]], *, as_ids: bool = True
    ) -> tuple[Plan, EngineError | None]:
        """Return the plan, and why the endpoint cannot be called, if that is known. Raises UnprocessableRequest.

        `as_ids`: whether the prompt may be sent as token ids.
        """
        ...

    def reshape(self, outcome: Outcome) -> Outcome:
        """Return the end of the call as its client reads it."""
        ...


class Trace(Protocol):
    """The spans of a call: see `CallTrace`. No method raises an exception."""

    def queued(self, call: "CallState") -> None:
        """Note that the call waits for a slot of its engine."""
        ...

    def sending(self, call: "CallState", headers: list[tuple[str, str]]) -> list[tuple[str, str]] | None:
        """Note that the call is sent; return the headers to send, or None to send these."""
        ...

    def failed(self, call: "CallState", fault: ProxyError) -> None:
        """Note an error of the engine or of the store."""
        ...

    def stored(self, call: "CallState") -> None:
        """Note that the step is stored."""
        ...

    def ended(self, call: "CallState", status: int) -> None:
        """End the spans; `status` is that of the response."""
        ...


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request of the model API: the engine's endpoint, the rollout that the path names, and the caller.

    `fields` are the fields of the body that the URL has, in a dialect with such fields.
    """

    request: web.Request
    context: Context
    endpoint: str
    rollout_id: str | None
    caller: Caller
    fields: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class IncomingCall:
    """A parsed call: its endpoint and dialect, its body, and its time (`received` in Unix seconds, `started` monotonic).

    `digest`: a hash of the body's bytes. `tokens`: the requested token annotations. `adapter`: None if the body has the
    endpoint's own format. `is_named`: false for a call that names no rollout and got a new one.
    """

    request: web.Request
    rollout_id: str
    endpoint: str
    dialect: Dialect
    digest: str
    body_bytes: int
    body: dict[str, Any]
    received: float
    started: float
    is_named: bool
    adapter: CallAdapter | None = None
    tokens: TokenAnnotations | None = None


@dataclass(slots=True, eq=False)
class CallState:
    """An admitted call: its plan, and its progress.

    `received` is in Unix seconds, the other times are monotonic.
    """

    request: web.Request
    planner: Planner
    failover: Failover
    plan: Plan
    endpoint: Endpoint
    policy: Policy
    incarnation: str
    received: float
    started: float
    body_bytes: int
    group_id: str | None = None
    trace: Trace | None = None
    fault: EngineError | None = None  # known before anything is sent
    over_sampled: tuple[str, str] | None = None  # its rollout and the incarnation, if its group may not need it
    stored: asyncio.Event = field(default_factory=asyncio.Event)  # set once the step is stored
    response_bytes: int = 0  # that the engine has sent
    parsed_bytes: int = 0  # of memory that is reserved to parse them
    sent: float | None = None
    first_byte: float | None = None
    last_byte: float | None = None
    step: Step | None = None
    exchange: Exchange | None = None  # with the current endpoint
    task: "asyncio.Task[Any] | None" = None
    are_ids_refused: bool = False  # by the engine: the call was sent again as the client sent it
    cut: str | None = None  # why TokenTape itself ended the call
    is_aborted: bool = False  # at the engine: what still arrives is recorded, and not written
    failed: list[Mapping[str, Any]] = field(default_factory=list)  # the endpoints that failed, and their errors

    def stop(self, reason: str) -> None:
        """Cancel the call: its partial step has what arrived until now, and this reason. Again, it does nothing."""
        if self.task is not None and self.cut is None:
            self.cut = reason
            self.task.cancel()

    def note_fault(self, fault: ProxyError) -> None:
        """Note an error in the trace of the call, if it has one."""
        if self.trace is not None:
            self.trace.failed(self, fault)

    def timing(self, stored: float | None = None) -> Timing:
        """Return the times for the step, in Unix seconds. `stored`: when it is passed to the recorder, if that is now."""
        sent, first, last = (
            None if stamp is None else self.received + (stamp - self.started)
            for stamp in (self.sent, self.first_byte, self.last_byte)
        )
        return Timing(self.received, sent, first, last, stored)


class ClientStream:
    """The response to the client: the head is written with the first bytes of the body."""

    def __init__(self, call: CallState) -> None:
        self._call = call
        self.status = CLIENT_CLOSED_REQUEST
        self.only_keepalives_sent = False
        self._headers: list[tuple[str, str]] = []
        self._is_stream = False
        self._written: float | None = None  # when the last bytes were forwarded, as `CallState.last_byte`
        self._stream: web.StreamResponse | None = None

    @property
    def body_started(self) -> bool:
        """Whether a byte of the engine's response was written; keep-alive comments do not count."""
        return self.headers_sent and not self.only_keepalives_sent

    @property
    def is_stream(self) -> bool:
        """Whether the response is a stream of events."""
        if self._stream is None:
            return self._is_stream
        content_type = self._stream.headers.get("Content-Type", "")
        return (
            content_type.startswith("text/event-stream") or content_type == self._call.plan.stream_format.content_type
        )

    @property
    def headers_sent(self) -> bool:
        """Whether the head was written: the status cannot change any more."""
        return self._stream is not None

    def set_head(self, status: int, headers: Mapping[str, str], *, content_type: str | None = None) -> None:
        """Set the head from the engine's; nothing is written yet. `content_type` replaces the engine's."""
        plan = self._call.plan
        self.status = status
        body_type = content_type or headers.get("Content-Type", "")
        self._is_stream = body_type.startswith("text/event-stream") or body_type == plan.stream_format.content_type
        shown = downstream(headers, rollout_id=plan.rollout_id, step_id=plan.step_id)
        if content_type is not None:
            shown = [pair for pair in shown if pair[0].lower() != "content-type"] + [("Content-Type", content_type)]
        self._headers = shown

    async def keep_alive(self) -> None:
        """Write to a stream that waits for its engine what has no meaning in it; the first time with the head (status 200)."""
        stream_format = self._call.plan.stream_format
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
        elif now - (self._written or self._call.first_byte or now) < interval_s or not self.is_stream:
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


@asynccontextmanager
async def keeping_alive(client: ClientStream, interval_s: float) -> AsyncIterator[None]:
    """Send keep-alive comments while an unstreamed call to the engine serves a client that requested a stream."""

    async def keep_alive() -> None:
        with suppress(ClientConnectionResetError):  # the server cancels the call itself
            while True:
                await asyncio.sleep(interval_s)
                await client.keep_alive()

    task = asyncio.get_running_loop().create_task(keep_alive())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
