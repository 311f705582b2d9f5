"""The engine endpoints: what is known about each engine, its ejection, its queue, and the order in which a call tries them.

An endpoint is ejected after consecutive failures, for a duration that doubles each time (Envoy's outlier ejection). The queue
limits the concurrent calls and is fair between rollouts: a released slot goes to the rollout that has waited longest, and to
its first call. A rollout with a thousand concurrent calls therefore waits for its own calls, and other rollouts do not.

One call decides for the later calls of its own rollout. What it shows about an endpoint applies to all calls only if several
rollouts show it and none the opposite: an agent with unusual requests or responses changes nothing for others. Everything is
forgotten with time: the engine may have been changed.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from hashlib import blake2b
from typing import Final, Generic, TypeVar

from proxy.config.engines import EndpointSettings, EnginesSettings
from proxy.continuation.types import Reason
from proxy.errors import (
    EngineBusy,
    EngineDisconnected,
    EngineError,
    EngineEventTooLong,
    EngineResponseTooLarge,
    EngineTimeout,
    EngineUnreachable,
    NotFound,
)
from proxy.protocols.engines import ENGINES
from proxy.protocols.engines.base import Engine, Traits
from proxy.protocols.plan import PreparedPlans
from proxy.trajectory.step import EngineFacts
from proxy.upstream.http_client import NOT_SENT

T = TypeVar("T")

ENOUGH: Final = 3  # rollouts
FORGET_S: Final = 600
MISSES: Final = 3
PAUSE_S: Final = 60
_RETRY_INTERVAL_S: Final = 60  # between requests for a value that the engine did not return
_MAX_WITNESSES: Final = 1024


class Recent(Generic[T]):
    """Values that are forgotten after `forget_s`, or if there are too many."""

    def __init__(
        self,
        max_values: int = _MAX_WITNESSES,
        now: Callable[[], float] = time.monotonic,
        forget_s: float = FORGET_S,
    ) -> None:
        self._max_values = max_values
        self._now = now
        self._forget_s = forget_s
        self._values: dict[Hashable, tuple[float, T]] = {}  # in the order of their times

    def __len__(self) -> int:
        self._forget_old()
        return len(self._values)

    def get(self, key: Hashable) -> T | None:
        """Return the value of a key; None if there is none."""
        found = self._values.get(key)
        return None if found is None or self._now() - found[0] >= self._forget_s else found[1]

    def put(self, key: Hashable, value: T) -> None:
        """Keep a value, instead of the oldest one if there are too many."""
        self._values.pop(key, None)
        self._values[key] = (self._now(), value)
        if len(self._values) > self._max_values:
            del self._values[next(iter(self._values))]

    def last(self) -> T | None:
        """Return the newest value."""
        self._forget_old()
        return next(reversed(self._values.values()))[1] if self._values else None

    def forget(self) -> None:
        """Forget all values: the engine may have been restarted."""
        self._values.clear()

    def _forget_old(self) -> None:
        oldest = self._now() - self._forget_s
        while self._values and next(iter(self._values.values()))[0] <= oldest:
            del self._values[next(iter(self._values))]


class Finding(Generic[T]):
    """Something that calls show about an endpoint, such as that it accepts no prompt ids, with the reason.

    It applies to the rollouts that show it, and to all rollouts once `ENOUGH` rollouts show it within `FORGET_S` and no call
    shows the opposite. `is_open`: whether any call has shown it.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._shown = Recent[T](now=now)
        self._opposed: float | None = None  # when a call showed the opposite
        self.is_open = False

    def __repr__(self) -> str:
        return f"<Finding of {len(self._shown)} rollouts>"

    def show(self, rollout_id: str, what: T) -> bool:
        """Note what a call of a rollout shows; return whether the finding applies to all rollouts from now on."""
        self.is_open = True
        held = self._holds()
        self._shown.put(rollout_id, what)
        return self._holds() and not held

    def oppose(self) -> None:
        """Note that a call has shown the opposite."""
        self._opposed = self._now()

    def for_rollout(self, rollout_id: str) -> T | None:
        """Return the finding for the calls of a rollout; None if it does not apply to them."""
        own = self._shown.get(rollout_id)
        return self._shown.last() if own is None and self._holds() else own

    def forget(self) -> None:
        """Forget everything: the engine may have been restarted."""
        self._shown.forget()
        self._opposed, self.is_open = None, False

    def _holds(self) -> bool:
        if self._opposed is not None and self._now() - self._opposed < FORGET_S:
            return False
        return len(self._shown) >= ENOUGH


