"""The protocol of timers: for each rollout at most one time at which some process looks at it.

`Store.open` and `Store.open_group` set a timer in the transaction that creates its rollout, and `Store.delete` removes it. An
append that restores an expired rollout sets a timer that has expired already. Times are Unix milliseconds by the clocks of the
callers.
"""

from collections.abc import Mapping
from typing import Protocol

from storage.types import Timer


class Timers(Protocol):
    """The timers of rollouts. They do not wait for durability, and every method is safe to repeat."""

    async def claim(self, limit: int, *, now_ms: int, until_ms: int) -> list[Timer]:
        """Return timers that have expired, and set each to `until_ms`, so that no other claim returns it before.

        The earliest are first within each of the store's sixteen parts, of which each returns up to `limit` timers. Parts that
        fail return none; raises `StorageError` if one failed and the others have none.
        """
        ...

    async def move(self, times: Mapping[Timer, int | None], *, from_ms: int) -> None:
        """Set timers to new times (None removes one), except those that are not at `from_ms`."""
        ...

    async def remove(self, timer: Timer) -> None:
        """Remove a timer; one that does not exist is no error."""
        ...
