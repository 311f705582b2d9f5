"""The policies: which models belong to each, its announced version, the pause of its calls, and its rolling update.

In a rolling update one endpoint at a time is held while its weights change, and then has its own version. The announcement
`endpoints` of the policy has them by label. Processes of 0.1.0 ignore it.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar

import orjson

from proxy.errors import LowerVersion, NotFound, Paused, UnprocessableRequest
from proxy.rollouts.rollout import announced_value, of_policy
from proxy.telemetry.logs import LOG
from proxy.trajectory.facts import number_of
from proxy.trajectory.step import DEFAULT_POLICY
from proxy.upstream.concurrency import BackgroundWork
from storage.errors import StorageError
from storage.redis.store import Announcements
from storage.types import Announcement, newer

POLICY_ANNOUNCEMENT: Final = "policy"
PAUSE_ANNOUNCEMENT: Final = "pause"
ENDPOINTS_ANNOUNCEMENT: Final = "endpoints"
ABORT_ANNOUNCEMENT: Final = "abort"  # its value is the number of the pause that aborts calls in flight
# An `_Interrupt`; processes of 0.1.0 ignore it: their calls count until they end.
INTERRUPT_ANNOUNCEMENT: Final = "interrupt"
# Between heartbeats, and the time until every process knows of a pause if a notification is lost.
_INTERVAL_S: Final = 1.0
_PAUSED_INTERVAL_S: Final = 0.1  # between looks at the calls in flight during a pause
_LIFETIME_MS: Final = 5000  # a process without a heartbeat for this long counts as dead
_AWARE_TIMEOUT_S: Final = 2  # heartbeats are sent every second: a process that is unaware after this is unreachable
_ABORT_TIMEOUT_S: Final = 10
_WOKEN_AT_ONCE: Final = 16  # calls that a pause held
_POLL_INTERVAL_S: Final = 0.05
_MAX_LOGGED: Final = 100  # models that no policy lists
_MAX_NAME: Final = 100  # characters of a model's name in the log

T = TypeVar("T")

InFlight: TypeAlias = Literal["keep", "abort", "resume"]


@dataclass(frozen=True, slots=True)
class Announced:
    """The announced version, epoch and run of a policy. Versions are compared within an epoch."""

    version: str | None = None
    epoch: int = 0  # the next one begins when a run continues from an earlier version
    run: str | None = None  # the ID of the run that trains it, if that is known
    highest: int | None = None  # the highest number that was announced in the epoch

    @classmethod
    def read(cls, announcement: Announcement | None, name: str, otherwise: "Announced | None" = None) -> "Announced":
        """Return the value of an announcement, or `otherwise` if it is damaged. A bare version belongs to the first epoch."""
        if announcement is None:
            return NOTHING
        value = announced_value(announcement, Announced | str | int | None, name, otherwise)
        if isinstance(value, Announced):
            return value
        version = str(value) if isinstance(value, int) else value
        return cls(version, highest=number_of(version))

    def written(self) -> bytes:
        """Return the value to announce: the version alone if there is no more."""
        is_plain = self == Announced(self.version, highest=number_of(self.version))
        return orjson.dumps(self.version if is_plain else self)

    def advanced(self, version: str, *, run: str | None = None, new_epoch: bool = False) -> "Announced":
        """Return what is announced after this, in a new epoch if that is requested or the run is another one.

        Raises LowerVersion if the number is lower than one that was announced in the epoch.
        """
        number = number_of(version)
        if new_epoch or (run not in (None, self.run) and self.version is not None):
            return Announced(version, self.epoch + 1, run, number)
        if number is not None and self.highest is not None and number < self.highest:
            raise LowerVersion(
                f"Version {version} is lower than {self.highest}, which was announced before; nothing was announced. If the "
                "run continues from an earlier version, send new_epoch: true or the ID of another run; groups sampled before "
                "are then dropped. If an old request was repeated, nothing needs to be done.",
                param="version",
            )
        return Announced(version, self.epoch, run or self.run, self.highest if number is None else number)

    def staleness(self, version: str | None, epoch: int) -> int | None:
        """Return how many versions a token is behind, below 0 if its engine reported a version before its announcement.

        It is None if the token is of another epoch, or a version is not a number.
        """
        number, own = number_of(version), number_of(self.version)
        return None if epoch != self.epoch or number is None or own is None else own - number


NOTHING: Final = Announced()


def unknown_staleness(version: str | None) -> str | None:
    """Return a warning if a version is not a number."""
    if version is None or number_of(version) is not None:
        return None
    return (
        f"Version {version[:_MAX_NAME]!r} is not a number of at most 18 digits: the staleness of its groups is unknown, and "
        "claims with max_staleness do not take them."
    )


def read_announced(announcements: Mapping[str, Announcement], policy: str = DEFAULT_POLICY) -> Announced:
    """Return what is announced of a policy."""
    name = of_policy(POLICY_ANNOUNCEMENT, policy)
    return Announced.read(announcements.get(name), name)


@dataclass(frozen=True, slots=True)
class EndpointUpdate:
    """An endpoint in a rolling update."""

    is_held: bool = False
    is_last: bool = False  # its calls are interrupted although they lose what was sampled
    version: str | None = None  # of its weights; None: the policy's
    epoch: int = 0
    policy_number: int = -1  # of the policy's announcement when the version was set: a later one replaces the version


class _Latest(Generic[T]):
    """The newest announcement of a policy that this process knows; `value` is a default until there is one."""

    def __init__(self, announcement: str, policy: str, kind: Any, value: T) -> None:
        self.name = of_policy(announcement, policy)
        self.value = value
        self._kind = kind
        self._number = 0

    def apply(self, announcements: Mapping[str, Announcement]) -> bool:
        """Apply a newer announcement; return whether there is one. A damaged one leaves the value as it was."""
        announcement = newer(announcements, self.name, self._number)
        if announcement is None:
            return False
        self.value = announced_value(announcement, self._kind, self.name, self.value)
        self._number = announcement.number
        return True


def latest_endpoints(policy: str) -> _Latest[dict[str, EndpointUpdate]]:
    """Return the endpoints of a rolling update by label; there are none until they are announced."""
    return _Latest(ENDPOINTS_ANNOUNCEMENT, policy, dict[str, EndpointUpdate], {})


async def change_endpoints(
    announcements: Announcements,
    policy: str,
    change: Callable[[dict[str, EndpointUpdate], Mapping[str, Announcement]], Mapping[str, EndpointUpdate]],
) -> dict[str, Announcement]:
    """Announce what `change` returns for the present endpoints and announcements; concurrent changes are all applied.

    Endpoints that are not held and have no version of their own are dropped.
    """
    while True:
        present, known = await announcements.read(), latest_endpoints(policy)
        known.apply(present)
        name, changed = known.name, change(known.value, present)
        left = {label: it for label, it in changed.items() if it.is_held or it.version is not None}
        number = present[name].number if name in present else 0
        announcement = await announcements.announce_if(name, orjson.dumps(left), number)
        if announcement is not None:
            return {name: announcement}


def held(known: Mapping[str, EndpointUpdate], labels: Iterable[str], *, is_last: bool) -> dict[str, EndpointUpdate]:
    """Return the endpoints with these held."""
    changed = {label: replace(known.get(label, EndpointUpdate()), is_held=True, is_last=is_last) for label in labels}
    return {**known, **changed}


def released(
    known: Mapping[str, EndpointUpdate], labels: Iterable[str] | None, update: EndpointUpdate | None
) -> dict[str, EndpointUpdate]:
    """Return the endpoints with these (None: all that are held) released; with a version if `update` has one."""
    chosen = [label for label, it in known.items() if it.is_held] if labels is None else labels
    plain = EndpointUpdate()
    changed = {label: update or replace(known.get(label, plain), is_held=False, is_last=False) for label in chosen}
    return {**known, **changed}


class PolicyVersion:
    """The latest version of a policy that this process knows; calls compare it at their start and end."""

    __slots__ = ("_endpoints", "_name", "_number", "announced", "is_rolling")

    def __init__(self, policy: str = DEFAULT_POLICY) -> None:
        self.announced = NOTHING
        self.is_rolling = False  # endpoints may have versions of their own (`at`)
        self._name = of_policy(POLICY_ANNOUNCEMENT, policy)
        self._number = -1
        self._endpoints = latest_endpoints(policy)

    def apply(self, announcements: Mapping[str, Announcement]) -> None:
        """Apply newer announcements."""
        announcement = newer(announcements, self._name, self._number)
        if announcement is not None:
            self.announced = Announced.read(announcement, self._name, self.announced)
            self._number = announcement.number
        if self._endpoints.apply(announcements):
            self.is_rolling = bool(self._endpoints.value)

    def at(self, label: str) -> tuple[str | None, int]:
        """Return the version and the epoch of calls at an endpoint.

        In a rolling update they are its own, until the next version of the policy is announced.
        """
        own = self._endpoints.value.get(label) if self.is_rolling else None
        if own is not None and own.version is not None and own.policy_number >= self._number:
            return own.version, own.epoch
        return self.announced.version, self.announced.epoch

    @property
    def endpoints(self) -> dict[str, str | None]:
        """The versions of endpoints that have another one than the policy, by label."""
        versions = {label: self.at(label)[0] for label in self._endpoints.value}
        return {label: version for label, version in versions.items() if version != self.announced.version}

    async def check(
        self, announcements: Announcements, version: str, *, run: str | None = None, new_epoch: bool = False
    ) -> None:
        """Raise LowerVersion if the version cannot be announced now."""
        present = (await announcements.read()).get(self._name)
        Announced.read(present, self._name).advanced(version, run=run, new_epoch=new_epoch)

    async def announce(
        self, announcements: Announcements, version: str, *, run: str | None = None, new_epoch: bool = False
    ) -> Announced:
        """Announce the version of all calls that begin afterwards, in all processes of the store; return what is announced.

        Each announcement builds on the present one, so that concurrent announcements are all applied. An announcement that
        exists already is written again: interrupted, it may have reached only some buckets. Raises LowerVersion.
        """
        following, value = NOTHING, b""
        while True:
            present = (await announcements.read()).get(self._name)
            if present is None or present.value != value:  # equal: an attempt with a lost response wrote it
                following = Announced.read(present, self._name).advanced(version, run=run, new_epoch=new_epoch)
                value = following.written()
            number = 0 if present is None else present.number
            announcement = await announcements.announce_if(self._name, value, number)
            if announcement is not None:
                break
        self.apply({self._name: announcement})
        if (warning := unknown_staleness(following.version)) is not None:
            LOG.warning(warning, extra={"fields": {"announcement": self._name}})
        return following


class Heartbeats(BackgroundWork):
    """What this process sends to all others that share the store, and reads: which pauses it knows, and its calls in flight.

    It sends them every second, once it is notified of an announcement, and during a pause when the last call in flight ends.
    `followers` get the announcements whenever there is a new one. Call `close` before the store is closed.
    """

    def __init__(
        self,
        announcements: Announcements,
        process_id: str,
        followers: Iterable[Callable[[Mapping[str, Announcement]], None]] = (),
    ) -> None:
        self.announcements = announcements
        self.pauses: dict[str, Pause] = {}
        self.followers = list(followers)
        self._process_id = process_id
        self._known = -1  # the sum of the numbers of the announcements that this process knows
        self._sent: dict[str, tuple[int, int]] = {}
        self.is_due = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Heartbeats of {self._process_id}>"

    async def beat(self) -> Mapping[str, tuple[int, int]]:
        """Send a heartbeat; return what all processes have sent, for each policy.

        That is the number of calls in flight, and how many processes know an older pause only. Raises StorageError.
        """
        self._sent = {name: (pause.number, pause.engaged()) for name, pause in self.pauses.items()}
        beat = await self.announcements.beat(self._process_id, self._sent, lifetime_ms=_LIFETIME_MS, known=self._known)
        if beat.announcements is not None:
            for pause in self.pauses.values():
                pause.apply(beat.announcements)
            for follow in self.followers:
                follow(beat.announcements)
            self._known = beat.known
        return beat.counts

    async def close(self) -> None:
        """Stop the heartbeats; the calls of this process have ended."""
        await super().close()
        with suppress(StorageError, TimeoutError):  # else it expires after _LIFETIME_MS
            async with asyncio.timeout(_INTERVAL_S):
                await self.announcements.beat(self._process_id, {}, lifetime_ms=0, known=self._known)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._beat_forever())
            tasks.create_task(self.announcements.listen(self.is_due))

    async def _beat_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            until = loop.time() + _INTERVAL_S
            while (left_s := until - loop.time()) > 0 and not self._has_news():
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(left_s, _PAUSED_INTERVAL_S) if self._is_draining() else left_s):
                        await self.is_due.wait()
                    break
            self.is_due.clear()
            with suppress(StorageError):  # calls notice it and report it
                await self.beat()

    def _is_draining(self) -> bool:
        return any(
            (pause.mode is not None and pause.in_flight) or (pause.held and self._sent.get(name, (0, 0))[1])
            for name, pause in self.pauses.items()
        )

    def _has_news(self) -> bool:
        """Return whether the last call in flight of a paused policy, or at a held endpoint, has ended since the heartbeat."""
        paused = (pause for pause in self.pauses.items() if pause[1].mode is not None or pause[1].held)
        return any(self._sent.get(name, (0, 0))[1] and not pause.engaged() for name, pause in paused)


@dataclass(frozen=True, slots=True)
class _Interrupt:
    """The announcement of a pause that interrupts calls in flight; `is_last` as for `Pause.interrupt_calls`."""

    pause: int  # its number
    is_last: bool = False


class Pause:
    """The pause of a policy's calls, as this process knows it; the others learn of it by `heartbeats`.

    `abort_calls` stops the calls of this process that engines are sampling, and returns the number of those that engines have
    completed. `interrupt_calls(labels, is_last=)` interrupts those that are queued or at these engines (None: at any), to be
    resumed later; with `is_last` also those that lose what was sampled. It returns how many are left there, and how many have
    their whole response. Both are called again until the pause ends. No call is sent to endpoints that are `held`, by their
    labels.
    """

    def __init__(
        self, heartbeats: Heartbeats, *, policy: str = DEFAULT_POLICY, max_waiting: int, timeout_s: float
    ) -> None:
        self.mode: str | None = None
        self.number = 0
        self.held: frozenset[str] = frozenset()
        self.abort_calls: Callable[[], int] = lambda: 0
        self.interrupt_calls: Callable[..., tuple[int, int]] = lambda _labels, *, is_last: (0, 0)  # noqa: ARG005
        self._heartbeats = heartbeats
        self._policy = policy
        self._name = of_policy(PAUSE_ANNOUNCEMENT, policy)
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._abort = _Latest(ABORT_ANNOUNCEMENT, policy, int, -1)  # the number of a pause
        self._interrupt = _Latest(INTERRUPT_ANNOUNCEMENT, policy, _Interrupt, _Interrupt(-1))
        self._endpoints = latest_endpoints(policy)
        self.in_flight = 0  # calls of this process that were admitted, have not ended, and do not wait to be resumed
        self._waiting = 0
        self._waiters: dict[asyncio.Future[None], None] = {}  # of calls, until the next change
        heartbeats.pauses[policy] = self

    def __repr__(self) -> str:
        return f"<Pause {self.mode}, {self.in_flight} in flight, {self._waiting} waiting>"

    def apply(self, announcements: Mapping[str, Announcement]) -> None:
        """Apply a newer announcement."""
        announcement = newer(announcements, self._name, self.number)
        if announcement is not None:
            self.mode = announced_value(announcement, Literal["wait", "reject"] | None, self._name, self.mode)
            self.number = announcement.number
            self._note_change()
        if self._abort.apply(announcements):
            self.engaged()
        if self._interrupt.apply(announcements):
            self.engaged()
        if self._endpoints.apply(announcements):
            self.held = frozenset(label for label, it in self._endpoints.value.items() if it.is_held)
            self.engaged()
            self._note_change()

    def _note_change(self) -> None:
        """Wake the calls that wait, and send a heartbeat."""
        waiters, self._waiters = iter(self._waiters), {}
        _wake_some(waiters)
        self._heartbeats.is_due.set()

    async def announce(self, mode: str | None) -> int:
        """Pause (or resume, with None) calls at every process that shares the store; return the announcement's number."""
        announcement = await self._heartbeats.announcements.announce(self._name, orjson.dumps(mode))
        self.apply({self._name: announcement})
        return announcement.number

    async def drained(self, mode: str, *, drain_s: float, in_flight: InFlight = "keep") -> tuple[int, bool]:
        """Pause calls, and wait up to `drain_s` until none is in flight; then, with "abort", stop those that are left.

        With "resume", calls are interrupted at once, and wait until they are resumed after the pause. After `drain_s` those
        are interrupted as well that lose what was sampled. Return the number of calls in flight at all processes, and whether
        all processes have drained in this pause. Calls that engines have completed do not count once calls are aborted or
        interrupted: no engine samples them.
        """
        number = await self.announce(mode)
        if in_flight == "resume":
            await self._announce_end(in_flight, number, is_last=False)
        left, is_drained = await self._in_flight_after(number, drain_s)
        if in_flight != "keep" and not is_drained and self.number == number:
            await self._announce_end(in_flight, number, is_last=True)
            left, is_drained = await self._in_flight_after(number, _ABORT_TIMEOUT_S)
        return left, is_drained

    async def hold(self, labels: Collection[str], *, drain_s: float) -> tuple[int, bool]:
        """Hold endpoints: their calls are interrupted at once, and resumed at the others; no call is sent to them.

        After `drain_s` those are interrupted as well that lose what was sampled. Return the number of calls in flight at the
        endpoints that are held, and whether all processes have none. Processes of 0.1.0 do not hold: all of their calls count.
        """
        await self._change(lambda known, _: held(known, labels, is_last=False))
        number = await self._announce_again()
        left, is_drained = await self._in_flight_after(number, drain_s)
        if not is_drained and self.number == number:
            await self._change(lambda known, _: held(known, labels, is_last=True))
            left, is_drained = await self._in_flight_after(number, _ABORT_TIMEOUT_S)
        return left, is_drained

    async def release(
        self,
        labels: Collection[str] | None,
        version: str | None = None,
        *,
        run: str | None = None,
        new_epoch: bool = False,
    ) -> None:
        """Release endpoints (None: all that are held).

        With a version, calls at them have it until the policy's next version is announced. Raises LowerVersion.
        """
        name = of_policy(POLICY_ANNOUNCEMENT, self._policy)

        def change(
            known: dict[str, EndpointUpdate], present: Mapping[str, Announcement]
        ) -> Mapping[str, EndpointUpdate]:
            if version is None:
                return released(known, labels, None)
            number = present[name].number if name in present else 0
            following = Announced.read(present.get(name), name).advanced(version, run=run, new_epoch=new_epoch)
            return released(known, labels, EndpointUpdate(version=version, epoch=following.epoch, policy_number=number))

        await self._change(change)

    async def _change(
        self, change: Callable[[dict[str, EndpointUpdate], Mapping[str, Announcement]], Mapping[str, EndpointUpdate]]
    ) -> None:
        announced = await change_endpoints(self._heartbeats.announcements, self._policy, change)
        self.apply(announced)
        for follow in self._heartbeats.followers:
            follow(announced)

    async def _announce_again(self) -> int:
        """Announce the present mode again; return its number. A process that knows it knows earlier announcements as well."""
        announcements = self._heartbeats.announcements
        while True:
            present = (await announcements.read()).get(self._name)
            value, number = (b"null", 0) if present is None else (present.value, present.number)
            announcement = await announcements.announce_if(self._name, value, number)
            if announcement is not None:
                self.apply({self._name: announcement})
                return announcement.number

    async def _announce_end(self, in_flight: InFlight, number: int, *, is_last: bool) -> None:
        """Announce that a pause aborts or interrupts calls."""
        name, value = (
            (self._abort.name, orjson.dumps(number))
            if in_flight == "abort"
            else (self._interrupt.name, orjson.dumps(_Interrupt(number, is_last)))
        )
        announcement = await self._heartbeats.announcements.announce(name, value)
        self.apply({name: announcement})

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

    async def beat(self) -> tuple[int, int]:
        """Send a heartbeat; return the calls in flight at all processes, and how many processes know an older pause only."""
        return (await self._heartbeats.beat())[self._policy]

    def engaged(self) -> int:
        """Return the calls in flight of this process without those that engines have completed in an aborted pause.

        If endpoints are held and calls are not paused, those at the endpoints. Calls are aborted or interrupted each time: one
        that was admitted before the pause may be sent after the first time.
        """
        if self._abort.value == self.number:
            return self.in_flight - self.abort_calls()
        if (interrupt := self._interrupt.value).pause == self.number:
            _, completed = self.interrupt_calls(None, is_last=interrupt.is_last)
            return self.in_flight - completed
        left = 0
        for is_last in (False, True):
            labels = [label for label in self.held if self._endpoints.value[label].is_last == is_last]
            if labels:
                left += self.interrupt_calls(labels, is_last=is_last)[0]
        return left if self.held and self.mode is None else self.in_flight

    async def passed(
        self, timeout_s: float | None = None, *, is_resumed: bool = False, labels: Collection[str] = ()
    ) -> None:
        """Wait until calls are not paused, and not all endpoints of a call are held, if their labels are passed.

        Values that were read before are outdated then. Raises Paused after `timeout_s`, by default `agents.pause_timeout_s`.
        A call that was interrupted (`is_resumed`) waits in every mode and without a limit on waiting calls. It, and a call with
        labels, is in flight already, and does not count as such meanwhile.
        """
        if not is_resumed:
            self._refuse_if_rejecting()
            if self._waiting >= self._max_waiting:
                raise Paused(
                    f"Calls are paused, and {self._waiting} calls are already waiting (agents.max_paused). Try again later."
                )
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        is_counted = is_resumed or bool(labels)
        self._waiting += not is_resumed
        self.in_flight -= is_counted
        try:
            async with asyncio.timeout(timeout_s):
                while self._is_closed(labels, is_resumed=is_resumed):
                    waiter = asyncio.get_running_loop().create_future()
                    self._waiters[waiter] = None
                    try:
                        await waiter
                    finally:  # a pause may last hours, and calls that give up are sent again
                        self._waiters.pop(waiter, None)
        except TimeoutError:
            setting = "resume_timeout_s" if is_resumed else "pause_timeout_s"
            raise Paused(f"Calls are still paused after {timeout_s:g} s (agents.{setting}). Try again later.") from None
        finally:
            self._waiting -= not is_resumed
            self.in_flight += is_counted
        if not is_resumed:
            self._refuse_if_rejecting()

    def _is_closed(self, labels: Collection[str], *, is_resumed: bool) -> bool:
        is_paused = self.mode == "wait" or (is_resumed and self.mode is not None)
        return is_paused or (bool(labels) and self.held.issuperset(labels))

    def _refuse_if_rejecting(self) -> None:
        if self.mode == "reject":
            path = "/policy" if self._policy == DEFAULT_POLICY else f"/policies/{self._policy}"
            raise Paused(f"Calls are paused while the weights change (POST {path}/pause). Try again later.")


