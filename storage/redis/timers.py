"""The timers of rollouts, and whose turn it is to look at those that have expired."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from storage.errors import StorageError
from storage.redis import scripts
from storage.redis.keys import Layout, decoded_name
from storage.redis.scripts import RunEach, RunScript, whole
from storage.types import Timer


class Timers:
    """The timers of rollouts. They do not wait for durability, and every method is safe to repeat."""

    def __init__(self, run: RunScript, run_each: RunEach, layout: Layout) -> None:
        self._run = run
        self._run_each = run_each
        self._layout = layout
        self._keys = [bucket.timers for bucket in layout.buckets]

    def __repr__(self) -> str:
        return f"<Timers under {self._layout.prefix}>"

    async def has_turn(self, turn_ms: int) -> bool:
        """Return whether this process is the one that claims now: all others get False for this time."""
        return bool(await self._run(scripts.TIMERS_TURN, [self._layout.buckets[0].turn], (turn_ms,)))

    async def claim(self, limit: int, *, now_ms: int, until_ms: int) -> list[Timer]:
        """Return timers that have expired, and set each to `until_ms`, so that no other claim returns it before.

        Each bucket returns up to `limit` timers, the earliest first. Buckets that fail return none; raises `StorageError` if
        one failed and the others have none.
        """
        arguments = (now_ms, until_ms, limit)
        parts = await self._run_each([(scripts.TIMERS_CLAIM, [key], arguments) for key in self._keys])
        failures = [part for part in parts if isinstance(part, StorageError)]
        claimed = []
        for key, part in zip(self._keys, parts, strict=True):
            for member in () if isinstance(part, StorageError) else part:
                if (timer := _timer(member)) is None:  # no name of a rollout: no reader would ever remove it
                    await self._run(scripts.TIMERS_MOVE, [key], ("", member, ""))
                else:
                    claimed.append(timer)
        if failures and not claimed:
            raise failures[0]
        return claimed

    async def move(self, times: Mapping[Timer, int | None], *, from_ms: int) -> None:
        """Set timers to new times (None removes one), except those that are not at `from_ms`."""
        buckets: defaultdict[bytes, list[Any]] = defaultdict(list)
        for timer, time_ms in times.items():
            key, member = self._place(timer)
            buckets[key] += (member, "" if time_ms is None else time_ms)
        whole(await self._run_each([(scripts.TIMERS_MOVE, [key], (from_ms, *moved)) for key, moved in buckets.items()]))

    async def remove(self, timer: Timer) -> None:
        """Remove a timer; one that does not exist is no error."""
        key, member = self._place(timer)
        await self._run(scripts.TIMERS_MOVE, [key], ("", member, ""))

    def _place(self, timer: Timer) -> tuple[bytes, bytes]:
        """Return the key and the member of a timer."""
        keys = self._layout.rollout(timer.rollout)
        return keys.timers, keys.encoded + b" " + timer.incarnation.encode()


def _timer(member: bytes) -> Timer | None:
    name, _, incarnation = member.partition(b" ")
    rollout = decoded_name(name)
    return Timer(rollout, incarnation.decode()) if rollout is not None and incarnation.isalnum() else None
