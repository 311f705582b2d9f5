"""The queues of groups on Redis: each method is one script in the bucket of its group."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from storage.errors import FieldsChanged
from storage.redis import scripts
from storage.redis.keys import Layout, decoded_name
from storage.redis.replies import Reply, decode_entity, encode_optional
from storage.redis.scripts import RunScript, RunScripts, Script, whole
from storage.types import DEFAULT_QUEUE, MAX_LEASE_MS, QueueCounts, QueuedGroup, StoredEntity

_NO_HOLDER: Final = "-"
_REMOVED: Final = ""


class Queue:
    """Queues of groups; in each queue a group has at most one holder at a time.

    Every method raises `StoreUnreachable`, as the methods of `Store` do.

    Each method moves a group and sets fields of it (None removes a field) in one transaction, and is safe to repeat if its
    response was lost. A holder name must be used for one claim only.
    """

    def __init__(self, run: RunScript, run_all: RunScripts, groups: Layout, ttl_s: int) -> None:
        self._run = run
        self._run_all = run_all
        self._layout = groups
        self._ttl_s = ttl_s

    async def enqueue(
        self,
        group: str,
        notes: Mapping[str, bytes],
        fields: Mapping[str, bytes | None],
        *,
        expect: Mapping[str, bytes | None],
        now_ms: int,
    ) -> StoredEntity | None:
        """Set fields as `Store.update_if` does and add the group to the queues, if all fields have the expected values.

        `notes`: the queues by name, each with the note of its entry.
        Returns None if the group does not exist. Raises `FieldsChanged` if a field does not have the expected value.
        """
        arguments = (len(notes), *notes.values(), len(expect), *encode_optional(expect), *encode_optional(fields))
        reply = await self._write(scripts.ENQUEUE, group, notes, now_ms, *arguments)
        if reply is None:
            return None
        is_enqueued, state = reply
        if not is_enqueued:
            raise FieldsChanged(decode_entity(group, state))
        return decode_entity(group, state)

    async def list_available(self, limit: int, queue: str = DEFAULT_QUEUE) -> list[QueuedGroup]:
        """Return groups of a queue without a holder, oldest first (to the millisecond): at least the first `limit` of them."""
        parts = await self._in_all(scripts.QUEUE_AVAILABLE, queue, max(1, limit))
        found = [_queued(entry, queue) for part in parts for entry in part]
        return sorted(filter(None, found), key=lambda queued: _age(queued.entry_id))

    async def counts(self, queue: str = DEFAULT_QUEUE) -> QueueCounts:
        """Return how many groups of a queue have no holder, how many have one, and the age of the oldest one without one."""
        available, claimed, ages = zip(*await self._in_all(scripts.QUEUE_COUNTS, queue), strict=True)
        return QueueCounts(sum(available), sum(claimed), max(ages))

    async def holders(self, queue: str = DEFAULT_QUEUE) -> dict[str, int]:
        """Return the holders of groups of a queue, and for how many ms (by the server's clock) each did not claim or extend."""
        found: dict[str, int] = {}
        for part in await self._in_all(scripts.QUEUE_HOLDERS, queue):
            for name, silent_ms in part:
                holder = name.decode()
                found[holder] = min(silent_ms, found.get(holder, silent_ms))
        return found

    async def claim(
        self, group: QueuedGroup, holder: str, fields: Mapping[str, bytes | None], *, lease_ms: int, now_ms: int
    ) -> bool:
        """Claim a group that has no holder, for at most `MAX_LEASE_MS`; return whether this holder has it now."""
        return await self._move(group, _NO_HOLDER, holder, _idle(lease_ms), fields, now_ms)

    async def extend(
        self, group: QueuedGroup, holder: str, fields: Mapping[str, bytes | None], *, lease_ms: int, now_ms: int
    ) -> bool:
        """Set the lease to end this long from now; return False if another holder, or none, has the group."""
        return await self._move(group, holder, holder, _idle(lease_ms), fields, now_ms)

    async def release(
        self, group: QueuedGroup, holder: str, fields: Mapping[str, bytes | None], *, now_ms: int, silent_ms: int = 0
    ) -> bool:
        """Return the group to its old position in its queue; return False if this holder does not have it.

        With `silent_ms`, also False if the holder has claimed or extended groups within this time.
        """
        return await self._move(group, holder, _NO_HOLDER, MAX_LEASE_MS, fields, now_ms, silent_ms=silent_ms)

    async def remove(self, group: QueuedGroup, holder: str, fields: Mapping[str, bytes | None], *, now_ms: int) -> bool:
        """Remove the group from its queue; return False if this holder does not have it (also on a repeated call)."""
        return await self._move(group, holder, _REMOVED, 0, fields, now_ms)

    async def _in_all(self, script: Script, queue: str, *arguments: int) -> Sequence[Reply]:
        return whole(await self._run_all(script, [([part.queue(queue)], arguments) for part in self._layout.buckets]))

    async def _move(
        self,
        group: QueuedGroup,
        source: str,
        to: str,
        idle_ms: int,
        fields: Mapping[str, bytes | None],
        now_ms: int,
        *,
        silent_ms: int = 0,
    ) -> bool:
        arguments = (source, to, group.entry_id, idle_ms, silent_ms, *encode_optional(fields))
        return bool(await self._write(scripts.QUEUE_MOVE, group.group, [group.queue], now_ms, *arguments))

    async def _write(
        self, script: Script, group: str, queues: Iterable[str], now_ms: int, *arguments: bytes | str | int
    ) -> Reply:
        keys, bucket = self._layout.rollout(group), self._layout.bucket(group)
        all_keys = (*keys.all, *map(bucket.queue, queues))
        return await self._run(script, all_keys, (keys.encoded, now_ms, self._ttl_s, *arguments))


def _queued(entry: Sequence[bytes], queue: str) -> QueuedGroup | None:
    """Return an entry of a queue; None for one that names no group."""
    entry_id, group, note, *_ = (*entry, b"", b"")
    name = decoded_name(group)
    return None if name is None else QueuedGroup(name, entry_id.decode(), note, queue)


def _idle(lease_ms: int) -> int:
    """Return the idle time, in ms, that an entry gets when it is claimed with this lease."""
    if not 0 < lease_ms <= MAX_LEASE_MS:
        raise ValueError(f"a lease must be between 1 and {MAX_LEASE_MS} ms, not {lease_ms}")
    return MAX_LEASE_MS - lease_ms


def _age(entry_id: str) -> tuple[int, int]:
    """Return the sort key of an entry ID: Unix ms of the server, and a sequence number."""
    time_ms, _, number = entry_id.partition("-")
    return int(time_ms), int(number)