class Misses:
    """Requests that an endpoint did not answer in time. After `MISSES` in a row it `is_paused` for `PAUSE_S`."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._count = 0
        self._until = 0.0

    def __repr__(self) -> str:
        return f"<Misses: {self._count} in a row>"

    @property
    def is_paused(self) -> bool:
        """Whether no requests are sent to the endpoint."""
        return self._count >= MISSES and self._now() < self._until

    def add(self) -> bool:
        """Count a miss; return whether a pause begins. After a pause, one more miss begins the next one."""
        was_paused = self.is_paused
        self._count += 1
        if not was_paused:
            self._until = self._now() + PAUSE_S
        return self.is_paused and not was_paused

    def forget(self) -> None:
        """Forget all: an answer came in time, or the engine may have been restarted."""
        self._count = 0


class ModelList:
    """The names of the models that an engine lists: ids, roots and aliases. `names` is None if it lists none."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.names: frozenset[str] | None = None
        self._unlisted = Recent[bool](now=now, forget_s=_RETRY_INTERVAL_S)  # adapters are loaded at run time
        self._lock = asyncio.Lock()

    async def updated_for(
        self, name: str, fetch: Callable[[], Awaitable[frozenset[str] | None]]
    ) -> frozenset[str] | None:
        """Return the names; fetch them first if this one is not among them and was not looked up within the last minute."""
        if self.is_due(name):
            async with self._lock:
                if self.is_due(name):
                    self.names = await fetch()
                    self._unlisted.put(name, value=True)
        return self.names

    async def update(self, fetch: Callable[[], Awaitable[frozenset[str] | None]]) -> None:
        """Fetch the names."""
        async with self._lock:
            self.names = await fetch()

    def forget(self) -> None:
        """Clear the cache: the engine may have been restarted."""
        self.names = None
        self._unlisted.forget()

    def is_due(self, name: str) -> bool:
        """Return whether this name is not listed, and was not looked up within the last minute."""
        return (self.names is None or name not in self.names) and not self._unlisted.get(name)


