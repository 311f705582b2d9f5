"""Admission of calls: a call opens its rollout, waits for the end of a pause, and is counted until it leaves.

With a journal, calls of rollouts that this process knows continue while the store is unreachable, except in rollouts with a
limit of steps or tokens: it cannot be enforced without the store.

In a rollout with a limit of steps, a call leases a step reservation from its opening on, and releases it if it is never sent. A
call that is sent has a step, which takes the reservation over in the store.

While a call is in flight, its rollout and its group do not expire (`store.ttl_s`), and its rollout is not idle (`idle_s`),
however long the call takes. The cost is per rollout, not per call; without a TTL and `idle_s`, nothing is renewed.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar

from proxy.clock import Clock
from proxy.errors import Conflict, LimitReached, RolloutClosed, StoreUnavailable
from proxy.rollouts.finishing import Finisher
from proxy.rollouts.group import join
from proxy.rollouts.policy import Policies, Policy
from proxy.rollouts.recorder import Recorder
from proxy.rollouts.rollout import (
    DEADLINE,
    FINISHED,
    LiveRollout,
    LiveRollouts,
    Rollout,
    checked_id,
    is_past_deadline,
    no_rollout,
    read_rollout,
    write_fields,
)
from proxy.telemetry.logs import LOG
from proxy.telemetry.metrics import Metrics
from proxy.upstream.concurrency import BackgroundWork
from proxy.upstream.registry import EndpointRegistry
from storage.errors import FieldsChanged, StorageError, StoreUnreachable
from storage.redis.store import Store
from storage.types import Reservation, Timer

T = TypeVar("T")

LEASE_MS: Final = 60_000  # reservations of a process that died count for this long
_RENEWAL_INTERVAL_S: Final = 20.0
_START_TIMEOUT_S: Final = 10
_START_INTERVAL_S: Final = 0.05
_RENEWALS: Final = 3  # per TTL, and per `idle_s`
_CONCURRENCY: Final = 64  # renewals per write to the store: one or two milliseconds of the event loop
_TICK_S: Final = 0.25
_TOUCHED_PART: Final = 0.01  # of `idle_s`: a call that ends so soon after a touch is not touched again


async def _renew_all(entities: Sequence[T], renew: Callable[[T], Awaitable[object]]) -> None:
    """Renew entities. Raises the first failure once the others are renewed."""
    failures: list[BaseException] = []
    for start in range(0, len(entities), _CONCURRENCY):
        chunk = entities[start : start + _CONCURRENCY]
        found = await asyncio.gather(*map(renew, chunk), return_exceptions=True)
        failures += [failure for failure in found if isinstance(failure, BaseException)]
    if failures:
        raise failures[0]


class Lifetimes(BackgroundWork):
    """Renew the rollouts with calls in flight, three times per TTL. Call `close` at the end."""

    def __init__(self, store: Store, metrics: Metrics, rollouts: LiveRollouts, *, every_s: float | None = None) -> None:
        self._store = store
        self._metrics = metrics
        self._rollouts = rollouts
        self._every_s = (store.ttl_s or 0) / _RENEWALS if every_s is None else every_s

    def start(self) -> Self:
        """Start the renewals, if the store has a TTL."""
        return self if self._store.ttl_s is None else super().start()

    async def renew(self) -> None:
        """Renew each rollout with calls in flight, and its group, once. Raises StorageError."""
        rollouts = [live.rollout for live in self._rollouts.busy]
        names = {(rollout.rollout_id, rollout.incarnation) for rollout in rollouts}
        groups = {rollout.group_id for rollout in rollouts if rollout.group_id is not None}
        entities: list[tuple[Store, str, str | None]] = [(self._store, *name) for name in names]
        entities += [(self._store.groups, group, None) for group in groups]
        await _renew_all(entities, lambda entity: entity[0].renew(*entity[1:]))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self.renew()
            except StorageError as error:
                self._metrics.store_operation_failures.labels("renew").inc()
                LOG.warning("TTL of rollouts not renewed: %s", error)


@dataclass(slots=True)
class _Active:
    """One incarnation of a rollout with calls in flight. `touched_s` and `touch_s`: its last and its next touch on the loop."""

    calls: int
    every_s: float
    touched_s: float
    touch_s: float


class Activity(BackgroundWork):
    """Touch the rollouts with `idle_s` that have calls in flight, three times per `idle_s`. Call `close` at the end.

    `run` starts background tasks.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        metrics: Metrics,
        run: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"],
    ) -> None:
        self._store = store
        self._clock = clock
        self._metrics = metrics
        self._start = run
        self._active: dict[Timer, _Active] = {}
        self._has_active = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Activity of {len(self._active)} rollouts>"

    def begin(self, rollout: Rollout) -> bool:
        """Touch a rollout with `quiet_s`, which its call has opened just now, until `end`; return whether it has one."""
        if rollout.quiet_s is None or rollout.is_finished:
            return False
        name = Timer(rollout.rollout_id, rollout.incarnation)
        every_s, now_s = rollout.quiet_s / _RENEWALS, asyncio.get_running_loop().time()
        active = self._active.setdefault(name, _Active(0, every_s, now_s, now_s + every_s))
        active.calls += 1
        self._has_active.set()
        return True

    def end(self, rollout: Rollout) -> None:
        """Touch the rollout of a call that ends once more, and not again without other calls."""
        name = Timer(rollout.rollout_id, rollout.incarnation)
        active = self._active[name]
        active.calls -= 1
        if not active.calls:
            del self._active[name]
            if asyncio.get_running_loop().time() - active.touched_s > _TOUCHED_PART * (rollout.quiet_s or 0):
                self._start(self._touch_at_end(name))

    async def touch(self) -> None:
        """Touch each rollout that is due. Raises StorageError."""
        loop = asyncio.get_running_loop()

        async def renew(name: Timer) -> None:
            await self._store.renew(*name, now_ms=self._clock.now_ms())
            if (active := self._active.get(name)) is not None:
                active.touched_s = loop.time()
                active.touch_s = active.touched_s + active.every_s

        await _renew_all([name for name, active in self._active.items() if active.touch_s <= loop.time()], renew)

    async def _touch_at_end(self, name: Timer) -> None:
        """Touch a rollout at the end of a call, which may have no step."""
        with suppress(StorageError):  # then it counts as idle since its last touch
            await self._store.renew(*name, now_ms=self._clock.now_ms())

    async def _run(self) -> None:
        while True:
            if not self._active:
                self._has_active.clear()
                await self._has_active.wait()
            await asyncio.sleep(_TICK_S)
            try:
                await self.touch()
            except StorageError as error:
                self._metrics.store_operation_failures.labels("renew").inc()
                LOG.warning("Rollouts with calls in flight not touched: %s", error)


