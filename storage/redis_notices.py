"""Notices over the Redis protocol: what everybody who opens a rollout is told along.

Holds `RedisNotices`. Each bucket has all of them, so that being told costs no round trip. It must not know what they say.
"""

import asyncio

from storage import scripts
from storage.keys import BUCKETS, notices_key
from storage.replies import read_notices
from storage.scripts import Run
from storage.store import Notice


class RedisNotices:
    """The notices under `prefix`."""

    def __init__(self, run: Run, prefix: str) -> None:
        self._run = run
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
