"""The models that one engine lists, looked up when an answer names another than its request.

Rule: a name that is not listed is looked up at most once a minute, and by one call at a time. An engine whose answers all
name such a model would otherwise get one more request for each call.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

_AGAIN_S = 60  # adapters are loaded at run time
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
        return last is None or self._now() - last >= _AGAIN_S

    def _remember(self, name: str) -> None:
        if len(self._unlisted) >= _MOST_UNLISTED:
            self._unlisted.clear()
        self._unlisted[name] = self._now()
