"""One engine endpoint: its settings, its ejection, its queue, and what is known about the engine.

An endpoint is ejected after consecutive failures, for a duration that doubles each time (Envoy's outlier ejection). The queue
limits the concurrent calls and is fair between rollouts: a released slot goes to the rollout that has waited longest, and to
its first call. A rollout with a thousand concurrent calls therefore waits for its own calls, and other rollouts do not.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import TracebackType

from proxy.config.sections import EndpointSettings, EnginesSettings
from proxy.continuation.types import Reason
from proxy.errors import EngineBusy
from proxy.protocols.engines import ENGINES, VLLM_WITH_PROMPT_FIELD, Engine, Traits
from proxy.trajectory.step import EngineFacts
from proxy.upstream.lookups import CachedAnswer, ModelList
from proxy.upstream.witnesses import Finding, Misses, Recent


@dataclass(slots=True, eq=False)
class _Waiter:
    """A queued call. `granted` is True if it got a slot, False if it should fail over."""

    rollout_id: str
    can_fail_over: bool
    granted: "asyncio.Future[bool]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class FairQueue:
    """The slots and the queue of one endpoint. `limit` may change; None is unlimited.

    A `with` statement releases one slot, which was acquired before, at its end.
    """

    def __init__(self, limit: int | None, *, max_waiting: int, timeout_s: float) -> None:
        self.limit = limit
        self.in_flight = 0
        self.waiting = 0
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._lanes: dict[str, deque[_Waiter]] = {}  # by rollout, in the order in which slots are granted

    def __repr__(self) -> str:
        return f"<FairQueue: {self.in_flight} in flight, {self.waiting} waiting>"

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Release a slot."""
        self.release()

    @property
    def is_free(self) -> bool:
        """Whether a new call gets a slot without waiting."""
        return self.limit is None or (self.in_flight < self.limit and not self._lanes)

    async def acquire(self, rollout_id: str, *, can_fail_over: bool) -> bool:
        """Wait for a slot, which `release` returns. False if the call was evicted and should fail over.

        Raises:
            EngineBusy: The queue is full, or waiting timed out.
        """
        if self.is_free:
            self.in_flight += 1
            return True
        if self.waiting >= self._max_waiting:
            raise EngineBusy(
                f"{self.in_flight} calls are in flight at the engine, and {self.waiting} are "
                "queued (engines.max_queued). Try again later."
            )
        waiter = self._enqueue(rollout_id, can_fail_over=can_fail_over)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(waiter.granted)
        except TimeoutError:
            self._cancel(waiter)
            raise EngineBusy(
                f"Timed out after {self._timeout_s:g} s in the queue of the engine "
                "(engines.queue_timeout_s). Try again later."
            ) from None
        except asyncio.CancelledError:
            self._cancel(waiter)
            raise

    def release(self) -> None:
        """Return a slot, and grant it to the next waiter."""
        self.in_flight -= 1
        self.dispatch()

    def dispatch(self) -> None:
        """Grant the free slots to waiters."""
        while self._lanes and (self.limit is None or self.in_flight < self.limit):
            rollout_id, lane = next(iter(self._lanes.items()))
            waiter = lane[0]
            self._remove(waiter)
            if lane:  # to the end of the round
                self._lanes[rollout_id] = self._lanes.pop(rollout_id)
            self.in_flight += 1
            waiter.granted.set_result(True)

    def evict_waiters(self) -> None:
        """Evict the waiters that can fail over."""
        for waiter in [waiter for lane in self._lanes.values() for waiter in lane if waiter.can_fail_over]:
            self._remove(waiter)
            waiter.granted.set_result(False)

    def _enqueue(self, rollout_id: str, *, can_fail_over: bool) -> _Waiter:
        waiter = _Waiter(rollout_id, can_fail_over)
        self._lanes.setdefault(rollout_id, deque()).append(waiter)
        self.waiting += 1
        return waiter

    def _cancel(self, waiter: _Waiter) -> None:
        """Remove a waiter; a slot that was granted at the same moment goes to the next one."""
        if not waiter.granted.done():
            self._remove(waiter)
            waiter.granted.cancel()
        elif waiter.granted.result():
            self.release()

    def _remove(self, waiter: _Waiter) -> None:
        lane = self._lanes[waiter.rollout_id]
        lane.remove(waiter)
        self.waiting -= 1
        if not lane:
            del self._lanes[waiter.rollout_id]


_MAX_DOUBLINGS = 30
_MAX_TEXTS = 64


