"""The pause of a policy's calls, across all processes that share a store."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Final, Literal

import msgspec
import orjson

from proxy.errors import Paused
from proxy.rollouts.stored_fields import announced_value
from proxy.trajectory.step import DEFAULT_POLICY
from storage.errors import StorageError
from storage.store import Announcements
from storage.types import Announcement, newer

PAUSE_ANNOUNCEMENT: Final = "pause"
ABORT_ANNOUNCEMENT: Final = "abort"  # its value is the number of the pause whose calls in flight are aborted
_INTERVAL_S: Final = 1.0  # between heartbeats, and the time until every process knows of a pause
_PAUSED_INTERVAL_S: Final = 0.1  # during a pause, and the time until its end is known
_LIFETIME_MS: Final = 5000  # a process without a heartbeat for this long counts as dead
_AWARE_TIMEOUT_S: Final = 2  # heartbeats are sent every second: a process that is unaware after this is unreachable
_ABORT_TIMEOUT_S: Final = 10
_POLL_INTERVAL_S: Final = 0.05


def _no_calls() -> int:
    return 0


def announcement_name(name: str, policy: str) -> str:
    """Return the name of an announcement for one policy."""
    return name if policy == DEFAULT_POLICY else f"{name}:{policy}"


class Pause:
    """The pause of a policy's calls, as this process knows it.

    Call `start` inside the event loop, and `close` before the store is closed.

    `followers` read the announcements of every heartbeat. `abort_calls` stops the calls of this process that engines are
    sampling, and returns the number of those that engines have completed; it is called again until the pause ends.
    """

    def __init__(
        self,
        announcements: Announcements,
        process_id: str,
        *,
        policy: str = DEFAULT_POLICY,
        max_waiting: int,
        timeout_s: float,
        followers: Iterable[Callable[[Mapping[str, Announcement]], None]] = (),
    ) -> None:
        self.mode: str | None = None
        self.number = 0
        self.abort_calls: Callable[[], int] = _no_calls
        self._announcements = announcements
        self._policy = policy
        self._name = announcement_name(PAUSE_ANNOUNCEMENT, policy)
        self._abort_name = announcement_name(ABORT_ANNOUNCEMENT, policy)
        self._process_id = announcement_name(process_id, policy)
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._followers = tuple(followers)
        self._aborted = -1  # the number of a pause
        self._abort_number = 0
        self.in_flight = 0  # calls of this process that were admitted, and have not ended
        self._waiting = 0
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Pause {self.mode}, {self.in_flight} in flight, {self._waiting} waiting>"

    async def start(self) -> None:
        """Read whether calls are paused, and start the heartbeats. Raises StorageError."""
        await self.beat()
        self._task = asyncio.get_running_loop().create_task(self._heartbeat_forever())

    async def close(self) -> None:
        """Stop the heartbeats; the calls of this process have ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        with suppress(StorageError, TimeoutError):  # else it expires after _LIFETIME_MS
            async with asyncio.timeout(_INTERVAL_S):
                await self._announcements.heartbeat(self._process_id, b"", lifetime_ms=0)

    def apply(self, announcements: Mapping[str, Announcement]) -> None:
        """Apply a newer announcement."""
        announcement = newer(announcements, self._name, self.number)
        if announcement is not None:
            self.mode = announced_value(announcement, Literal["wait", "reject"] | None, self._name, self.mode)
            self.number = announcement.number
            self._changed.set()
            self._changed = asyncio.Event()

    async def announce(self, mode: str | None) -> int:
        """Pause (or resume, with None) calls at every process that shares the store; return the announcement's number."""
        announcement = await self._announcements.announce(self._name, orjson.dumps(mode))
        self.apply({self._name: announcement})
        return announcement.number

    async def drained(self, mode: str, *, drain_s: float, aborts: bool = False) -> tuple[int, bool]:
        """Pause calls, and wait up to `drain_s` until none is in flight; then, with `aborts`, stop those that are left.

        Return the number of calls in flight at all processes, and whether all processes have drained in this pause. Calls that
        engines have completed do not count once calls are aborted: no engine samples them.
        """
        number = await self.announce(mode)
        in_flight, is_drained = await self._in_flight_after(number, drain_s)
        if aborts and not is_drained and self.number == number:
            await self._announcements.announce(self._abort_name, orjson.dumps(number))
            in_flight, is_drained = await self._in_flight_after(number, _ABORT_TIMEOUT_S)
        return in_flight, is_drained

    async def _in_flight_after(self, number: int, wait_s: float) -> tuple[int, bool]:
        """Wait until no call is in flight, `wait_s` have passed, or another pause or its end is announced."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            in_flight, unaware = await self.beat()
            past = loop.time() - began
            is_over = self.number != number or past >= (max(wait_s, _AWARE_TIMEOUT_S) if unaware else wait_s)
            if is_over or not (in_flight or unaware):
                return in_flight, not in_flight and not unaware and self.number == number
            await asyncio.sleep(_POLL_INTERVAL_S)

    async def passed(self) -> None:
        """Wait until calls are not paused. Values that were read before are outdated then. Raises Paused."""
        self._refuse_if_rejecting()
        if self._waiting >= self._max_waiting:
            raise Paused(
                f"Calls are paused, and {self._waiting} calls are already waiting (agents.max_paused). Try again later."
            )
        self._waiting += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                while self.mode == "wait":
                    await self._changed.wait()
        except TimeoutError:
            raise Paused(
                f"Calls are still paused after {self._timeout_s:g} s (agents.pause_timeout_s). Try again later."
            ) from None
        finally:
            self._waiting -= 1
        self._refuse_if_rejecting()

    async def beat(self) -> tuple[int, int]:
        """Send a heartbeat; return the calls in flight at all processes, and how many processes know an older pause only."""
        mine = orjson.dumps([self.number, self.in_flight - self._completed_calls()])
        announcements, beats = await self._announcements.heartbeat(self._process_id, mine, lifetime_ms=_LIFETIME_MS)
        self.apply(announcements)
        for follow in self._followers:
            follow(announcements)
        if (abort := newer(announcements, self._abort_name, self._abort_number)) is not None:
            self._aborted = announced_value(abort, int, self._abort_name, self._aborted)
            self._abort_number = abort.number
            self._completed_calls()
        known = [_read_beat(value) for process_id, value in beats.items() if self._is_of_policy(process_id)]
        return sum(in_flight for _, in_flight in known), sum(number < self.number for number, _ in known)

    def _is_of_policy(self, process_id: str) -> bool:
        _, _, policy = process_id.partition(":")
        return (policy or DEFAULT_POLICY) == self._policy

    def _completed_calls(self) -> int:
        """Stop the calls in flight if the current pause aborts them; return how many others their engines have completed.

        A call that was admitted before the pause may be sent after others were stopped, so every heartbeat stops calls.
        """
        return self.abort_calls() if self._aborted == self.number else 0

    def _refuse_if_rejecting(self) -> None:
        if self.mode == "reject":
            path = "/policy" if self._policy == DEFAULT_POLICY else f"/policies/{self._policy}"
            raise Paused(f"Calls are paused while the weights change (POST {path}/pause). Try again later.")

    async def _heartbeat_forever(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_INTERVAL_S if self.mode is None else _PAUSED_INTERVAL_S):
                    await self._changed.wait()
            with suppress(StorageError):  # calls notice it and report it
                await self.beat()


def _read_beat(value: bytes) -> tuple[int, int]:
    """Return the number of the pause that a process knows, and its calls in flight; none for a damaged heartbeat."""
    try:
        return msgspec.json.decode(value, type=tuple[int, int])
    except (ValueError, RecursionError):  # one of them is that of msgspec
        return 0, 0
