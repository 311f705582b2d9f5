"""The store: names, bytes and counts, which it does not interpret, on a Redis or Valkey server or cluster.

A *rollout* is a name with fields, counts, an ordered list of named records, a set of named blocks that records share, and
marks. A round trip is repeated once if its response is lost.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from secrets import token_hex
from typing import Final

from redis.exceptions import NoScriptError, ResponseError

from storage.errors import (
    FieldsChanged,
    MissingBlocks,
    RolloutDeleted,
    RolloutExpired,
    StorageError,
    StoreUnreachable,
)
from storage.options import StoreOptions
from storage.redis import scripts
from storage.redis.changes import Changes
from storage.redis.cluster import Servers, listen
from storage.redis.connections import (
    MANY_ARGUMENTS,
    Barrier,
    Reply,
    Request,
    checked,
    decode_announcements,
    decode_entity,
    encode_optional,
    pairs,
    readable,
    refused,
)
from storage.redis.keys import Layout, RolloutKeys
from storage.redis.listing import Listing
from storage.redis.queue import Queue
from storage.redis.scripts import Call, Command, RunEach, RunScript, Script, whole
from storage.redis.server_info import fetch_infos, ping_each, summarize, warnings_of
from storage.redis.timers import Timers
from storage.types import (
    MAX_LEASE_MS,
    Announcement,
    Appended,
    Beat,
    FullRollout,
    Page,
    Reservation,
    ServerWarning,
    StepWrite,
    StoredEntity,
)


class Announcements:
    """Small values that every `Store.open` returns together with the rollout. They do not expire.

    `run` and `run_each` wait for durability, `run_fast` does not.
    """

    def __init__(
        self, servers: Servers, run: RunScript, run_each: RunEach, layout: Layout, *, run_fast: RunScript
    ) -> None:
        self._servers = servers
        self._run = run
        self._run_each = run_each
        self._run_fast = run_fast
        self._bucket = layout.buckets[0]
        self._keys = [bucket.announcements for bucket in layout.buckets]

    async def announce(self, name: str, value: bytes) -> Announcement:
        """Set a value and return it. Each `open` that starts after this returned gets this value or a later one."""
        return await self._announced(name, value, await self._number(name, value, ""))

    async def announce_if(self, name: str, value: bytes, number: int) -> Announcement | None:
        """Set a value if the present value has this number (0: no value is set); return None if its number is another."""
        assigned = await self._number(name, value, number)
        return None if assigned < 0 else await self._announced(name, value, assigned)

    async def _number(self, name: str, value: bytes, present: int | str) -> int:
        number: int = await self._run(scripts.ANNOUNCE, [self._keys[0]], (name, value, "", present))
        return number

    async def _announced(self, name: str, value: bytes, number: int) -> Announcement:
        arguments = (name, value, number, "")
        whole(await self._run_each([(scripts.ANNOUNCE, [key], arguments) for key in self._keys[1:]]))
        return Announcement(value, number)

    async def read(self) -> dict[str, Announcement]:
        """Return all announcements."""
        return decode_announcements(await self._run(scripts.ANNOUNCEMENTS, [self._keys[0]], ()))

    async def listen(self, heard: asyncio.Event) -> None:
        """Set an event when a value may have been set, without end. Notifications can be lost."""
        await listen(self._servers, self._keys[0], heard)

    async def beat(self, process: str, states: Mapping[str, tuple[int, int]], *, lifetime_ms: int, known: int) -> Beat:
        """Send a process's heartbeat: for each policy the number of the latest pause that it knows, and its calls in flight.

        It counts until its lifetime ends (0: at once). `known` is `Beat.known` of the announcements that the process has.
        Heartbeats do not wait for durability.
        """
        keys = [self._bucket.announcements, self._bucket.heartbeats, *self._bucket.processes]
        arguments: list[str | int] = [process, lifetime_ms, known]
        for policy, state in states.items():
            arguments += (policy, *state)
        now_known, announcements, counts = await self._run_fast(scripts.HEARTBEAT, keys, arguments)
        found = dict(zip(states, zip(counts[::2], counts[1::2], strict=True), strict=True))
        return Beat(found, now_known, None if announcements is None else decode_announcements(announcements))

    async def lead(self, role: str, process: str, *, lifetime_ms: int) -> bool:
        """Take or keep a role for its lifetime (0: give it up); return False if another process has it. Not durable."""
        return bool(await self._run_fast(scripts.LEAD, [self._bucket.role(role)], (process, lifetime_ms)))


class Cache:
    """Values that any process of the store may have written. They do not wait for durability, and may be gone at any time."""

    def __init__(self, run: RunScript, layout: Layout) -> None:
        self._run = run
        self._layout = layout

    def __repr__(self) -> str:
        return f"<Cache under {self._layout.prefix}>"

    async def get(self, name: str) -> bytes | None:
        """Return a value that was put at most its lifetime ago, or None."""
        values, _, _ = self._layout.bucket(name).cache
        value: bytes | None = await self._run(scripts.CACHE_GET, [values], (name,))
        return value

    async def put(self, name: str, value: bytes, *, lifetime_s: int, limit: int) -> None:
        """Set a value. If all values have more than `limit` bytes, the oldest are removed first.

        The limit applies to each bucket by its share. A value above the share is not kept.
        """
        share = limit // len(self._layout.buckets)
        await self._run(scripts.CACHE_PUT, self._layout.bucket(name).cache, (name, value, lifetime_s * 1000, share))


_DELETED, _EXPIRED, _MISSING = -1, -2, -3  # results of append.lua
_PROBE_LIFETIME_MS: Final = 1000
_BATCH_TTL_S: Final = 7 * 86_400
_MISMATCH_TTL_S: Final = MAX_LEASE_MS // 1000 + 3600
_NO_BARRIER: Final = Barrier()


class Store:
    """Rollouts in durable storage. Every method raises `StoreUnreachable` if the store does not respond in time.

    Every method is safe to repeat if its response was lost. Each write to a rollout restarts its lifetime (TTL), if the store
    has one; a read does not. `close` awaits `stop` at the end.
    """

    def __init__(
        self,
        servers: Servers,
        layout: Layout,
        options: StoreOptions,
        barrier: Barrier,
        stop: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.layout = layout
        self._servers = servers
        self._options = options
        self._ttl_s = options.ttl_s or 0
        self._barrier = barrier
        self._stop = stop
        run_durable, run_each_durable = partial(self._run, durable=True), partial(self._run_each, durable=True)
        self._scripts = {script: script.indexing(options.indexed) for script in scripts.WITH_INDEX}
        self.listing = Listing(servers, partial(self._run_each, shared=False), self._scripts, layout, options.indexed)
        self.announcements = Announcements(servers, run_durable, run_each_durable, layout, run_fast=self._run)
        self.changes = Changes(servers, layout)
        self.timers = Timers(self._run, self._run_each, layout)
        self.cache = Cache(partial(self._run, shared=False), layout)
        self.queue = Queue(
            partial(self._run, shared=False), self._run_each, run_each_durable, servers, layout, self._ttl_s
        )

    def __repr__(self) -> str:
        return f"<Store {self._servers!r}>"

    async def open(
        self,
        rollout: str,
        fields: Mapping[str, bytes],
        *,
        now_ms: int,
        reservation: Reservation | None = None,
        timer_ms: int | None = None,
        is_new: bool = False,
    ) -> StoredEntity:
        """Return the rollout with this name; create it with `fields` if it does not exist.

        One round trip, or two if the rollout is new, and not expected to be (`is_new`), or gets a reservation: both must not be
        lost.

        A rollout that is created gets a timer at `timer_ms`, in the same transaction.
        A reservation for a record is made if one is requested and the rollout has fewer records and reservations than its limit
        (a field `places` with a number).
        """
        incarnation = token_hex(8)
        keys = self.layout.rollout(rollout)
        all_keys = [*keys.all, keys.announcements]
        arguments: list[bytes | str | int] = [keys.encoded, now_ms, self._ttl_s, incarnation, *(reservation or ("", 0))]
        for name, value in fields.items():
            arguments += (f"f:{name}", value)
        if timer_ms is not None:
            all_keys.append(keys.timers)
            arguments.append(timer_ms)
        all_keys.append(keys.indexes)
        script, durable = self._scripts[scripts.OPEN], is_new or bool(self._barrier.commands)
        reply, announcements, has_reservation = await self._run(script, all_keys, arguments, durable=durable)
        stored = decode_entity(
            rollout, reply, new_incarnation=incarnation, announcements=announcements, has_reservation=has_reservation
        )
        if not durable and self._barrier.confirmed and (stored.created or stored.has_reservation):
            self._check(self._barrier, await self._servers.execute(all_keys[0], [("PING",)], shared=True), all_keys[0])
        return stored

    @property
    def ttl_s(self) -> int | None:
        """The lifetime of a rollout after its last write, in seconds; None: rollouts do not expire."""
        return self._ttl_s or None

    @cached_property
    def groups(self) -> "Store":
        """The groups: entities with fields and marks, in a namespace separate from rollouts."""
        return self._namespace(self.layout.groups, self._ttl_s)

    @cached_property
    def batches(self) -> "Store":
        """The batches, stored like groups, with a lifetime of at most one week."""
        return self._namespace(self.layout.batches, min(self._ttl_s or _BATCH_TTL_S, _BATCH_TTL_S))

    @cached_property
    def mismatches(self) -> "Store":
        """What trainers reported of batches, in their namespace, with a lifetime of an hour more than the longest lease."""
        return self._namespace(self.layout.batches, min(self._ttl_s or _MISMATCH_TTL_S, _MISMATCH_TTL_S))

    def same_slot(self, group: str, rollout: str) -> bool:
        """Return whether a group and a rollout with these names can be opened together: one pair per bucket can."""
        return self.layout.bucket(group) is self.layout.bucket(rollout)

    async def open_group(
        self,
        group: str,
        fields: Mapping[str, bytes],
        rollouts: Mapping[str, Mapping[str, bytes]],
        *,
        now_ms: int,
        timer_ms: int | None = None,
    ) -> StoredEntity:
        """Create a group and its rollouts with their fields in one transaction; return the group.

        Each rollout that is created gets a timer at `timer_ms`. If the group exists, nothing is changed. Raises `ValueError`
        for a rollout that is not in the `same_slot`.
        """
        if not all(self.same_slot(group, rollout) for rollout in rollouts):
            raise ValueError("a rollout of the group is not in the same slot")
        incarnation = token_hex(8)
        entities = [(self.layout.groups.rollout(group), incarnation, fields)]
        entities += [(self.layout.rollout(name), token_hex(8), own) for name, own in rollouts.items()]
        all_keys = [key for keys, _, _ in entities for key in keys.all]
        bucket = self.layout.bucket(group)
        all_keys += (bucket.timers, bucket.indexes)
        arguments: list[bytes | str | int] = [now_ms, self._ttl_s, len(entities), "" if timer_ms is None else timer_ms]
        for keys, own_incarnation, own_fields in entities:
            arguments += [keys.encoded, own_incarnation, len(own_fields)]
            arguments += [part for name, value in own_fields.items() for part in (f"f:{name}", value)]
        reply = await self._run(self._scripts[scripts.OPEN_GROUP], all_keys, arguments, durable=True)
        return decode_entity(group, reply, new_incarnation=incarnation)

    async def get(self, rollout: str) -> StoredEntity | None:
        """Return the rollout with this name, or None. Creates nothing."""
        key = self.layout.rollout(rollout).rollout
        reply = checked((await self._servers.execute(key, [("HGETALL", key)], shared=True))[0])
        return decode_entity(rollout, reply) if reply else None

    async def get_marked(self, rollout: str) -> tuple[StoredEntity | None, dict[str, bytes]]:
        """Return the rollout with this name, or None, and its marks."""
        keys = self.layout.rollout(rollout)
        commands = [("HGETALL", keys.rollout), ("HGETALL", keys.marks)]
        reply, marks = map(checked, await self._servers.execute(keys.rollout, commands, shared=True))
        return decode_entity(rollout, reply) if reply else None, {readable(name): it for name, it in pairs(marks)}

    async def get_each(self, rollouts: Sequence[str]) -> list[StoredEntity | None]:
        """Return the rollouts with these names, or None: one write to each server."""
        return [None if found is None else found[0] for found in await self.get_all(rollouts)]

    async def update_each(
        self,
        updates: Mapping[str, Mapping[str, bytes | None]],
        *,
        expect: Mapping[str, bytes | None],
        now_ms: int,
    ) -> list[StoredEntity | FieldsChanged | None]:
        """Do `update_if` with each of these rollouts, all of them: one write to each server.

        Returns FieldsChanged instead of raising it; raises another error once all have ended.
        """
        expected = (len(expect), *encode_optional(expect))
        calls = []
        for name, fields in updates.items():
            keys = self.layout.rollout(name)
            arguments = (keys.encoded, now_ms, self._ttl_s, *expected, *encode_optional(fields))
            calls.append((scripts.UPDATE_IF, keys.all, arguments))
        replies = whole(await self._run_each(calls, durable=True))
        return [_updated(name, reply) for name, reply in zip(updates, replies, strict=True)]

    async def update_if(
        self,
        rollout: str,
        fields: Mapping[str, bytes | None],
        *,
        expect: Mapping[str, bytes | None],
        now_ms: int,
        touched_ms: int | None = None,
    ) -> StoredEntity | None:
        """Set fields (None removes one) if all fields have the expected values (None: absent); return the new state.

        If `touched_ms` is given, it must be the expected one, too. Returns None if the rollout does not exist. Raises
        `FieldsChanged`, without writing, if a field has another value. If the response was lost, a repeated call can fail
        because of its own first attempt: compare the current state.
        """
        expected = [*encode_optional(expect), *(() if touched_ms is None else ("touched_ms", f"={touched_ms}"))]
        arguments = (len(expected) // 2, *expected, *encode_optional(fields))
        reply = await self._write(scripts.UPDATE_IF, self.layout.rollout(rollout), now_ms, *arguments)
        updated = _updated(rollout, reply)
        if isinstance(updated, FieldsChanged):
            raise updated
        return updated

    async def append(self, entry: StepWrite, *, now_ms: int) -> Appended:
        """Store a record with its blocks and counts in one transaction, with the durability that the store is set to.

        One round trip. Appending the same name again only updates `touched_ms` and returns the position of the first append,
        so a caller that lost the response can repeat it. If the rollout has expired since it was opened, an entry with an
        origin restores it with the same incarnation; if it was opened again since, the record is added to the new incarnation.

        Raises:
            RolloutDeleted: the rollout was deleted.
            RolloutExpired: the rollout has expired and the entry has no origin.
            MissingBlocks: required blocks are not stored.
        """
        keys = self.layout.rollout(entry.rollout)
        arguments: list[bytes | str | int] = [keys.encoded, now_ms, self._ttl_s]
        if len(entry.blocks) + len(entry.required_blocks) > MANY_ARGUMENTS:
            await asyncio.to_thread(_add_arguments, arguments, entry)
        else:
            _add_arguments(arguments, entry)
        others = (keys.deleted, keys.indexes) if entry.origin is None else (keys.deleted, keys.timers, keys.indexes)
        reply = await self._run(self._scripts[scripts.APPEND], (*keys.all, *others), arguments, durable=True)
        if reply[0] == _MISSING:
            raise MissingBlocks(reply[1:])
        if reply[0] == _EXPIRED:
            raise RolloutExpired(f"rollout {entry.rollout!r} has expired after it was opened")
        if reply[0] == _DELETED:
            raise _deleted(entry.rollout)
        position, is_late, is_restored, is_new = reply
        return Appended(position, bool(is_late), bool(is_restored), bool(is_new))

    async def extend(self, rollout: str, incarnation: str, reservation: Reservation) -> None:
        """Set the lease of a reservation to end this long from now; 0 releases it. Not durable.

        `append` of the record with its name uses it up. Does nothing if the rollout has another incarnation now.
        """
        keys = self.layout.rollout(rollout)
        await self._run(scripts.EXTEND_RESERVATION, keys.all, (keys.encoded, 0, 0, incarnation, *reservation))

    async def mark(self, rollout: str, incarnation: str, marks: Mapping[str, bytes], *, now_ms: int) -> None:
        """Set marks: small values that become known after a record was stored (a reward, a disconnected client).

        Raises RolloutDeleted if the rollout was deleted, or it has expired and was not opened again.
        """
        encoded = (part for mark in marks.items() for part in mark)
        if await self._write_unless_deleted(scripts.MARK, rollout, now_ms, incarnation, *encoded) < 0:
            raise _deleted(rollout)

    async def renew(self, rollout: str, incarnation: str | None, *, now_ms: int = 0) -> bool:
        """Restart the lifetime of a rollout (None: of any incarnation); return whether it exists. Not durable.

        If `now_ms` is not 0, it also becomes `touched_ms`. Nothing else changes, and no change is published.
        """
        keys = self.layout.rollout(rollout)
        arguments = (keys.encoded, now_ms, self._ttl_s, incarnation or "")
        return bool(await self._run(self._scripts[scripts.RENEW], (*keys.all, keys.indexes), arguments))

    async def marks(self, rollout: str, names: Sequence[str] | None = None) -> dict[str, bytes]:
        """Return the existing marks with these names, or all marks of the rollout if `names` is None."""
        key = self.layout.rollout(rollout).marks
        if names is not None:
            values = await self._execute(key, ("HMGET", key, *names)) if names else ()
            return {name: value for name, value in zip(names, values, strict=True) if value is not None}
        return {readable(name): value for name, value in pairs(await self._execute(key, ("HGETALL", key)))}

    async def read(self, rollout: str, start: int, limit: int) -> list[bytes]:
        """Return up to `limit` records from position `start`, in the order in which they were appended."""
        if start < 0 or limit <= 0:  # Redis counts negative indexes from the end
            return []
        key = self.layout.rollout(rollout).records
        records: list[bytes] = await self._execute(key, ("LRANGE", key, start, start + limit - 1))
        return records

    async def read_all(self, rollout: str, limit: int) -> FullRollout | None:
        """Return a rollout with up to `limit` records and all its other data in one round trip, or None."""
        (found,) = await self.read_each([rollout], limit)
        return found

    async def read_each(self, rollouts: Sequence[str], limit: int) -> list[FullRollout | None]:
        """Do `read_all` with each of these rollouts: one write to each server."""
        requests = []
        for name in rollouts:
            keys = self.layout.rollout(name)
            reads: list[Command] = [("LRANGE", keys.records, 0, max(1, limit) - 1)]
            reads += [("HGETALL", key) for key in (keys.blocks, keys.marks, keys.rollout)]
            requests.append((keys.rollout, reads))
        found: list[FullRollout | None] = []
        for name, replies in zip(rollouts, whole(await self._servers.execute_all(requests)), strict=True):
            records, blocks, marks, entity = map(checked, replies)
            if entity:
                decoded = {readable(mark): value for mark, value in pairs(marks)}
                found.append(FullRollout(decode_entity(name, entity), records, dict(pairs(blocks)), decoded))
            else:
                found.append(None)
        return found

    async def find(self, rollout: str, name: str) -> tuple[int, bytes] | None:
        """Return the position and the bytes of the record with this name, or None."""
        keys = self.layout.rollout(rollout)
        reply = await self._run(scripts.FIND, keys.all, (keys.encoded, 0, 0, name), shared=False)
        return (reply[0], reply[1]) if reply and reply[1] is not None else None

    async def blocks(self, rollout: str, names: Sequence[bytes] | None = None) -> dict[bytes, bytes]:
        """Return the existing blocks with these names, or all blocks of the rollout if `names` is None."""
        key = self.layout.rollout(rollout).blocks
        if names is None:
            return dict(pairs(await self._execute(key, ("HGETALL", key))))
        if not names:
            return {}
        blocks = await self._execute(key, ("HMGET", key, *names))
        return {name: block for name, block in zip(names, blocks, strict=True) if block is not None}

    async def get_all(
        self, rollouts: Sequence[str], *, with_marks: bool = False
    ) -> Sequence[tuple[StoredEntity, dict[str, bytes]] | None]:
        """Return the rollouts with these names, each with its marks (with_marks), or None; one write to each server."""
        requests: list[Request] = []
        for keys in map(self.layout.rollout, rollouts):
            wanted = (keys.rollout, keys.marks) if with_marks else (keys.rollout,)
            requests.append((keys.rollout, [("HGETALL", key) for key in wanted]))
        found = whole(await self._servers.execute_all(requests)) if requests else ()
        entities: list[tuple[StoredEntity, dict[str, bytes]] | None] = []
        for name, replies in zip(rollouts, found, strict=True):
            entity: Reply = checked(replies[0])
            own = {readable(mark): value for mark, value in pairs(checked(replies[-1]))} if with_marks else {}
            entities.append((decode_entity(name, entity), own) if entity else None)
        return entities

    async def list(self, *, cursor: str | None = None, limit: int = 100, since_ms: int | None = None) -> Page:
        """Return a page of rollout names, newest first; see `Listing.page`."""
        return await self.listing.page(cursor, limit, since_ms)

    def names(self) -> AsyncIterator[str]:
        """Iterate over all rollout names, newest first, in constant memory."""
        return self.listing.names()

    async def delete(self, rollout: str, *, touched_ms: int | None = None) -> bool:
        """Delete all data of a rollout; return whether it was deleted. Appends to its incarnation fail from then on.

        If `touched_ms` is given, a rollout that was touched at another time is not deleted.
        """
        expected = () if touched_ms is None else (touched_ms,)
        return bool(await self._write_unless_deleted(scripts.DELETE, rollout, 0, *expected, with_timers=True))

    async def set_once(self, name: str, value: bytes) -> bytes:
        """Set a constant of the whole store unless it has a value; return its value."""
        key = self.layout.constants
        commands = [("HSETNX", key, name, value), ("HGET", key, name), *self._barrier.commands]
        replies = await self._servers.execute(key, commands, confirmed=self._barrier.confirmed)
        checked(replies[0])
        stored: bytes = checked(replies[1])
        self._barrier.check(replies[2:])
        return stored

    def server_of(self, rollout: str) -> str:
        """Return the address of the server that has a rollout, as far as is known without a request."""
        return self._address(self.layout.rollout(rollout).rollout)

    @property
    def servers(self) -> set[str]:
        """The addresses of the servers that have a part of the store, as far as is known without a request."""
        return {self._address(bucket.probe) for bucket in self.layout.buckets}

    def _address(self, key: bytes) -> str:
        server = self._servers.server_of(key)
        return "" if server is None else server.address

    async def probe(self, server: str) -> None:
        """Write to the server at an address; return if it confirms the write, or has no part of the store any more."""
        key = next((bucket.probe for bucket in self.layout.buckets if self._address(bucket.probe) == server), None)
        if key is not None:
            commands: list[Command] = [("SET", key, 1, "PX", _PROBE_LIFETIME_MS), *self._barrier.commands]
            self._check(
                self._barrier, await self._servers.execute(key, commands, confirmed=self._barrier.confirmed), key
            )

    async def info(self) -> dict[str, str]:
        """Return facts for operators on the servers that respond; `unreachable` has the addresses of the others."""
        facts = {"durability": self._options.durability, "ttl_s": str(self._ttl_s or "none")}
        return facts | summarize(*await fetch_infos(await self._servers.all()))

    async def warnings(self) -> Sequence[ServerWarning]:
        """Return the problems of the servers and how to fix them."""
        return warnings_of(*await fetch_infos(await self._servers.all()))

    async def ping(self, timeout_s: float | None = None) -> dict[str, str | None]:
        """Return None for each server, by its address, that responds within the timeout, and for the others why not."""
        return await ping_each(await self._servers.all(), timeout_s)

    async def close(self) -> None:
        """Close all connections and stop the embedded server, if there is one."""
        await self.queue.close()
        await self._servers.close()
        if self._stop:
            await self._stop()

    async def _execute(self, key: bytes, command: Command) -> Reply:
        (reply,) = await self._servers.execute(key, [command])
        return checked(reply)

    def _write(self, script: Script, keys: RolloutKeys, now_ms: int, *arguments: bytes | str | int) -> Awaitable[Reply]:
        arguments = (keys.encoded, now_ms, self._ttl_s, *arguments)
        return self._run(self._scripts[script], (*keys.all, keys.indexes), arguments, durable=True)

    def _write_unless_deleted(
        self, script: Script, rollout: str, now_ms: int, *arguments: bytes | str | int, with_timers: bool = False
    ) -> Awaitable[Reply]:
        """Run a script that also gets the key of deleted incarnations, and the key of timers if it changes them."""
        keys = self.layout.rollout(rollout)
        all_keys = (*keys.all, keys.deleted, *((keys.timers,) if with_timers else ()), keys.indexes)
        arguments = (keys.encoded, now_ms, self._ttl_s, *arguments)
        return self._run(self._scripts[script], all_keys, arguments, durable=True)

    def _namespace(self, layout: Layout, ttl_s: int) -> "Store":
        return Store(self._servers, layout, replace(self._options, ttl_s=ttl_s or None, indexed={}), self._barrier)

    async def _run(
        self,
        script: Script,
        keys: Sequence[bytes],
        arguments: Sequence[bytes | str | int],
        *,
        durable: bool = False,
        shared: bool = True,
    ) -> Reply:
        """Run a script; if `durable`, followed by the barrier on the same connection. Not `shared`: on a pooled connection."""
        barrier = self._barrier if durable else _NO_BARRIER
        options = {
            "shared": shared and not barrier.commands,
            "confirmed": barrier.confirmed,
        }  # a barrier delays what follows
        command: Command = ("EVALSHA", script.sha, len(keys), *keys, *arguments)
        replies = await self._servers.execute(keys[0], (command, *barrier.commands), **options)
        if isinstance(replies[0], NoScriptError):
            command = script.as_eval(command)
            replies = await self._servers.execute(keys[0], (command, *barrier.commands), **options)
        try:
            if isinstance(replies[0], ResponseError):
                raise refused(replies[0]) from replies[0]
            if durable:
                barrier.check(replies[1:])
        except StoreUnreachable as error:
            error.server = self._address(keys[0])
            raise
        return replies[0]

    def _check(self, barrier: Barrier, replies: Sequence[Reply], key: bytes) -> None:
        try:
            checked(replies[0])
            barrier.check(replies[1:])
        except StoreUnreachable as error:
            error.server = self._address(key)
            raise

    async def _run_each(self, calls: Sequence[Call], *, durable: bool = False, shared: bool = True) -> Sequence[Reply]:
        """Run scripts, each in its bucket, as `_run` does, with one write to each server; return each reply or error."""
        barrier = self._barrier if durable else _NO_BARRIER
        commands: list[Command] = [("EVALSHA", script.sha, len(keys), *keys, *more) for script, keys, more in calls]
        send = partial(
            self._servers.execute_all,
            after=barrier.commands,
            shared=shared and not barrier.commands,
            confirmed=barrier.confirmed,
        )
        found = await send([(keys[0], [command]) for (_, keys, _), command in zip(calls, commands, strict=True)])
        unknown = [
            number for number, it in enumerate(found) if isinstance(it, list) and isinstance(it[0], NoScriptError)
        ]
        if unknown:
            again = [(calls[number][1][0], [calls[number][0].as_eval(commands[number])]) for number in unknown]
            for number, replies in zip(unknown, await send(again), strict=True):
                found[number] = replies
        return [replies if isinstance(replies, StorageError) else _checked(replies, barrier) for replies in found]


def _updated(rollout: str, reply: Reply) -> StoredEntity | FieldsChanged | None:
    if reply is None:
        return None
    is_updated, state = reply
    return decode_entity(rollout, state) if is_updated else FieldsChanged(decode_entity(rollout, state))


def _checked(replies: list[Reply], barrier: Barrier) -> Reply | StorageError:
    try:
        barrier.check(replies[1:])
        return checked(replies[0])
    except StorageError as error:
        return error


def _add_arguments(arguments: list[bytes | str | int], entry: StepWrite) -> None:
    created_ms, fields = ("", {}) if entry.origin is None else (entry.origin.created_ms, entry.origin.fields)
    required, blocks = entry.required_blocks, entry.blocks
    arguments += (entry.incarnation, entry.name, entry.record, len(required), len(blocks), entry.late_if or "")
    arguments += (created_ms, len(fields), *required)
    for block in blocks.items():
        arguments += block
    for prefix, values in (("f:", fields), ("n:", entry.counts), ("f:", entry.first)):
        for name, value in values.items():
            arguments += (prefix + name, value)


def _deleted(rollout: str) -> RolloutDeleted:
    return RolloutDeleted(f"rollout {rollout!r} was deleted after it was opened")
