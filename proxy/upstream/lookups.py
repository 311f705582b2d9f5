"""Cached results of auxiliary requests to one engine: the models that it lists, and facts about each model.

A name that is not listed is looked up at most once a minute, by one call at a time. Otherwise an engine whose responses
all name such a model would get one more request for each call.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

from proxy.upstream.witnesses import Recent

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


T = TypeVar("T")

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
