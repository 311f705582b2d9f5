"""The models that one engine lists, looked up when an answer names another than its request.

Rule: a name that is not listed is looked up at most once a minute, and by one call at a time. An engine whose answers all
name such a model would otherwise get one more request for each call.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

_LIST_INTERVAL_S = 60  # adapters are loaded at run time
_MOST_UNLISTED = 1024


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
        """Return the names; fetch them first if this one is not among them and was not looked up lately."""
        if self._is_due(name):
            async with self._lock:
                if self._is_due(name):
                    self.names = await fetch()
                    self._remember(name)
        return self.names

    def forget(self) -> None:
        """Forget everything: the engine may have been started anew."""
        self.names = None
        self._unlisted.clear()

    def _is_due(self, name: str) -> bool:
        if self.names is not None and name in self.names:
            return False
        last = self._unlisted.get(name)
        return last is None or self._now() - last >= _LIST_INTERVAL_S

    def _remember(self, name: str) -> None:
        if len(self._unlisted) >= _MOST_UNLISTED:
            self._unlisted.clear()
        self._unlisted[name] = self._now()


T = TypeVar("T")

_AGAIN_S: Final = 60
_MOST_UNANSWERED: Final = 1024


class CachedAnswer(Generic[T]):
    """The answer; None while there is none."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.value: T | None = None
        self._unanswered: dict[str, float] = {}
        self._now = now
        self._lock = asyncio.Lock()

    async def get(self, model: str, fetch: Callable[[], Awaitable[T | None]]) -> T | None:
        """Return the answer; fetch it first if there is none, and this model was not asked about lately."""
        if self._is_due(model):
            async with self._lock:
                if self._is_due(model):
                    self.value = await fetch()
                    if self.value is None:
                        self._remember(model)
        return self.value

    def forget(self) -> None:
        """Forget everything: the engine may have been started anew."""
        self.value = None
        self._unanswered.clear()

    def _is_due(self, model: str) -> bool:
        last = self._unanswered.get(model)
        return self.value is None and (last is None or self._now() - last >= _AGAIN_S)

    def _remember(self, model: str) -> None:
        if len(self._unanswered) >= _MOST_UNANSWERED:
            self._unanswered.clear()
        self._unanswered[model] = self._now()
