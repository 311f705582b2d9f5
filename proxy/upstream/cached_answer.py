"""An engine's answer to a question beside calls: fetched once, by one call at a time.

Rule: a question that stays without an answer is asked again at most once a minute for each model, so that calls which need it
do not each cost a request.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, Generic, TypeVar

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
