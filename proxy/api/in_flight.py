"""Calls in flight: their memory, stalled clients, how many start together, and those of surplus rollouts, which are stopped.

A slow client is not stalled: its engine is read no faster than the client reads, with a few hundred kB between them.
"""

import asyncio
from collections import deque
from collections.abc import Collection, Iterator
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import islice
from typing import Final, Protocol

from aiohttp import web

from proxy.errors import EngineResponseTooLarge, Overloaded
from proxy.protocols.json_texts import stream_weight
from proxy.rollouts.policy import Policy
from proxy.rollouts.recorder import Recorder
from proxy.rollouts.rollout import SURPLUS, read_rollouts
from proxy.telemetry.logs import LOG
from proxy.telemetry.metrics import Metrics
from proxy.trajectory.step import Step
from proxy.upstream.concurrency import BackgroundWork
from proxy.upstream.endpoint import Endpoint
from storage.errors import StorageError
from storage.redis.store import Store

_CALLS_PER_ITERATION: Final = 16
_SURPLUS_INTERVAL_S: Final = 1.0
_READS_AT_ONCE: Final = 64  # of rollouts
_PROBES = 4  # of each client within the stall timeout
_ORDINARY_BYTES = 24 * 2**20  # of a parsed response that is accepted although others use the memory: 400,000 token ids
_PARSED_RATIO = 4  # the memory that a parsed response may take, to the limit of its bytes
_UNWEIGHED_BYTES = 2**18  # of a response; parsed, they take at most 20 MiB


class CallInFlight(Protocol):
    """A call in flight, of which only this is known here."""

    request: web.Request
    started: float
    body_bytes: int  # of its request and response so far
    response_bytes: int  # of its response alone
    parsed_bytes: int  # of memory that is reserved to parse its response
    is_waiting: bool  # it was interrupted, has left its engine, and is not sent again yet
    policy: Policy
    endpoint: Endpoint  # to which it was sent, or is sent next
    step: Step | None  # None until its engine has completed it

    @property
    def over_sampled(self) -> tuple[str, str] | None:
        """Its rollout and the incarnation, if its group may not need it."""
        ...

    def stop(self, reason: str) -> None:
        """End the call for this reason."""
        ...

    def interrupt(self, reason: str, *, is_last: bool) -> None:
        """Have its engine end the call, which is resumed later, or is ended for this reason if it cannot be; again: nothing.

        A call that would lose what was sampled is interrupted only if `is_last`.
        """
        ...


class ByteReservation:
    """The bytes of one request: they grow as its body arrives, and are released after its response."""

    __slots__ = ("_bytes", "_limit")

    def __init__(self, limit: "InFlightBytes") -> None:
        self._limit = limit
        self._bytes = 0

    def grow(self, more: int) -> None:
        """Reserve more bytes before they are used, or release some (negative). Raises Overloaded."""
        self._limit.take(more, own=self._bytes)
        self._bytes += more

    def release(self) -> None:
        """Release all bytes."""
        self._limit.reserved_bytes -= self._bytes
        self._bytes = 0


