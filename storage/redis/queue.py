"""The queue of groups over the Redis protocol.

Holds `RedisQueue`, each verb one script in the bucket of its group. It does not decide when a write is durable: it runs its
scripts by the store's own way.
"""

import asyncio
from collections.abc import Mapping
from typing import Final
from urllib.parse import unquote

from storage.errors import FieldsChanged
from storage.redis import scripts
from storage.redis.decoding import optional_pairs, read_rollout
from storage.redis.keys import BUCKETS, GROUPS, bucket_for, queue_key, rollout_keys
from storage.redis.multiplexed import Reply
from storage.redis.scripts import Run, Script
from storage.types import MAX_LEASE_MS, QueuedGroup, StoredEntity

_NOBODY: Final = "-"
_OUT: Final = ""


class RedisQueue:
    """The queue of the groups under `prefix`."""

    def __init__(self, run: Run, prefix: str, ttl_s: int) -> None:
        self._run = run
        self._prefix = prefix
        self._ttl_s = ttl_s

    async def enqueue(
        self,
        group: str,
        note: bytes,
        fields: Mapping[str, bytes | None],
        *,
        expect: Mapping[str, bytes | None],
        now_ms: int,
    ) -> StoredEntity | None:
        """Set fields as `amend` does, and put the group in the queue, once, if all of `expect` hold."""
        arguments = (note, len(expect), *optional_pairs(expect), *optional_pairs(fields))
        reply = await self._write(scripts.ENQUEUE, group, now_ms, *arguments)
        if reply is None:
            return None
        was_done, stands = reply
        if not was_done:
            raise FieldsChanged(read_rollout(group, stands))
        return read_rollout(group, stands)

    async def list_available(self, limit: int) -> list[QueuedGroup]:
        """Groups that nobody holds, the longest waiting first: all of them, or at least the first `limit`."""
        keys = [queue_key(self._prefix, bucket) for bucket in BUCKETS]
        parts = await asyncio.gather(*(self._run(scripts.QUEUE_AVAILABLE, [key], [max(1, limit)]) for key in keys))
        found = [
            QueuedGroup(unquote(group.decode(), errors="surrogatepass"), place.decode(), note)
            for part in parts
            for place, group, note in part
        ]
        return sorted(found, key=lambda queued: _age(queued.entry_id))

    async def claim(
        self, group: QueuedGroup, holder: str, fields: Mapping[str, bytes | None], *, lease_ms: int, now_ms: int
    ) -> bool:
        """Hold a group that nobody holds; whether it is held now."""
        return await self._move(group, _NOBODY, holder, _idle(lease_ms), fields, now_ms)

    async def extend(
        self, group: QueuedGroup, holder: str, fields: Mapping[str, bytes | None], *, lease_ms: int, now_ms: int
    ) -> bool:
        """Hold it for so long from now on; False if it is somebody else's, or nobody's any more."""
        return await self._move(group, holder, holder, _idle(lease_ms), fields, now_ms)

    async def release(
        self, group: QueuedGroup, holder: str, fields: Mapping[str, bytes | None], *, now_ms: int
    ) -> bool:
        """Let it wait again, in its old place; False if it was not this holder's."""
        return await self._move(group, holder, _NOBODY, MAX_LEASE_MS, fields, now_ms)

    async def remove(self, group: QueuedGroup, holder: str, fields: Mapping[str, bytes | None], *, now_ms: int) -> bool:
        """Take it out of the queue for good; False if it was not this holder's, also the second time."""
        return await self._move(group, holder, _OUT, 0, fields, now_ms)

    async def _move(
        self, group: QueuedGroup, source: str, to: str, idle_ms: int, fields: Mapping[str, bytes | None], now_ms: int
    ) -> bool:
        arguments = (source, to, group.entry_id, idle_ms, *optional_pairs(fields))
        return bool(await self._write(scripts.QUEUE_MOVE, group.group, now_ms, *arguments))

    async def _write(self, script: Script, group: str, now_ms: int, *arguments: bytes | str | int) -> Reply:
        keys = rollout_keys(self._prefix + GROUPS, group)
        every = (*keys.all(), queue_key(self._prefix, bucket_for(group)))
        return await self._run(script, every, (keys.encoded, now_ms, self._ttl_s, *arguments))


def _idle(lease_ms: int) -> int:
    """For how long an entry under such a lease has been idle already."""
    if not 0 < lease_ms <= MAX_LEASE_MS:
        raise ValueError(f"a lease is more than nothing and at most {MAX_LEASE_MS} ms, not {lease_ms}")
    return MAX_LEASE_MS - lease_ms


def _age(entry_id: str) -> tuple[int, int]:
    """What places are ordered by: unix ms of the server, and a number within it."""
    at, _, number = entry_id.partition("-")
    return int(at), int(number)