def _wake_some(waiters: Iterator[asyncio.Future[None]]) -> None:
    """Wake calls, a few in each iteration of the event loop: each takes a part of a millisecond, and there may be thousands."""
    some = list(islice(waiters, _WOKEN_AT_ONCE))
    for waiter in some:
        if not waiter.done():  # else its call has ended
            waiter.set_result(None)
    if len(some) == _WOKEN_AT_ONCE:
        asyncio.get_running_loop().call_soon(_wake_some, waiters)


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy."""

    name: str
    models: tuple[str, ...]  # names at the engine, with `*` for any characters
    is_trained: bool
    version: PolicyVersion
    pause: Pause

    def has(self, model: str) -> bool:
        """Return whether calls of this model belong to the policy."""
        return any(fnmatchcase(model, pattern) for pattern in self.models)


class Policies:
    """The configured policies and the default one, to which the models of no other policy belong.

    `logs_unlisted`: whether calls of the default policy are unexpected, and each of their models is logged once.
    """

    def __init__(self, policies: Iterable[Policy], heartbeats: Heartbeats, *, logs_unlisted: bool = False) -> None:
        self._heartbeats = heartbeats
        self._policies = {policy.name: policy for policy in policies}
        self.default = self._policies[DEFAULT_POLICY]
        self.only = self.default if len(self._policies) == 1 else None  # no other policy is configured
        self._named = [policy for policy in self._policies.values() if policy.models]
        self._unlisted: set[str | None] | None = set() if logs_unlisted else None

    def __repr__(self) -> str:
        return f"<Policies {', '.join(self._policies)}>"

    def __iter__(self) -> Iterator[Policy]:
        return iter(self._policies.values())

    async def start(self) -> "Policies":
        """Read versions and pauses, and start the heartbeats. Raises StorageError."""
        await self._heartbeats.beat()
        self._heartbeats.start()
        return self

    async def close(self) -> None:
        """Stop the heartbeats."""
        await self._heartbeats.close()

    @property
    def has_named(self) -> bool:
        """Whether there are other policies than the default one."""
        return bool(self._named)

    @property
    def trained(self) -> tuple[str, ...]:
        """The names of the policies that are trained."""
        return tuple(policy.name for policy in self if policy.is_trained)

    def of(self, model: str | None) -> Policy:
        """Return the first policy to which a model belongs. `model`: its name at the engine; None if the call names none."""
        if model is not None:
            for policy in self._named:
                if policy.has(model):
                    return policy
        return self.default

    def of_call(self, model: str | None) -> Policy:
        """Return the policy of a call as `of` does, and log a model that no policy lists once."""
        policy = self.of(model)
        if policy is self.default and self._unlisted is not None:
            name = model and model[:_MAX_NAME]
            if name not in self._unlisted and len(self._unlisted) < _MAX_LOGGED:  # clients choose the names
                self._unlisted.add(name)
                LOG.warning(
                    "No policy lists the model of a call: its policy is default (policies.*.models)",
                    extra={"fields": {"model": name}},
                )
        return policy

    def named(self, name: str) -> Policy:
        """Return the policy with this name. Raises NotFound."""
        policy = self._policies.get(name)
        if policy is None:
            raise NotFound(f"Policy {name!r} not found. The policies are {', '.join(self._policies)}.", param="policy")
        return policy

    def exports(self, name: str | None, policy: str) -> bool:
        """Return whether an export has the steps of a policy: the named one, or else any that is not excluded from training."""
        if name is not None:
            return policy == name
        known = self._policies.get(policy)
        return known is None or known.is_trained

    def claimed(self, name: str | None) -> Policy:
        """Return the policy that a claim takes groups of: the named one, or the only one that is trained.

        Raises:
            NotFound: No policy has this name.
            UnprocessableRequest: The policy is not trained, or none is named and not exactly one is trained.
        """
        if name is None:
            trained = self.trained
            if len(trained) == 1:
                return self._policies[trained[0]]
            raise UnprocessableRequest(
                f"Several policies are trained: {', '.join(trained)}. Name one of them in policy."
                if trained
                else "No policy is trained (policies.*.train).",
                param="policy",
            )
        policy = self.named(name)
        if not policy.is_trained:
            raise UnprocessableRequest(
                f"Policy {name!r} is not trained (policies.{name}.train); its groups cannot be claimed.", param="policy"
            )
        return policy

    def apply(self, announcements: Mapping[str, Announcement]) -> None:
        """Apply newer announcements of versions and pauses."""
        for policy in self._policies.values():
            policy.version.apply(announcements)
            policy.pause.apply(announcements)