class InFlightBytes:
    """The calls in flight of one process, and the limit on their bytes."""

    def __init__(self, limit_bytes: int, client_stall_timeout_s: float, metrics: Metrics, recorder: Recorder) -> None:
        self._limit_bytes = limit_bytes
        self._client_stall_timeout_s = client_stall_timeout_s
        self._metrics = metrics
        self._recorder = recorder
        self.reserved_bytes = 0  # for bodies of requests, calls in flight, and parsed responses
        self._watching = asyncio.get_running_loop().create_task(self._watch())
        self.calls: set[CallInFlight] = set()
        metrics.in_flight_bytes.set_function(self.total_bytes)
        metrics.in_flight_limit_bytes.set(limit_bytes)

    def total_bytes(self) -> int:
        """Return the bytes in flight: request bodies, forwarded requests with their responses, and steps to be stored.

        Large responses count again with the memory of their parsed form.
        """
        return self.reserved_bytes + self._recorder.detached_bytes

    def add(self, call: CallInFlight) -> None:
        """Count a call and the bytes of its request until `remove`."""
        self.calls.add(call)
        self.reserved_bytes += call.body_bytes

    def remove(self, call: CallInFlight) -> None:
        """Stop counting a call, its bytes and its response."""
        self.calls.discard(call)
        self.reserved_bytes -= call.body_bytes + call.parsed_bytes
        call.response_bytes = call.parsed_bytes = 0

    def oldest_s(self, now: float) -> float:
        """Return the age of the oldest call in flight in seconds; 0 if there is none."""
        return max((now - call.started for call in self.calls), default=0.0)

    def stop_sampled(self, policy: str, reason: str) -> int:
        """Stop the calls of a policy that are queued or at an engine; return how many have their whole response."""
        calls = [call for call in self.calls if call.policy.name == policy]
        sampled = [call for call in calls if call.step is None]
        for call in sampled:
            call.stop(reason)
        return len(calls) - len(sampled)

    def interrupt_sampled(
        self, policy: str, reason: str, labels: Collection[str] | None, *, is_last: bool
    ) -> tuple[int, int]:
        """Interrupt the calls of a policy that are queued or at these engines (None: at any), to be resumed later.

        Return how many of them are left there, and how many have their whole response.
        """
        calls = [
            call
            for call in self.calls
            if call.policy.name == policy and not call.is_waiting and (labels is None or call.endpoint.label in labels)
        ]
        sampled = [call for call in calls if call.step is None]
        _interrupt_some(filter(partial(_must_leave, labels), sampled), reason, is_last=is_last)
        return sum(not call.is_waiting for call in sampled), len(calls) - len(sampled)

    def take(self, more: int, *, own: int) -> None:
        """Count `more` bytes of a request that has `own` bytes already. Raises Overloaded if they exceed the limit.

        A request is always accepted if nothing else is in flight: the length of a body has its own limit.
        """
        if more > 0:
            in_flight, limit = self.reserved_bytes + self._recorder.detached_bytes, self._limit_bytes
            if in_flight > own and in_flight + more > limit:
                raise Overloaded(
                    f"Calls in flight use {in_flight} bytes, and this call would exceed the limit of "
                    f"{limit} (agents.max_bytes_in_flight). Try again later."
                )
        self.reserved_bytes += more

    def receive(
        self, call: CallInFlight, read: bytes, limit_bytes: int, *, is_cumulative: bool, is_withheld: bool
    ) -> None:
        """Count a part of a response, and reserve memory for a part of a long stream before it is parsed.

        A cumulative stream counts with its last event only; withheld bytes are not parsed yet. Raises
        EngineResponseTooLarge if the response exceeds `limit_bytes`, or as `reserve`.
        """
        if call.response_bytes + len(read) > min(limit_bytes, _UNWEIGHED_BYTES):
            if is_cumulative:
                self.release(call)
            elif call.response_bytes + len(read) > limit_bytes:
                raise EngineResponseTooLarge(
                    f"The engine's response has more than {limit_bytes} bytes (engines.max_response_bytes)"
                )
            elif not is_withheld:
                self.reserve(call, stream_weight(read), limit_bytes)
        call.response_bytes += len(read)
        call.body_bytes += len(read)
        self.reserved_bytes += len(read)

    def reserve(self, call: CallInFlight, more: int, limit_bytes: int) -> None:
        """Reserve `more` bytes of memory to parse a long response.

        A response is always accepted up to its limits if there is no other call, and if it is of an ordinary size. Raises
        EngineResponseTooLarge if it takes more than four times `limit_bytes`, or other calls use the memory.
        """
        parsed = call.parsed_bytes + more
        if parsed > _PARSED_RATIO * limit_bytes:
            raise EngineResponseTooLarge(
                f"Parsing the engine's response would take more than {_PARSED_RATIO * limit_bytes} bytes of memory "
                f"({_PARSED_RATIO} times engines.max_response_bytes)"
            )
        if parsed > _ORDINARY_BYTES and len(self.calls) > 1 and self.total_bytes() + more > self._limit_bytes:
            raise EngineResponseTooLarge(
                f"Parsing the engine's response takes {parsed} bytes of memory, and other calls use what is left of "
                f"{self._limit_bytes} (agents.max_bytes_in_flight)"
            )
        self.reserved_bytes += more
        call.parsed_bytes = parsed

    def release(self, call: CallInFlight) -> None:
        """Release the memory of a response that is no longer referenced."""
        self.reserved_bytes -= call.response_bytes + call.parsed_bytes
        call.body_bytes -= call.response_bytes
        call.response_bytes = call.parsed_bytes = 0

    async def close(self) -> None:
        """Stop watching clients."""
        self._watching.cancel()
        await asyncio.wait([self._watching])

    async def _watch(self) -> None:
        """Disconnect clients that read nothing within the stall timeout: their unsent bytes do not decrease.

        Probes are counted, not seconds: while this process is blocked, it cannot see clients read.
        """
        seen: dict[CallInFlight, tuple[int, int]] = {}
        while True:
            await asyncio.sleep(self._client_stall_timeout_s / _PROBES)
            before, seen = seen, {}
            for call in tuple(self.calls):
                waiting = _unsent(call.request)
                if not waiting:
                    continue
                size, probes = before.get(call, (waiting, -1))
                seen[call] = (waiting, probes + 1 if size == waiting else 0)
                if seen[call][1] >= _PROBES and call.request.transport is not None:
                    LOG.warning("Client disconnected because it read nothing for %s s", self._client_stall_timeout_s)
                    self._metrics.stalled_clients.inc()
                    call.request.transport.abort()


