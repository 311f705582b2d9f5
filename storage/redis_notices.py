"""Notices over the Redis protocol: what everybody who opens a rollout is told along.

Holds `RedisNotices`. Each bucket has all of them, so that being told costs no round trip. It must not know what they say.
"""

import asyncio

from storage import scripts
from storage.keys import BUCKETS, beats_key, notices_key
from storage.replies import pairs, read_notices
from storage.scripts import Run
from storage.store import Notice


class RedisNotices:
    """The notices under `prefix`."""

    def __init__(self, run: Run, prefix: str, *, run_fast: Run) -> None:
        self._run = run
        self._run_fast = run_fast  # waits for no disk and no replica: a beat that is lost is beaten again
        self._beats = beats_key(prefix, BUCKETS[0])
        self._keys = [notices_key(prefix, bucket) for bucket in BUCKETS]

    async def announce(self, name: str, value: bytes) -> Notice:
        """Set what every `open` tells along from now on, wherever it is done."""
        first, *others = self._keys
        number = await self._run(scripts.ANNOUNCE, [first], (name, value, ""))
        await asyncio.gather(*(self._run(scripts.ANNOUNCE, [key], (name, value, number)) for key in others))
        return Notice(value, number)

    async def read(self) -> dict[str, Notice]:
        """What was announced last."""
        return read_notices(await self._run(scripts.NOTICES, [self._keys[0]], ()))

    async def beat(self, name: str, value: bytes, *, life_ms: int) -> tuple[dict[str, Notice], dict[str, bytes]]:
        """Say that `name` is alive; give back what is announced, and everybody's last beat."""
        notices, beats = await self._run_fast(scripts.BEAT, [self._keys[0], self._beats], (name, life_ms, value))
        return read_notices(notices), {who.decode(): said for who, said in pairs(beats)}