@dataclass(slots=True)
class EjectionState:
    """The failures and the ejection of one endpoint.

    `faults` are consecutive; `ejections` counts those since the last answered call. Times are those of the event loop.
    """

    eject_after: int
    base_ejection_s: float
    max_ejection_s: float
    faults: int = 0
    ejections: int = 0
    ejected_until: float | None = None

    @property
    def is_ejected(self) -> bool:
        """Whether the endpoint is ejected: until a health check after the end of the ejection passes, or a call is answered."""
        return self.ejected_until is not None

    def failed(self, now: float) -> None:
        """Count a failed call or health check.

        Failures of calls that were in flight at the ejection do not prolong it.
        """
        self.faults += 1
        if self.faults < self.eject_after or (self.ejected_until is not None and now < self.ejected_until):
            return
        self.ejected_until = now + min(
            self.base_ejection_s * 2 ** min(self.ejections, _MAX_DOUBLINGS), self.max_ejection_s
        )
        self.ejections += 1

    def answered(self) -> None:
        """Reset the state: a call was answered."""
        self.faults, self.ejections, self.ejected_until = 0, 0, None

    def passed(self, now: float) -> None:
        """End an ejection whose duration is over: a health check passed.

        One more failure then ejects the endpoint for longer.

        An engine whose calls fail while its health checks pass is thereby tried less and less often.
        """
        if self.ejected_until is None or now >= self.ejected_until:
            self.ejected_until = None
            self.faults = min(self.faults, self.eject_after - 1)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Endpoint:
    """One engine endpoint: its settings and its state.

    `traits`: None until the engine is detected. `is_detected` is false while a detection is due: at once after the connection
    `is_lost`, since another engine may be started at the URL, else at `detect_at` (loop time). `detections` counts those in a
    row that did not identify the engine. `server`: the header of its responses. `returns_ids`: whether it returns token ids, as
    its type does or as the last step shows; None until it is detected. `models`: the models that it lists, once a response
    named another model than the request. `label`: the name in logs, metrics and steps.

    From auxiliary requests, by model: `windows`, the context windows in tokens; `merges_systems`, as in `TranslationOptions`;
    `image_tokens`, see there; `token_texts`, the texts of a few stop tokens, by model and id.
    From calls (`Finding`): `forces_usage`, as in `Traits`; `continuation_fault`, why no prompt ids are sent to it;
    `verified_rendering`, its rendering of messages was equal to the prompt ids of a step.
    `missed_renderings`: those that continuation waited for in vain.
    """

    settings: EndpointSettings
    health: EjectionState
    queue: FairQueue
    traits: Traits | None = None
    is_detected: bool = False
    is_lost: bool = True
    detections: int = 0
    detect_at: float = 0
    server: str | None = None
    returns_ids: bool | None = None
    faults: int = 0
    last_fault: str | None = None
    windows: Recent[int] = field(default_factory=Recent)
    models: ModelList = field(default_factory=ModelList)
    forces_usage: Finding[bool] = field(default_factory=Finding)
    merges_systems: CachedAnswer[bool] = field(default_factory=CachedAnswer)
    image_tokens: CachedAnswer[list[int]] = field(default_factory=CachedAnswer)
    continuation_fault: Finding[Reason] = field(default_factory=Finding)
    verified_rendering: Finding[bool] = field(default_factory=Finding)
    missed_renderings: Misses = field(default_factory=Misses)
    token_texts: Recent[str] = field(default_factory=lambda: Recent(_MAX_TEXTS))
    detection: "asyncio.Task[None] | None" = field(default=None, repr=False)
    label: str = field(init=False)

    def __post_init__(self) -> None:
        self.label = self.settings.label

    def change(self, settings: EndpointSettings) -> None:
        """Apply other settings of the same URL, and keep the state and the calls in flight."""
        self.settings = settings
        self.label = settings.label
        self.queue.limit = settings.max_in_flight
        self.queue.dispatch()

    def lose(self) -> None:
        """Require a detection at once: the engine may be restarted with another model or other flags."""
        self.is_detected, self.is_lost, self.detections = False, True, 0

    @property
    def api_key(self) -> str | None:
        """The API key of the engine, if it requires one."""
        return self.settings.api_key.get_secret_value() if self.settings.api_key else None

    def lists(self, model: str) -> bool:
        """Return whether the endpoint serves a model, as configured or else as its engine lists them."""
        if self.settings.models:
            return any(fnmatchcase(model, pattern) for pattern in self.settings.models)
        return self.models.names is not None and model in self.models.names

    @property
    def has_unknown_models(self) -> bool:
        """Whether its models are neither configured nor listed by its engine."""
        return not self.settings.models and self.models.names is None

    @property
    def engine(self) -> Engine:
        """The engine type, as configured or detected; text only until it is detected."""
        if self.kind == "vllm" and self.traits is not None and self.traits.has_prompt_field:
            return VLLM_WITH_PROMPT_FIELD
        return ENGINES[self.kind] if self.kind != "auto" else ENGINES["plain"]

    @property
    def kind(self) -> str:
        """The name of the engine type; `auto` until it is detected."""
        if self.settings.kind != "auto" or self.traits is None:
            return self.settings.kind
        return self.traits.kind

    @property
    def version(self) -> str | None:
        """The engine version, as configured or detected."""
        return self.settings.version or (self.traits.version if self.traits else None)

    def known(self, rollout_id: str = "") -> Traits:
        """Return the traits of the engine, as configured or else as detected, with what calls of this rollout have shown."""
        has_parser = self.traits.has_parser if self.traits else None
        forces_usage = self.forces_usage.is_open and self.forces_usage.for_rollout(rollout_id) is not None
        model = self.traits.model if self.traits else None
        return Traits(self.engine.kind, self.version, has_parser, forces_usage, self.sampling_defaults, model)

    def forget(self) -> None:
        """Forget what was learned: the engine may have been restarted with another model or other flags."""
        for learned in (
            self.windows,
            self.models,
            self.forces_usage,
            self.merges_systems,
            self.image_tokens,
            self.continuation_fault,
            self.verified_rendering,
            self.missed_renderings,
            self.token_texts,
        ):
            learned.forget()

    @property
    def sampling_defaults(self) -> dict[str, float]:
        """The sampling parameters that the engine uses where a request has none.

        Configured values override detected ones.
        """
        shown = (self.traits.sampling_defaults if self.traits else None) or {}
        return shown | self.settings.sampling_defaults

    @property
    def facts(self) -> EngineFacts:
        """The description of the engine that steps record."""
        return EngineFacts(self.label, self.kind, self.version, self.settings.url)


def make_endpoint(settings: EndpointSettings, engines: EnginesSettings) -> Endpoint:
    """Return an endpoint that is not detected yet."""
    health = EjectionState(engines.eject_after, engines.base_ejection_s, engines.max_ejection_s)
    queue = FairQueue(settings.max_in_flight, max_waiting=engines.max_queued, timeout_s=engines.queue_timeout_s)
    return Endpoint(settings, health, queue)