def _unsent(request: web.Request) -> int:
    """Return the unsent bytes of a client if writing to it is paused; else 0."""
    transport = request.transport
    if transport is None or not request.protocol.writing_paused:
        return 0
    return transport.get_write_buffer_size()


def _must_leave(labels: Collection[str] | None, call: CallInFlight) -> bool:
    """Return whether a call still is to leave its engine: it may have gone on at another one, or the pause may be over."""
    label, pause = call.endpoint.label, call.policy.pause
    return (labels is None or label in labels) and (pause.mode is not None or label in pause.held)


def _interrupt_some(calls: Iterator[CallInFlight], reason: str, *, is_last: bool) -> None:
    """Interrupt calls, as many in each iteration of the event loop as may start in one."""
    some = list(islice(calls, _CALLS_PER_ITERATION))
    for call in some:
        call.interrupt(reason, is_last=is_last)
    if len(some) == _CALLS_PER_ITERATION:
        asyncio.get_running_loop().call_soon(partial(_interrupt_some, calls, reason, is_last=is_last))


class StartPacing:
    """Starts at most `limit` calls in each iteration of the event loop, in the order of their arrival.

    The event loop advances all tasks that are ready by one step per iteration. Without a limit, the first of thousands of
    calls would reach its engine only after the last one was planned, and no other request would be answered meanwhile.
    """

    def __init__(self, limit: int = _CALLS_PER_ITERATION) -> None:
        self._limit = limit
        self._started: list[None] = []  # an item for each start in this iteration; cleared before the next one
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """The number of calls that wait."""
        return len(self._waiting)

    async def turn(self) -> None:
        """Return when a call may start."""
        loop = asyncio.get_running_loop()
        if len(self._started) < self._limit and not self._waiting:
            if not self._started:
                loop.call_soon(self._started.clear)
            self._started.append(None)
            return
        waiter: asyncio.Future[None] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._next_iteration)
        self._waiting.append(waiter)
        await waiter

    def _next_iteration(self) -> None:
        while len(self._started) < self._limit and self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():  # a cancelled call takes no turn
                waiter.set_result(None)
                self._started.append(None)
        loop = asyncio.get_running_loop()
        if self._started:
            loop.call_soon(self._started.clear)
        if self._waiting:
            loop.call_soon(self._next_iteration)


class SurplusCalls(BackgroundWork):
    """Stop the calls of surplus rollouts, about once a second: an over-sampled group is complete without them.

    Any process may finish a rollout as surplus, so each process checks the rollouts of its own calls in flight.
    """

    def __init__(self, store: Store, calls: AbstractSet[CallInFlight], metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics
        self._calls = calls

    async def stop_surplus(self) -> None:
        """Stop the calls of rollouts that are surplus by now. Raises StorageError."""
        names = sorted({call.over_sampled for call in self._calls if call.over_sampled is not None})
        for start in range(0, len(names), _READS_AT_ONCE):
            chunk = names[start : start + _READS_AT_ONCE]
            found = await asyncio.gather(*(self._store.get(rollout_id) for rollout_id, _ in chunk))
            rollouts, _ = read_rollouts(found, self._metrics)
            surplus = {(rollout.rollout_id, rollout.incarnation) for rollout in rollouts if rollout.reason == SURPLUS}
            for call in [call for call in self._calls if call.over_sampled in surplus]:
                call.stop("its group is complete without it")

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_SURPLUS_INTERVAL_S)
            try:
                await self.stop_surplus()
            except StorageError as error:
                LOG.warning("Calls of surplus rollouts not stopped: %s", error)
