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
from proxy.errors import EngineError
from proxy.protocols.dialects import Dialect
from proxy.protocols.exchange import Exchange, Outcome
from proxy.protocols.plan import Plan
from proxy.protocols.synthetic_stream import CONTENT_TYPE, KEEP_ALIVE
from proxy.protocols.token_annotations import TokenAnnotations
from proxy.trajectory.step import Step, Timing
from proxy.upstream import Endpoint
from proxy.upstream.failover import Failover
from proxy.upstream.headers import downstream


class Planner(Protocol):
    """Plans a call for one endpoint, and anew for each next one, with the attempts that failed before."""

    async def plan(self, endpoint: Endpoint, failed: Sequence[Mapping[str, Any]]) -> tuple[Plan, EngineError | None]:
        """Return the plan, and why the endpoint cannot be called, if that is known. Raises UnprocessableRequest."""
        ...

    def reshape(self, outcome: Outcome) -> Outcome:
        """Return the end of the call as its client reads it."""
        ...


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request of the model API: the endpoint as an engine knows it, the rollout that its path names, and who calls."""

    request: web.Request
    context: Context
    endpoint: str
    rollout_id: str | None
    caller: Caller


@dataclass(frozen=True, slots=True)
class IncomingCall:
    """A call as it was read: its endpoint and dialect, its body, and when it came (unix seconds; then monotonic seconds).

    `digest` is equal for equal bytes of bodies. `tokens` says what its response has of token ids and texts; `adapter` is None
    where the body has the endpoint's own shape. `is_named` is false for a call that got a new rollout because it named none.
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
    """One call, accepted: what is decided of it, and how far it has come.

    `received` is in unix seconds, the other times are monotonic.
    """

    request: web.Request
    planner: Planner
    failover: Failover
    plan: Plan
    endpoint: Endpoint
    incarnation: str
    received: float
    started: float
    body_bytes: int
    fault: EngineError | None = None  # found out before anything was sent
    stored: asyncio.Event = field(default_factory=asyncio.Event)  # set once its step is
    sent: float | None = None
    first_byte: float | None = None
    last_byte: float | None = None
    step: Step | None = None
    exchange: Exchange | None = None  # of the endpoint that answers
    task: "asyncio.Task[Any] | None" = None
    cut: str | None = None  # why the proxy itself ended the call
    failed: list[Mapping[str, Any]] = field(default_factory=list)  # where it was, and the fault

    def stop(self, reason: str) -> None:
        """End the call: its step has what came until now, and this reason."""
        if self.task is not None:
            self.cut = reason
            self.task.cancel()

    def timing(self) -> Timing:
        """The times as a step keeps them."""
        stamps = (
            None if stamp is None else self.received + (stamp - self.started)
            for stamp in (self.sent, self.first_byte, self.last_byte)
        )
        return Timing(self.received, *stamps)


class ClientStream:
    """The client's side of a call: its head is written with the first bytes, its end with the last."""

    def __init__(self, call: CallState) -> None:
        self._call = call
        self.status = CLIENT_CLOSED_REQUEST
        self.has_heard_only_comments = False
        self._headers: list[tuple[str, str]] = []
        self._is_stream = False
        self._stream: web.StreamResponse | None = None

    @property
    def has_seen_answer(self) -> bool:
        """Whether a byte of the answer was written; comments are none."""
        return self.has_seen_something and not self.has_heard_only_comments

    @property
    def is_stream(self) -> bool:
        """Whether the client reads events."""
        if self._stream is None:
            return self._is_stream
        return self._stream.headers.get("Content-Type", "").startswith("text/event-stream")

    @property
    def has_seen_something(self) -> bool:
        """Whether anything was written: from then on no other status can be given."""
        return self._stream is not None

    def set_head(self, status: int, headers: Mapping[str, str], *, content_type: str | None = None) -> None:
        """What the engine's head was; nothing is written yet. `content_type` if the client gets another one."""
        plan = self._call.plan
        self.status = status
        self._is_stream = content_type == CONTENT_TYPE
        shown = downstream(headers, rollout_id=plan.rollout_id, step_id=plan.step_id)
        if content_type is not None:
            shown = [pair for pair in shown if pair[0].lower() != "content-type"] + [("Content-Type", content_type)]
        self._headers = shown

    async def keep_alive(self) -> None:
        """A comment in a stream that has nothing to say yet; the first one decides that the status is 200."""
        if self._stream is None:
            self.set_head(200, {}, content_type=CONTENT_TYPE)
            self.has_heard_only_comments = True
        await self.write(KEEP_ALIVE)

    async def write(self, shown: bytes) -> None:
        """Write bytes as they come. Raises ClientConnectionResetError when the client is gone."""
        if self._stream is None:
            self._call.request[RESPONSE_STARTED] = True
            self._stream = web.StreamResponse(status=self.status, headers=self._headers)
            await self._stream.prepare(self._call.request)
        await self._stream.write(shown)

    async def end(self, end: bytes, *, broken: bool) -> web.StreamResponse:
        """Write the withheld end; nothing written yet means one write, with its length.

        `broken`: the engine's connection ended improperly, and so does the client's. Raises ClientConnectionResetError
        when the client is gone.
        """
        if self._stream is None:
            response = web.Response(status=self.status, headers=self._headers, body=end)
            await response.prepare(self._call.request)
            await response.write_eof()
            return response
        if self.has_heard_only_comments and not self._is_stream:
            end = self._call.plan.error_events(end)  # the status was given already
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
        """End the connection improperly: what was written is flushed, and the body stays without its last chunk."""
        transport = self._call.request.transport
        if transport is not None:
            transport.close()
        assert self._stream is not None
        return self._stream


@asynccontextmanager
async def keeping_alive(call: CallState, client: ClientStream, *, every_s: float) -> AsyncIterator[None]:
    """While a replayed call waits for its engine, its client hears so now and then."""
    if call.plan.framing != "replay":
        yield
        return

    async def keep_alive() -> None:
        with suppress(ClientConnectionResetError):  # the server cancels the call itself
            while True:
                await asyncio.sleep(every_s)
                await client.keep_alive()

    task = asyncio.get_running_loop().create_task(keep_alive())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
