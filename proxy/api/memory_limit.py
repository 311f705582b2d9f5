"""How much memory calls hold, and the clients that read nothing.

Holds the calls in flight, the bound on their bytes, and the one task that cuts stalled clients. A client that is slow is none:
its engine is read no faster than it reads (a few hundred kB lie between), so its call holds what its step will. Rule: nothing
is counted per event; the calls are summed up when another one comes, at most ten times a second if they are many.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from aiohttp import web

from proxy.errors import Overloaded
from proxy.telemetry.logs import LOG
from proxy.telemetry.metrics import Metrics

_MANY = 64
_COUNT_EVERY_S = 0.1
_LOOKS = 4  # at each client within the time that it may stall


class Held(Protocol):
    """A call in flight: since when, its bytes so far, request and answer, and its client's connection."""

    request: web.Request
    started: float
    body_bytes: int

    def stop(self, reason: str) -> None:
        """End the call for this reason."""
        ...


class ByteReservation:
    """The bytes that one request holds: they grow as its body comes, and are given back once it is answered."""

    __slots__ = ("_bytes", "_pressure")

    def __init__(self, pressure: "InFlightBytes") -> None:
        self._pressure = pressure
        self._bytes = 0

    def __repr__(self) -> str:
        return f"<Reservation of {self._bytes} bytes>"

    def grow(self, more: int) -> None:
        """Reserve more bytes before they are held, or give some back (negative). Raises Overloaded."""
        self._pressure.take(more, own=self._bytes)
        self._bytes += more

    def release(self) -> None:
        """Give all back."""
        self.grow(-self._bytes)


class InFlightBytes:
    """The calls in flight of one process. `kept` tells the bytes of steps that nobody waits for and are not stored yet."""

    def __init__(
        self, most_bytes: int, client_stall_timeout_s: float, metrics: Metrics, kept: Callable[[], int]
    ) -> None:
        self._most_bytes = most_bytes
        self._client_stall_timeout_s = client_stall_timeout_s
        self._metrics = metrics
        self._kept = kept
        self._asked_bytes = 0
        self._answered_bytes = 0  # as they were counted last
        self._counted_at = -_COUNT_EVERY_S
        self._loop = asyncio.get_running_loop()
        self._watching = self._loop.create_task(self._watch())
        self.calls: set[Held] = set()
        metrics.in_flight_bytes.set_function(self.held_bytes)
        metrics.in_flight_limit_bytes.set(most_bytes)

    def __repr__(self) -> str:
        return f"<Pressure {self.held_bytes()} of {self._most_bytes} bytes>"

    def held_bytes(self) -> int:
        """The bytes of all that is in flight: bodies that came, what was sent of them and its answer, steps on their way."""
        self._answered_bytes = sum(call.body_bytes for call in self.calls)
        self._counted_at = self._loop.time()
        return self._asked_bytes + self._answered_bytes + self._kept()

    def oldest_s(self, now: float) -> float:
        """For how long the oldest call has been in flight; 0 if none is."""
        return max((now - call.started for call in self.calls), default=0.0)

    def reserve(self) -> "ByteReservation":
        """Return a reservation for the body of one request, empty at first. It must be released."""
        return ByteReservation(self)

    def take(self, more: int, *, own: int) -> None:
        """Count `more` bytes of a request that holds `own` bytes already. Raises Overloaded if they do not fit.

        A request that finds nothing else in flight is let in, however long it is: the length of a body has its own limit.
        """
        if more > 0:
            held, most = self._held_lately(), self._most_bytes
            if held > own and held + more > most:
                raise Overloaded(
                    f"calls in flight hold {held} bytes, and this one would go over the limit of {most} "
                    "(agents.max_bytes_in_flight): try again when some have ended"
                )
        self._asked_bytes += more

    def _held_lately(self) -> int:
        """The bytes held; of many calls, as they were a moment ago: else each new call would look at thousands."""
        if len(self.calls) < _MANY or self._loop.time() - self._counted_at > _COUNT_EVERY_S:
            return self.held_bytes()
        return self._asked_bytes + self._answered_bytes + self._kept()

    async def close(self) -> None:
        """Watch no more."""
        self._watching.cancel()
        await asyncio.wait([self._watching])

    async def _watch(self) -> None:
        """Cut every client whose unsent bytes have not become fewer for so long.

        Counted in looks, not on the clock: while we stood still ourselves, nobody could show that it reads.
        """
        seen: dict[Held, tuple[int, int]] = {}
        while True:
            await asyncio.sleep(self._client_stall_timeout_s / _LOOKS)
            before, seen = seen, {}
            for call in tuple(self.calls):
                waiting = _unsent(call.request)
                if not waiting:
                    continue
                size, looks = before.get(call, (waiting, -1))
                seen[call] = (waiting, looks + 1 if size == waiting else 0)
                if seen[call][1] >= _LOOKS and call.request.transport is not None:
                    LOG.warning("a client has read nothing for %s s and is cut", self._client_stall_timeout_s)
                    self._metrics.stalled_clients.inc()
                    call.request.transport.abort()


def _unsent(request: web.Request) -> int:
    """The bytes that wait for a client to read, where so many do that its call stands still; else 0."""
    transport = request.transport
    if transport is None or not request.protocol.writing_paused:
        return 0
    return transport.get_write_buffer_size()