class CachedAnswer(Generic[T]):
    """A cached value of each model; None until it is fetched, and forgotten after a time."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._values = Recent[T](now=now)
        self._unanswered = Recent[bool](now=now, forget_s=_RETRY_INTERVAL_S)
        self._lock = asyncio.Lock()

    async def get(self, model: str, fetch: Callable[[], Awaitable[T | None]]) -> T | None:
        """Return the value; fetch it first if there is none and this model was not tried within the last minute."""
        if self._is_due(model):
            async with self._lock:
                if self._is_due(model):
                    value = await fetch()
                    if value is None:
                        self._unanswered.put(model, value=True)
                    else:
                        self._values.put(model, value)
        return self._values.get(model)

    def forget(self) -> None:
        """Clear the cache: the engine may have been restarted."""
        self._values.forget()
        self._unanswered.forget()

    def _is_due(self, model: str) -> bool:
        return self._values.get(model) is None and not self._unanswered.get(model)


@dataclass(slots=True, eq=False)
class _Waiter:
    """A queued call. `granted` is True if it got a slot, False if it should fail over."""

    rollout_id: str
    can_fail_over: bool
    granted: "asyncio.Future[bool]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class FairQueue:
    """The slots and the queue of one endpoint. `limit` may change; None is unlimited."""

    def __init__(self, limit: int | None, *, max_waiting: int, timeout_s: float) -> None:
        self.limit = limit
        self.in_flight = 0
        self.waiting = 0
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._lanes: dict[str, deque[_Waiter]] = {}  # by rollout, in the order in which slots are granted

    def __repr__(self) -> str:
        return f"<FairQueue: {self.in_flight} in flight, {self.waiting} waiting>"

    def acquire_free(self) -> bool:
        """Acquire a slot, which `release` returns, if no call waits for one; return whether it did."""
        if self.limit is not None and (self._lanes or self.in_flight >= self.limit):
            return False
        self.in_flight += 1
        return True

    async def acquire(self, rollout_id: str, *, can_fail_over: bool) -> bool:
        """Wait for a slot, which `release` returns. False if the call was evicted and should fail over.

        Raises EngineBusy if the queue is full, or waiting timed out.
        """
        if self.acquire_free():
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
        if self._lanes:
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
_TEXTS_AT_ONCE = 32  # calls whose texts are requested: an update of the weights may interrupt thousands


@dataclass(slots=True)
class EjectionState:
    """The failures and the ejection of one endpoint.

    `faults` counts consecutive failures, `ejections` the ejections since the last answered call. Times are the event loop's.
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
        """End the ejection if its duration is over: a health check passed.

        One more failure then ejects the endpoint for longer. So an engine that passes health checks but fails calls is tried
        less and less often.
        """
        if self.ejected_until is None or now >= self.ejected_until:
            self.ejected_until = None
            self.faults = min(self.faults, self.eject_after - 1)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Endpoint:
    """One engine endpoint: its settings and its state.

    `kind`, `engine`, `version`, `sampling_defaults` and `facts` are as configured, or else as detected: `describe` sets them.
    `kind` is `auto` until the engine is detected, and `engine` text only. Every request has `headers`; `not_sent`
    are the names, in lower case, of the client's headers that are not sent. `plans` are the prepared plans of its calls.
    `label`: the name in logs, metrics and steps.

    `traits`: None until the engine is detected. `is_detected` is false while a detection runs or is due: at once after the
    connection `is_lost`, since another engine may be started at the URL, else at `detect_at` (loop time). `detections` counts
    those in a row that did not identify the engine. `server`: the header of its responses. `returns_ids`: whether it returns
    token ids, as its type does or as the last step shows; None until it is detected. `models`: the models that it lists, once a
    response named another model than the request.

    From auxiliary requests, by model: `windows`, the context windows in tokens; `merges_systems`, as in `TranslationOptions`;
    `image_tokens`, see there; `token_texts`, the texts of a few stop tokens and ends of prompts, by model and ids.
    From calls (`Finding`): `forces_usage`, as in `Traits`; `continuation_fault`, why no prompt ids are sent to it;
    `verified_rendering`, its rendering of messages was equal to the prompt ids of a step; `unverified_renderings`, the number
    of turns in a row for which it was not.
    `missed_renderings`: those that continuation waited for in vain. `end_ids`: the ids that end replies by themselves.
    `no_texts_until`: when texts are requested again (loop time), after the engine did not return one.
    """

    settings: EndpointSettings
    health: EjectionState
    queue: FairQueue
    plan_cache_bytes: int
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
    unverified_renderings: Finding[int] = field(default_factory=Finding)
    missed_renderings: Misses = field(default_factory=Misses)
    token_texts: Recent[str] = field(default_factory=lambda: Recent(_MAX_TEXTS))
    end_ids: Recent[bool] = field(default_factory=lambda: Recent(_MAX_TEXTS))
    texts_at_once: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_TEXTS_AT_ONCE), repr=False)
    no_texts_until: float = 0
    detection: "asyncio.Task[None] | None" = field(default=None, repr=False)
    label: str = field(init=False)
    kind: str = field(init=False)
    engine: Engine = field(init=False)
    version: str | None = field(init=False)
    sampling_defaults: dict[str, float] = field(init=False)
    facts: EngineFacts = field(init=False)
    headers: list[tuple[str, str]] = field(init=False, repr=False)  # with the API key
    not_sent: frozenset[str] = field(init=False, repr=False)
    plans: PreparedPlans = field(init=False, repr=False)
    _known: Traits = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.describe(None)

    def describe(self, traits: Traits | None) -> None:
        """Set what the calls of this endpoint read, from its settings and from what was detected."""
        settings, detected = self.settings, traits or Traits("auto")
        self.traits = traits
        self.label = settings.label
        self.kind = detected.kind if settings.kind == "auto" else settings.kind
        self.engine = ENGINES["plain" if self.kind == "auto" else self.kind].for_traits(detected)
        self.version = settings.version or detected.version
        self.sampling_defaults = (detected.sampling_defaults or {}) | settings.sampling_defaults
        self.facts = EngineFacts(self.label, self.kind, self.version, settings.url)
        self.headers = [(name, value.get_secret_value()) for name, value in settings.headers.items()]
        # identity: every byte is parsed here, and compression on a local network delays the first token
        self.headers.append(("Accept-Encoding", "identity"))
        if settings.api_key:
            self.headers.append(("Authorization", f"Bearer {settings.api_key.get_secret_value()}"))
        self.not_sent = NOT_SENT.union(map(str.lower, settings.headers))
        self.plans = PreparedPlans(self.plan_cache_bytes)
        self._known = replace(
            detected, kind=self.engine.kind, version=self.version, sampling_defaults=self.sampling_defaults
        )

    def known(self, rollout_id: str = "") -> Traits:
        """Return the traits of the engine, as configured or else as detected, with what calls of this rollout have shown."""
        if not self.forces_usage.is_open or self.forces_usage.for_rollout(rollout_id) is None:
            return self._known
        return replace(self._known, forces_usage=True)

    def change(self, settings: EndpointSettings) -> None:
        """Apply other settings of the same URL, and keep the state and the calls in flight."""
        self.settings = settings
        self.describe(self.traits)
        self.queue.limit = settings.max_in_flight
        self.queue.dispatch()

    def lose(self) -> None:
        """Require a detection at once: the engine may be restarted with another model or other flags."""
        self.is_detected, self.is_lost, self.detections = False, True, 0

    def lists(self, model: str) -> bool:
        """Return whether the endpoint serves a model, as configured or else as its engine lists them."""
        if self.settings.models:
            return any(fnmatchcase(model, pattern) for pattern in self.settings.models)
        return self.models.names is not None and model in self.models.names

    @property
    def has_unknown_models(self) -> bool:
        """Whether its models are neither configured nor listed by its engine."""
        return not self.settings.models and self.models.names is None

    def forget(self) -> None:
        """Clear what was learned about the engine: it may have been restarted with another model or other flags."""
        for learned in (
            self.windows,
            self.models,
            self.forces_usage,
            self.merges_systems,
            self.image_tokens,
            self.continuation_fault,
            self.verified_rendering,
            self.unverified_renderings,
            self.missed_renderings,
            self.token_texts,
            self.end_ids,
        ):
            learned.forget()


