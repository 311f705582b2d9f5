"""Findings of calls about an endpoint; one applies to all calls only if several rollouts show it and none the opposite.

One call decides for the later calls of its own rollout. An agent with unusual requests or responses therefore changes nothing
for others. Everything is forgotten with time: the engine may have been changed.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Final, Generic, TypeVar

T = TypeVar("T")

ENOUGH: Final = 3  # rollouts
FORGET_S: Final = 600
MISSES: Final = 3
PAUSE_S: Final = 60
_MAX_WITNESSES: Final = 1024


class Recent(Generic[T]):
    """Values that are forgotten after `FORGET_S`, or if there are too many."""

    def __init__(self, max_values: int = _MAX_WITNESSES, now: Callable[[], float] = time.monotonic) -> None:
        self._max_values = max_values
        self._now = now
        self._values: dict[Hashable, tuple[float, T]] = {}  # in the order of their times

    def __len__(self) -> int:
        self._forget_old()
        return len(self._values)

    def get(self, key: Hashable) -> T | None:
        """Return the value of a key; None if there is none."""
        found = self._values.get(key)
        return None if found is None or self._now() - found[0] >= FORGET_S else found[1]

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
        oldest = self._now() - FORGET_S
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


_LIST_INTERVAL_S = 60  # adapters are loaded at run time
_MAX_UNLISTED = 1024


class ModelList:
    """The names of the models that an engine lists: ids, roots and aliases. `names` is None if it lists none."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.names: frozenset[str] | None = None
        self._unlisted: dict[str, float] = {}
        self._now = now
        self._lock = asyncio.Lock()

    async def updated_for(
        self, name: str, fetch: Callable[[], Awaitable[frozenset[str] | None]]
    ) -> frozenset[str] | None:
        """Return the names; fetch them first if this one is not among them and was not looked up within the last minute."""
        if self.is_due(name):
            async with self._lock:
                if self.is_due(name):
                    self.names = await fetch()
                    self._remember(name)
        return self.names

    async def update(self, fetch: Callable[[], Awaitable[frozenset[str] | None]]) -> None:
        """Fetch the names."""
        async with self._lock:
            self.names = await fetch()

    def forget(self) -> None:
        """Clear the cache: the engine may have been restarted."""
        self.names = None
        self._unlisted.clear()

    def is_due(self, name: str) -> bool:
        """Return whether this name is not listed, and was not looked up within the last minute."""
        if self.names is not None and name in self.names:
            return False
        last = self._unlisted.get(name)
        return last is None or self._now() - last >= _LIST_INTERVAL_S

    def _remember(self, name: str) -> None:
        if len(self._unlisted) >= _MAX_UNLISTED:
            self._unlisted.clear()
        self._unlisted[name] = self._now()


_RETRY_INTERVAL_S: Final = 60
_MAX_UNANSWERED: Final = 1024


class CachedAnswer(Generic[T]):
    """A cached value of each model; None until it is fetched, and forgotten after a time."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._values = Recent[T](_MAX_UNANSWERED, now)
        self._unanswered: dict[str, float] = {}
        self._now = now
        self._lock = asyncio.Lock()

    async def get(self, model: str, fetch: Callable[[], Awaitable[T | None]]) -> T | None:
        """Return the value; fetch it first if there is none and this model was not tried within the last minute."""
        if self._is_due(model):
            async with self._lock:
                if self._is_due(model):
                    value = await fetch()
                    if value is None:
                        self._remember(model)
                    else:
                        self._values.put(model, value)
        return self._values.get(model)

    def forget(self) -> None:
        """Clear the cache: the engine may have been restarted."""
        self._values.forget()
        self._unanswered.clear()

    def _is_due(self, model: str) -> bool:
        last = self._unanswered.get(model)
        return self._values.get(model) is None and (last is None or self._now() - last >= _RETRY_INTERVAL_S)

    def _remember(self, model: str) -> None:
        if len(self._unanswered) >= _MAX_UNANSWERED:
            self._unanswered.clear()
        self._unanswered[model] = self._now()