@dataclass(slots=True, eq=False)
class Admitted:
    """A call that is in flight until `Admission.leave`.

    `rollout` is as the call opened it. `pauses`: when the call waited during a pause, as monotonic times (start, end).
    `is_sent`: its step takes over the reservation that `lease` renews.
    """

    live: LiveRollout
    rollout: Rollout
    policy: Policy
    step_id: str
    pauses: Sequence[tuple[float, float]]
    lease: "asyncio.Task[None] | None" = None
    is_active: bool = False  # its rollout may become idle, and is touched
    is_counted: bool = False  # in flight for a pause
    is_sent: bool = False


class Admission:
    """Admit calls, and enforce the limits of their rollouts."""

    def __init__(  # noqa: PLR0913, PLR0917 - the services that it uses
        self,
        store: Store,
        clock: Clock,
        metrics: Metrics,
        recorder: Recorder,
        rollouts: LiveRollouts,
        policies: Policies,
        activity: Activity,
        finisher: Finisher,
        registry: EndpointRegistry,
    ) -> None:
        self._store = store
        self._clock = clock
        self._failures = metrics.store_operation_failures.labels("open")
        self._seconds = metrics.store_operation_duration_seconds.labels("open")
        self._recorder = recorder
        self._rollouts = rollouts
        self._policies = policies
        self._activity = activity
        self._finisher = finisher
        self._registry = registry

    async def admit(
        self, rollout_id: str, group_id: str | None, step_id: str, model: Callable[[Rollout], str | None]
    ) -> Admitted:
        """Open the rollout of a call, which its first call creates and adds to the group, and count the call as in flight.

        `model` returns the engine's name of the model of the call in this rollout. A call of a playback neither waits nor
        counts until `sample`.

        Raises:
            Paused: The policy of the model is paused, and the call cannot wait for the end.
            StoreUnavailable: The store is unreachable, and the rollout is not known.
            BadRequest: The rollout cannot join the group.
        """
        if group_id is not None:
            checked_id(group_id, what="group id")
        pauses: list[tuple[float, float]] = []
        waited: Rollout | None = None  # which holds the reservation of this step until it is opened again
        while True:
            try:
                live, rollout = await self._open(rollout_id, group_id, step_id)
            except BaseException:
                if waited is not None and waited.has_reservation:
                    self._recorder.tasks.start(self._lease(waited, step_id, 0))
                raise
            policy = self._policies.only or self._policies.of_call(model(rollout))
            admitted = Admitted(live, rollout, policy, step_id, pauses)
            live.calls += 1
            self._rollouts.busy.add(live)
            try:
                if rollout.idle_s is not None or rollout.start_s is not None:
                    admitted.is_active = self._activity.begin(rollout)
                if rollout.has_reservation:
                    admitted.lease = self._recorder.tasks.start(self._renew(rollout, step_id))
                is_sampled = rollout.playback is None  # else its tape may answer it, also during a pause
                if policy.pause.mode is None or not is_sampled:
                    policy.pause.in_flight += is_sampled
                    admitted.is_counted = is_sampled
                    if rollout.osmosis:
                        admitted.rollout = await self._started(rollout)
                    return admitted
                began = self._clock.monotonic()
                await policy.pause.passed()
                pauses.append((began, self._clock.monotonic()))
            except BaseException:
                self.leave(admitted)
                raise
            admitted.is_sent, waited = True, rollout  # its reservation is the next one's, which has the same name
            self.leave(admitted)  # and open it again: the policy version has changed

    async def sample(self, admitted: Admitted) -> None:
        """Count a call of a playback as in flight, after the pause of its policy: its tape does not answer it.

        Raises Paused, StoreUnavailable.
        """
        pause, pauses = admitted.policy.pause, list(admitted.pauses)
        while pause.mode is not None:
            began = self._clock.monotonic()
            await pause.passed()
            pauses.append((began, self._clock.monotonic()))
            await self._open(admitted.rollout.rollout_id, None, admitted.step_id)  # the policy version has changed
        pause.in_flight += 1
        admitted.is_counted, admitted.pauses = True, pauses

    def leave(self, admitted: Admitted) -> None:
        """Count a call as ended."""
        live, rollout = admitted.live, admitted.rollout
        live.calls -= 1
        if not live.calls:
            self._rollouts.busy.discard(live)
        if admitted.is_counted:
            admitted.policy.pause.in_flight -= 1
        if admitted.is_active:
            self._activity.end(rollout)
        if admitted.lease is not None:
            admitted.lease.cancel()
            if not admitted.is_sent:
                self._recorder.tasks.start(self._lease(rollout, admitted.step_id, 0))

    async def check(self, rollout: Rollout) -> None:
        """Finish a rollout that is past its deadline, and mark one that has reached a limit.

        Raises RolloutClosed, LimitReached, StoreUnavailable.
        """
        if rollout.deadline_s is not None and is_past_deadline(rollout, self._clock.now_ms()):
            rollout = await self._finished(rollout)
        if rollout.status in FINISHED:
            status = rollout.status if rollout.reason is None else f"{rollout.status} ({rollout.reason})"
            raise RolloutClosed(f"Rollout {rollout.rollout_id!r} is {status} and accepts no more calls.")
        if rollout.limits.max_steps is None and rollout.limits.max_tokens is None:
            return
        try:
            check_limits(rollout)
        except LimitReached:
            if rollout.status == "open":
                await self._mark_limited(rollout.rollout_id)
            raise

    async def _open(self, rollout_id: str, group_id: str | None, step_id: str) -> tuple[LiveRollout, Rollout]:
        """Return what is known of the rollout with this ID, and the rollout as it is stored.

        Raises StoreUnavailable, BadRequest.
        """
        started = self._clock.monotonic()
        try:
            if self._recorder.store_health.unreachable:
                self._recorder.store_health.check(rollout_id)
            fields = {} if group_id is None else write_fields({"group_id": group_id})
            reservation = Reservation(step_id, LEASE_MS)
            stored = await self._store.open(rollout_id, fields, now_ms=self._clock.now_ms(), reservation=reservation)
            live = self._rollouts.note(stored)
            rollout = live.rollout
            if rollout.group_id is not None and not rollout.counts.get("steps"):
                await join(self._store, self._clock, stored, rollout.group_id)
        except StorageError as error:
            self._failures.inc()
            self._recorder.store_health.failed(error)
            known = self._rollouts.get(rollout_id)
            if known is not None and self._recorder.has_journal and isinstance(error, StoreUnreachable):
                limits = known.rollout.limits
                if limits.max_steps is None and limits.max_tokens is None:
                    return known, known.rollout
            raise StoreUnavailable(f"The call was not sent because it cannot be recorded: {error}") from error
        finally:
            self._seconds.observe(self._clock.monotonic() - started)
        if stored.announcements:
            self._policies.apply(stored.announcements)
            self._registry.apply(stored.announcements)
        return live, rollout

    async def _started(self, rollout: Rollout) -> Rollout:
        """Return the rollout once its tools are known: its first call may arrive before its dispatch has ended."""
        until = self._clock.monotonic() + _START_TIMEOUT_S
        while rollout.is_starting and self._clock.monotonic() < until:
            await asyncio.sleep(_START_INTERVAL_S)
            stored = await self._store.get(rollout.rollout_id)
            if stored is None or stored.incarnation != rollout.incarnation:
                raise no_rollout(rollout.rollout_id)
            rollout = read_rollout(stored)
        return rollout

    async def _finished(self, rollout: Rollout) -> Rollout:
        """Finish a rollout that is past its deadline, before the sweep finds it."""
        try:
            return await self._finisher.finish(rollout, "aborted", reason=DEADLINE)
        except Conflict as error:  # finished otherwise meanwhile
            raise RolloutClosed(error.message) from error
        except StorageError as error:
            raise StoreUnavailable(f"The store is unavailable: {error}") from error

    async def _mark_limited(self, rollout_id: str) -> None:
        try:
            fields = write_fields({"status": "limited"})
            await self._store.update_if(rollout_id, fields, expect={"status": None}, now_ms=self._clock.now_ms())
        except FieldsChanged:
            pass  # finished or marked meanwhile
        except StorageError as error:
            raise StoreUnavailable(f"The store is unavailable: {error}") from error

    async def _renew(self, rollout: Rollout, step_id: str) -> None:
        while True:
            await asyncio.sleep(_RENEWAL_INTERVAL_S)
            await self._lease(rollout, step_id, LEASE_MS)

    async def _lease(self, rollout: Rollout, step_id: str, lease_ms: int) -> None:
        with suppress(StorageError):  # the lease expires
            await self._store.extend(rollout.rollout_id, rollout.incarnation, Reservation(step_id, lease_ms))


def check_limits(rollout: Rollout) -> None:
    """Raise LimitReached if the rollout has reached its limit of steps or sampled tokens."""
    limits, steps, tokens = (
        rollout.limits,
        rollout.counts.get("steps", 0),
        rollout.counts.get("sampled_tokens", 0),
    )
    name = f"Rollout {rollout.rollout_id!r}"
    if limits.max_steps is not None and steps >= limits.max_steps:
        raise LimitReached(f"{name} reached its limit of {limits.max_steps} steps.")
    if rollout.has_reservation is False:
        raise LimitReached(
            f"{name} has {steps} of {limits.max_steps} steps, and calls for the remaining steps are in flight."
        )
    if limits.max_tokens is not None and tokens >= limits.max_tokens:
        raise LimitReached(f"{name} reached its limit of {limits.max_tokens} sampled tokens; it has {tokens}.")