def make_endpoint(settings: EndpointSettings, engines: EnginesSettings) -> Endpoint:
    """Return an endpoint that is not detected yet."""
    health = EjectionState(engines.eject_after, engines.base_ejection_s, engines.max_ejection_s)
    queue = FairQueue(settings.max_in_flight, max_waiting=engines.max_queued, timeout_s=engines.queue_timeout_s)
    return Endpoint(settings, health, queue, engines.plan_cache_bytes)


NONE_CONFIGURED: Final = "No engine is configured; set engines.endpoints or start with --engine URL."


def ranked(endpoints: Sequence[Endpoint], rollout_id: str) -> list[Endpoint]:
    """Return the endpoints in the order in which a rollout tries them.

    Rendezvous hashing: the first one stays the same while the endpoints do, so that its KV cache is reused. When an
    endpoint is removed, only its rollouts move, and they return with it. Ejected endpoints come last; if all are ejected,
    they are tried. Raises EngineUnreachable if no endpoint is configured.
    """
    if len(endpoints) == 1:
        return list(endpoints)
    return sorted(_by_name(endpoints, rollout_id), key=lambda endpoint: endpoint.health.is_ejected)


def least_loaded(endpoints: Sequence[Endpoint], name: str) -> list[Endpoint]:
    """Return the endpoints in the order in which a call without a rollout tries them: by load, then by the hash of `name`.

    The load is the number of calls in flight and queued, divided by `max_in_flight`. An endpoint without a limit counts
    with the highest limit of the others. Raises EngineUnreachable if no endpoint is configured.
    """
    greatest = max(endpoint.settings.max_in_flight or 1 for endpoint in endpoints) if endpoints else 1

    def load(endpoint: Endpoint) -> tuple[bool, float]:
        calls = endpoint.queue.in_flight + endpoint.queue.waiting
        return endpoint.health.is_ejected, calls / (endpoint.settings.max_in_flight or greatest)

    return sorted(_by_name(endpoints, name), key=load)


