"""Work that is asked for again and again, by name, and needs to be done once.

Holds what is under way and what was done lately. It knows nothing of the work.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Final

_LEAST_REST_S: Final = 1.0
_RESTS: Final = 5  # times as long as the work took: whoever asks all the time takes a sixth of a processor at most
_MOST_REMEMBERED: Final = 10_000


class Settling:
    """Does work once at a time for each name."""

    def __init__(self) -> None:
        self._under_way: dict[Hashable, bool] = {}  # whether it was asked for again meanwhile
        self._rests_until: OrderedDict[Hashable, float] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Settling {len(self._under_way)} under way>"

    def rests(self, name: Hashable) -> bool:
        """Whether the work of this name is under way, or was done so lately that a look alone is no reason to repeat it."""
        return name in self._under_way or asyncio.get_running_loop().time() < self._rests_until.get(name, 0)

    async def settle(self, name: Hashable, work: Callable[[], Awaitable[None]]) -> None:
        """Do the work. If it is under way, return at once: it is done once more after that, however often it is asked for."""
        if name in self._under_way:
            self._under_way[name] = True
            return
        self._under_way[name] = True
        try:
            while self._under_way[name]:
                self._under_way[name] = False
                await self._do(name, work)
        finally:
            del self._under_way[name]

    async def _do(self, name: Hashable, work: Callable[[], Awaitable[None]]) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        await work()
        ended = loop.time()
        self._rests_until[name] = ended + max(_LEAST_REST_S, _RESTS * (ended - started))
        self._rests_until.move_to_end(name)
        while len(self._rests_until) > _MOST_REMEMBERED:
            self._rests_until.popitem(last=False)
