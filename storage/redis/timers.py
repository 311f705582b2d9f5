"""Timers on Redis: a sorted set in each bucket, whose members are the encoded name of a rollout and its incarnation."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from storage.redis import scripts
from storage.redis.keys import BUCKETS, decoded_name, rollout_keys, timers_key
from storage.redis.scripts import RunScript
from storage.types import Timer


class RedisTimers:
    """The timers of the rollouts under `prefix`."""

    def __init__(self, run: RunScript, prefix: str) -> None:
        self._run = run
        self._prefix = prefix
        self._keys = [timers_key(prefix, bucket) for bucket in BUCKETS]

    def __repr__(self) -> str:
        return f"<RedisTimers under {self._prefix}>"

    async def claim(self, limit: int, *, now_ms: int, until_ms: int) -> list[Timer]:
        """Return up to `limit` expired timers of each bucket, and set them to `until_ms`."""
        claims = (self._run(scripts.TIMERS_CLAIM, [key], (now_ms, until_ms, limit)) for key in self._keys)
        parts = await asyncio.gather(*claims, return_exceptions=True)
        failures = [part for part in parts if isinstance(part, BaseException)]
        claimed = []
        for key, part in zip(self._keys, parts, strict=True):
            for member in () if isinstance(part, BaseException) else part:
                if (timer := _timer(member)) is None:  # no name of a rollout: no reader would ever remove it
                    await self._run(scripts.TIMERS_MOVE, [key], ("", member, ""))
                else:
                    claimed.append(timer)
        if failures and not claimed:
            raise failures[0]
        return claimed

    async def move(self, times: Mapping[Timer, int | None], *, from_ms: int) -> None:
        """Set timers to new times, except those that are not at `from_ms`."""
        buckets: defaultdict[bytes, list[Any]] = defaultdict(list)
        for timer, time_ms in times.items():
            key, member = self._place(timer)
            buckets[key] += (member, "" if time_ms is None else time_ms)
        moves = (self._run(scripts.TIMERS_MOVE, [key], (from_ms, *moved)) for key, moved in buckets.items())
        await asyncio.gather(*moves)

    async def remove(self, timer: Timer) -> None:
        """Remove a timer."""
        key, member = self._place(timer)
        await self._run(scripts.TIMERS_MOVE, [key], ("", member, ""))

    def _place(self, timer: Timer) -> tuple[bytes, bytes]:
        """Return the key and the member of a timer."""
        keys = rollout_keys(self._prefix, timer.rollout)
        return keys.timers, keys.encoded + b" " + timer.incarnation.encode()


def _timer(member: bytes) -> Timer | None:
    name, _, incarnation = member.partition(b" ")
    rollout = decoded_name(name)
    return Timer(rollout, incarnation.decode()) if rollout is not None and incarnation.isalnum() else None