def serving(endpoints: Sequence[Endpoint], model: str) -> Sequence[Endpoint]:
    """Return the endpoints that list a model, and endpoints with unknown models.

    If none lists it, return the endpoints without configured models: SGLang and llama.cpp answer calls of any model, vLLM
    responds with 404. Raises NotFound if every endpoint has configured models, and this is none of them.
    """
    if any(endpoint.lists(model) for endpoint in endpoints):
        return [endpoint for endpoint in endpoints if endpoint.lists(model) or endpoint.has_unknown_models]
    found = [endpoint for endpoint in endpoints if not endpoint.settings.models]
    if endpoints and not found:
        raise NotFound(f"The model {model!r} does not exist.", param="model")
    return found


def choose(endpoints: Sequence[Endpoint], rollout_id: str) -> Endpoint:
    """Return the first endpoint that a rollout tries now. Raises EngineUnreachable if no endpoint is configured."""
    return ranked(endpoints, rollout_id)[0]


def preferred(endpoints: Sequence[Endpoint], rollout_id: str) -> Endpoint:
    """Return the endpoint of a rollout when none is ejected. Raises EngineUnreachable if no endpoint is configured."""
    return _by_name(endpoints, rollout_id)[0]


def _by_name(endpoints: Sequence[Endpoint], rollout_id: str) -> list[Endpoint]:
    if not endpoints:
        raise EngineUnreachable(NONE_CONFIGURED, public=NONE_CONFIGURED)
    if len(endpoints) == 1:
        return list(endpoints)
    name = rollout_id.encode()

    def weight(endpoint: Endpoint) -> bytes:
        return blake2b(name, key=endpoint.settings.url.encode()[:64]).digest()

    return sorted(endpoints, key=weight, reverse=True)


# Statuses of a gateway, or of an engine that is loading or draining: another endpoint may answer.
UNAVAILABLE_STATUSES: Final = frozenset({502, 503, 504})
REDIRECTS: Final = frozenset({300, 301, 302, 303, 305, 307, 308})  # 304 answers a conditional request


def check_status(endpoint: Endpoint, status: int, *, is_last: bool) -> None:
    """Raise EngineDisconnected for a redirect, and, unless it `is_last`, for a response that the next one may replace."""
    if status in REDIRECTS:
        raise EngineDisconnected(
            f"Engine {endpoint.label} responded with a redirect (status {status}), which is not followed; set the URL of "
            "the endpoint to its target",
            public="The engine's response is invalid: a redirect",
        )
    if status in UNAVAILABLE_STATUSES and not is_last:
        raise EngineDisconnected(f"Engine {endpoint.label} returned status {status}")


def can_fail_over(fault: EngineError) -> bool:
    """Return whether a call can be sent to the next endpoint after this error.

    Not after a timeout: the engine may still be processing the call, and two engines would. Not after a response that was
    too large, which another engine would send again.
    """
    return not isinstance(fault, EngineTimeout | EngineResponseTooLarge | EngineEventTooLong)
