"""The queues of groups on Redis: a stream in the bucket of each group, and an index of all its entries for each queue.

The streams decide which holder has which entry (see `scripts`). The index is in one place, so that a claim finds entries, and
counts them, with one command, independently of the number of buckets and of leases. It is written after the streams, never
believed, and compared with them every `_COMPARE_MS`: that finds what a process that died has not written, or one of 0.1.0,
which knows no index.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from storage.errors import FieldsChanged, StorageError
from storage.redis import scripts
from storage.redis.cluster import Servers, listen
from storage.redis.connections import (
    Reply,
    decode_announcements,
    decode_entity,
    encode_optional,
    pairs,
    readable,
)
from storage.redis.keys import Bucket, Layout, decoded_name
from storage.redis.scripts import RunEach, RunScript, whole
from storage.types import (
    DEFAULT_QUEUE,
    MAX_LEASE_MS,
    ClaimedGroup,
    QueueCounts,
    QueuedGroup,
    QueueState,
    StoredEntity,
)

_NO_HOLDER: Final = "-"
_REMOVED: Final = ""
_COMPARE_MS: Final = 10_000  # at least, and so that comparing takes a small share of the time
_COMPARE_SHARE: Final = 30
_PAGE: Final = 1000  # entries that are read together
_LEAST: Final = 10  # entries of a bucket
_UNSURE_MS: Final = 1000  # a holder that was found may have released its group meanwhile
_NOTES_PAGE: Final = 250
_AVAILABLE: Final = b"0"  # where an entry is in the index, as in queue_note.lua
_ABSENT: Final = b""
_ANYWHERE: Final = b"*"
_GONE: Final = b""
_UNCHANGED: Final = b""


class Queue:
    """Queues of groups; in each queue a group has at most one holder at a time.

    Every method raises `StoreUnreachable`, as the methods of `Store` do.

    Each method moves a group and sets fields of it (None removes a field) in one transaction, and is safe to repeat if its
    response was lost. A holder name must be used for one claim only. Only `run_durably` waits for durability.
    """

    def __init__(
        self,
        run: RunScript,
        run_each: RunEach,
        run_durably: RunEach,
        servers: Servers,
        layout: Layout,
        ttl_s: int,
    ) -> None:
        self._run = run
        self._run_each = run_each
        self._run_durably = run_durably
        self._servers = servers
        self._announcements = layout.buckets[0].announcements
        self._layout = layout.groups
        self._ttl_s = ttl_s
        self._comparing: set[asyncio.Task[None]] = set()
        self._interval_ms = _COMPARE_MS

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
        keys, bucket = self._layout.rollout(group), self._layout.bucket(group)
        arguments = (len(notes), *notes.values(), len(expect), *encode_optional(expect), *encode_optional(fields))
        all_keys = (*keys.all, *map(bucket.queue, notes))
        (reply,) = whole(
            await self._run_durably([(scripts.ENQUEUE, all_keys, (keys.encoded, now_ms, self._ttl_s, *arguments))])
        )
        if reply is None:
            return None
        is_enqueued, state, *entry_ids = reply
        if not is_enqueued:
            raise FieldsChanged(decode_entity(group, state))
        added = zip(entry_ids, notes.items(), strict=True)
        await self._run_each(
            [
                self._noted(queue, (entry_id + b" " + keys.encoded, _ANYWHERE, _AVAILABLE, b"=" + note))
                for entry_id, (queue, note) in added
            ]
        )
        return decode_entity(group, state)

    async def read(
        self, queue: str = DEFAULT_QUEUE, *, skip: int = 0, limit: int = 0, consumer: str | None = None
    ) -> QueueState:
        """Return the counts, the announcements, and groups without a holder, oldest first (to the millisecond).

        These are those after the first `skip` ones. A group may have a holder nevertheless. With a `consumer`, also its holders
        that are overdue (`extend`); they may have extended or ended their leases elsewhere.
        """
        bucket = self._layout.buckets[0]
        watched = [] if consumer is None else [bucket.watched(queue, consumer)]
        keys = [self._announcements, *bucket.queue_index(queue), *watched]
        reply = await self._run(scripts.QUEUE_READ, keys, (skip, limit, self._interval_ms))
        announcements, entries, available, claimed, oldest_age_ms, is_due, overdue = reply
        if is_due:
            comparing = asyncio.get_running_loop().create_task(self._compare(queue))
            self._comparing.add(comparing)
            comparing.add_done_callback(self._comparing.discard)
            if is_due > 1:  # for the first time: the index may have nothing yet
                await asyncio.shield(comparing)
                return await self.read(queue, skip=skip, limit=limit, consumer=consumer)
        found = [_queued(entry, note, queue) for entry, note in pairs(entries)]
        return QueueState(
            sorted(filter(None, found), key=lambda queued: _age(queued.entry_id)),
            QueueCounts(available, claimed, oldest_age_ms),
            decode_announcements(announcements),
            [holder.decode() for holder in overdue],
        )

    async def counts(self, queue: str = DEFAULT_QUEUE) -> QueueCounts:
        """Return how many groups of a queue have no holder, how many have one, and the age of the oldest one without one."""
        return (await self.read(queue)).counts

    async def forget(self, consumer: str, holder: str, queue: str = DEFAULT_QUEUE) -> None:
        """Watch a holder no more."""
        await self._run(*self._watching(queue, consumer, holder, b""))

    @asynccontextmanager
    async def arrivals(self, queue: str) -> AsyncIterator[asyncio.Event]:
        """Return an event that is set when a group may have become available, also once the notifications begin.

        They can be lost, and there is none when a lease expires.
        """
        arrived = asyncio.Event()
        channel, *_ = self._layout.buckets[0].queue_index(queue)
        listening = asyncio.get_running_loop().create_task(listen(self._servers, channel, arrived))
        try:
            yield arrived
        finally:
            listening.cancel()
            await asyncio.wait([listening])

    async def claim(
        self, group: QueuedGroup, holder: str, fields: Mapping[str, bytes | None], *, lease_ms: int, now_ms: int
    ) -> ClaimedGroup | None:
        """Claim a group that has no holder, for at most `MAX_LEASE_MS`; return it if this holder has it now."""
        ((state, *parts),) = await self._lease({group: fields}, _NO_HOLDER, holder, lease_ms, now_ms)
        if state <= 0:
            return None
        note, entity, marks = parts
        queued = QueuedGroup(group.group, group.entry_id, note, group.queue)
        decoded = {readable(name): value for name, value in pairs(marks)}
        return ClaimedGroup(queued, decode_entity(group.group, entity), decoded)

    async def extend(
        self,
        groups: Mapping[QueuedGroup, Mapping[str, bytes | None]],
        holder: str,
        *,
        lease_ms: int,
        now_ms: int,
        watch: tuple[str, int] | None = None,
    ) -> list[bool]:
        """Set the leases to end this long from now, with fields for each group.

        Returns False for a group if another holder, or none, has it. `watch`: a consumer, for which `read` returns the holder
        as overdue unless it extends its leases again in this many ms.
        """
        return [state > 0 for state, *_ in await self._lease(groups, holder, holder, lease_ms, now_ms, watch)]

    async def release(
        self, group: QueuedGroup, holder: str, fields: Mapping[str, bytes | None], *, now_ms: int, silent_ms: int = 0
    ) -> bool:
        """Return the group to its old position in its queue; return False if this holder does not have it.

        With `silent_ms`, also False if the holder has claimed or extended groups within this time.
        """
        return await self._leave(group, fields, (holder, _NO_HOLDER, group.entry_id, MAX_LEASE_MS, silent_ms), now_ms)

    async def remove(self, group: QueuedGroup, holder: str, fields: Mapping[str, bytes | None], *, now_ms: int) -> bool:
        """Remove the group from its queue; return False if this holder does not have it (also on a repeated call)."""
        return await self._leave(group, fields, (holder, _REMOVED, group.entry_id, 0, 0), now_ms)

    async def close(self) -> None:
        """Stop comparing."""
        for comparing in self._comparing:
            comparing.cancel()
        if self._comparing:
            await asyncio.wait(self._comparing)

    async def _lease(
        self,
        groups: Mapping[QueuedGroup, Mapping[str, bytes | None]],
        source: str,
        holder: str,
        lease_ms: int,
        now_ms: int,
        watch: tuple[str, int] | None = None,
    ) -> Sequence[Reply]:
        """Lease groups of one queue, and note that in the index, with one write to each server; return the replies.

        What could not be leased is noted where it is.
        """
        if not groups:
            return []
        idle_ms, queue = _idle(lease_ms), next(iter(groups)).queue
        calls = [
            self._moving(group, fields, (source, holder, group.entry_id, idle_ms, 0), now_ms)
            for group, fields in groups.items()
        ]
        hints = [self._noted(queue, [part for group in groups for part in self._entry(group, lease_ms)])]
        hints += [] if watch is None else [self._watching(queue, watch[0], holder, watch[1])]
        replies = (await self._run_durably([*calls, *hints]))[: len(calls)]
        wrong = [
            part
            for group, (state, *left_ms) in zip(groups, whole(replies), strict=True)
            for part in (() if state > 0 else self._entry(group, min(left_ms[0], _UNSURE_MS) if left_ms else _GONE))
        ]
        if wrong:
            await self._run_each([self._noted(queue, wrong)])
        return replies

    async def _leave(
        self, group: QueuedGroup, fields: Mapping[str, bytes | None], movement: tuple[str | int, ...], now_ms: int
    ) -> bool:
        """Move a group away from its holder, and note that afterwards: a claim must not find a group before it is released."""
        ((state, *_),) = whole(await self._run_durably([self._moving(group, fields, movement, now_ms)]))
        if state > 0:
            place = _GONE if _REMOVED in movement else _AVAILABLE
            await self._run_each([self._noted(group.queue, self._entry(group, place))])
        return bool(state > 0)

    async def _compare(self, queue: str) -> None:
        """Correct the index of a queue by its streams. Entries that are moved meanwhile are left as they are."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        with suppress(StorageError):
            known = await self._indexed(queue)
            starts: dict[Bucket, bytes] = dict.fromkeys(self._layout.buckets, b"-")
            unread: set[Bucket] = set()
            corrections: list[bytes | int] = []
            while starts:
                limit = max(_LEAST, _PAGE // len(starts))
                pages = [(scripts.QUEUE_ENTRIES, [it.queue(queue)], (start, limit)) for it, start in starts.items()]
                replies = await self._run_each(pages)
                for bucket, reply in zip([*starts], replies, strict=True):
                    if isinstance(reply, StorageError):
                        unread.add(bucket)
                        del starts[bucket]
                        continue
                    following, entries = reply
                    await asyncio.sleep(0)  # there may be thousands of entries
                    corrections += _differences(known, entries)
                    if following:
                        starts[bucket] = b"(" + following
                    else:
                        del starts[bucket]
            for entry, place in known.items():  # what no stream has
                name = decoded_name(entry.partition(b" ")[2])
                if name is None or self._layout.bucket(name) not in unread:
                    corrections += (entry, place, _GONE, _UNCHANGED)
            for start in range(0, len(corrections), 4 * _NOTES_PAGE):
                await self._run_each([self._noted(queue, corrections[start : start + 4 * _NOTES_PAGE])])
        self._interval_ms = max(_COMPARE_MS, round(1000 * _COMPARE_SHARE * (loop.time() - began)))

    async def _indexed(self, queue: str) -> dict[bytes, bytes]:
        """Return all entries of an index, and where it has each."""
        available, leased, *_ = self._layout.buckets[0].queue_index(queue)
        found: dict[bytes, bytes] = {}
        skip = 0
        while page := await self._run(scripts.QUEUE_INDEX, [available, leased], (skip, _PAGE)):
            found |= pairs(page)
            skip += _PAGE
        return found

    def _moving(
        self, group: QueuedGroup, fields: Mapping[str, bytes | None], movement: tuple[str | int, ...], now_ms: int
    ) -> scripts.Call:
        """Return the call of queue_move.lua; `movement`: from, to, entry ID, idle time, silence."""
        keys, stream = self._layout.rollout(group.group), self._layout.bucket(group.group).queue(group.queue)
        arguments = (keys.encoded, now_ms, self._ttl_s, *movement, *encode_optional(fields))
        return scripts.QUEUE_MOVE, (*keys.all, stream), arguments

    def _entry(self, group: QueuedGroup, lease: bytes | int) -> tuple[bytes | int, ...]:
        """Return the arguments for an entry in queue_note.lua."""
        return group.entry_id.encode() + b" " + self._layout.rollout(group.group).encoded, _ANYWHERE, lease, _UNCHANGED

    def _watching(self, queue: str, consumer: str, holder: str, silent_ms: bytes | int) -> scripts.Call:
        return (
            scripts.QUEUE_WATCH,
            [self._layout.buckets[0].watched(queue, consumer)],
            (holder, silent_ms, MAX_LEASE_MS),
        )

    def _noted(self, queue: str, entries: Sequence[bytes | int]) -> scripts.Call:
        return scripts.QUEUE_NOTE, self._layout.buckets[0].queue_index(queue)[:3], entries


def _differences(known: dict[bytes, bytes], entries: Sequence[Any]) -> list[bytes | int]:
    """Remove entries of a stream from those of the index; return the corrections of those that are in the wrong place.

    The end of a lease is not compared: a claim notices a wrong one.
    """
    corrections: list[bytes | int] = []
    for entry_id, group, note, left_ms in zip(*[iter(entries)] * 4, strict=True):
        entry = entry_id + b" " + group
        place = known.pop(entry, _ABSENT)
        if (place == _AVAILABLE) != (left_ms == 0) or place == _ABSENT:
            corrections += (entry, place, left_ms, b"=" + note)
    return corrections


def _queued(entry: bytes, note: bytes, queue: str) -> QueuedGroup | None:
    """Return an entry of the index; None for one that names no group."""
    entry_id, _, group = entry.partition(b" ")
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
