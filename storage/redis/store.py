"""The store over the Redis protocol.

Holds `RedisStore`, which turns the verbs of `Store` into commands and replies into values. What must be atomic is in
`scripts`, what keys are called in `keys`, how servers are reached in `connections` and `cluster`. Every verb may safely
be done twice, so a round trip whose answer was lost is repeated once; the price is that an `amend` whose first try was
done may find its own work and raise `FieldsChanged`, which says how the rollout stands.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from secrets import token_hex
from typing import Final

from redis.exceptions import NoScriptError

from storage.errors import FieldsChanged, MissingBlocks, RolloutDeleted, RolloutExpired
from storage.options import StoreOptions
from storage.redis import scripts
from storage.redis.announcements import RedisAnnouncements, RedisReservations
from storage.redis.changes import RedisChanges
from storage.redis.connections import Servers
from storage.redis.decoding import optional_pairs, pairs, read_rollout
from storage.redis.durability import Barrier
from storage.redis.errors import checked
from storage.redis.keys import (
    BATCHES,
    GROUPS,
    RolloutKeys,
    announcements_key,
    bucket_for,
    constants_key,
    deleted_key,
    rollout_keys,
)
from storage.redis.listing import RedisListing
from storage.redis.multiplexed import Reply
from storage.redis.queue import RedisQueue
from storage.redis.scripts import Command, Script
from storage.redis.server_info import fetch_info, summarize
from storage.types import Appended, FullRollout, Page, Reservation, ServerWarning, StepWrite, StoredEntity

_DELETED, _EXPIRED, _MISSING = -1, -2, -3  # what an append found
_BATCH_TTL_S: Final = 7 * 86_400


class RedisStore:
    """Rollouts in a Redis or Valkey server, or a cluster of them. `stop` is awaited at the end of `close`."""

    def __init__(
        self,
        servers: Servers,
        options: StoreOptions,
        barrier: Barrier,
        stop: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._servers = servers
        self._prefix = options.prefix
        self._ttl_s = options.ttl_s or 0
        self._durability = options.durability
        self._barrier = barrier
        self._stop = stop
        self._spaces: dict[str, RedisStore] = {}
        self._listing = RedisListing(self._loosely, options.prefix)
        self.announcements = RedisAnnouncements(self._durably, options.prefix, run_fast=self._swiftly)
        self.reservations = RedisReservations(self._swiftly, options.prefix)
        self.changes = RedisChanges(servers, options.prefix)
        self.queue = RedisQueue(self._durably, options.prefix, self._ttl_s)

    def __repr__(self) -> str:
        return f"<RedisStore {self._servers!r}>"

    async def open(
        self, rollout: str, fields: Mapping[str, bytes], *, now_ms: int, reservation: Reservation | None = None
    ) -> StoredEntity:
        """Give back the rollout of this name, making it with `fields` if there is none. One round trip."""
        incarnation = token_hex(8)
        pairs = (part for name, value in fields.items() for part in (f"f:{name}", value))
        keys = rollout_keys(self._prefix, rollout)
        every = (*keys.all(), announcements_key(self._prefix, bucket_for(rollout)))
        arguments = (keys.encoded, now_ms, self._ttl_s, incarnation, *(reservation or ("", 0)), *pairs)
        reply, announcements, has_reservation = await self._durably(scripts.OPEN, every, arguments)
        return read_rollout(
            rollout, reply, own_incarnation=incarnation, announcements=announcements, has_reservation=has_reservation
        )

    @property
    def ttl_s(self) -> int | None:
        """For how long a rollout lives that nothing is written to."""
        return self._ttl_s or None

    @property
    def groups(self) -> "RedisStore":
        """The groups of this store."""
        return self._space(GROUPS, self._ttl_s)

    @property
    def batches(self) -> "RedisStore":
        """The batches of this store."""
        return self._space(BATCHES, min(self._ttl_s or _BATCH_TTL_S, _BATCH_TTL_S))

    def same_slot(self, group: str, rollout: str) -> bool:
        """Whether a group and a rollout of these names can be opened together."""
        return bucket_for(group) == bucket_for(rollout)

    async def open_group(
        self,
        group: str,
        fields: Mapping[str, bytes],
        rollouts: Mapping[str, Mapping[str, bytes]],
        *,
        now_ms: int,
    ) -> StoredEntity:
        """Make a group and its rollouts, all with their fields, at once or not at all; give back the group."""
        if not all(self.same_slot(group, rollout) for rollout in rollouts):
            raise ValueError("a rollout of the group is not beside it")
        incarnation = token_hex(8)
        made = [(rollout_keys(self._prefix + GROUPS, group), incarnation, fields)]
        made += [(rollout_keys(self._prefix, rollout), token_hex(8), its) for rollout, its in rollouts.items()]
        keys = [key for one, _, _ in made for key in one.all()]
        arguments: list[bytes | str | int] = [now_ms, self._ttl_s, len(made)]
        for one, its_incarnation, its_fields in made:
            arguments += [one.encoded, its_incarnation, len(its_fields)]
            arguments += [part for name, value in its_fields.items() for part in (f"f:{name}", value)]
        reply = await self._durably(scripts.OPEN_GROUP, keys, arguments)
        return read_rollout(group, reply, own_incarnation=incarnation)

    async def get(self, rollout: str) -> StoredEntity | None:
        """The rollout of this name, or None. Makes nothing."""
        key = rollout_keys(self._prefix, rollout).rollout
        reply = await self._ask(key, ("HGETALL", key))
        return read_rollout(rollout, reply) if reply else None

    async def update_if(
        self,
        rollout: str,
        fields: Mapping[str, bytes | None],
        *,
        expect: Mapping[str, bytes | None],
        now_ms: int,
    ) -> StoredEntity | None:
        """Set fields (None removes one), if all of `expect` hold (None: absent); give back the rollout as it is then."""
        arguments = (*optional_pairs(expect), *optional_pairs(fields))
        reply = await self._write(
            scripts.UPDATE_IF, rollout_keys(self._prefix, rollout), now_ms, len(expect), *arguments
        )
        if reply is None:
            return None
        was_done, stands = reply
        if not was_done:
            raise FieldsChanged(read_rollout(rollout, stands))
        return read_rollout(rollout, stands)

    async def append(self, entry: StepWrite, *, now_ms: int) -> Appended:
        """Store a record with its blocks and counts, all or nothing, as durably as the store is set to."""
        created_ms, fields = ("", {}) if entry.origin is None else (entry.origin.created_ms, entry.origin.fields)
        reply = await self._write_knowing(
            scripts.APPEND,
            entry.rollout,
            now_ms,
            entry.incarnation,
            entry.name,
            entry.record,
            len(entry.required_blocks),
            len(entry.blocks),
            entry.late_if or "",
            created_ms,
            len(fields),
            *entry.required_blocks,
            *(part for block in entry.blocks.items() for part in block),
            *(part for name, value in fields.items() for part in (f"f:{name}", value)),
            *(part for name, number in entry.counts.items() for part in (f"n:{name}", number)),
        )
        if reply[0] == _MISSING:
            raise MissingBlocks(reply[1:])
        if reply[0] == _EXPIRED:
            raise RolloutExpired(f"rollout {entry.rollout!r} has expired since it was opened")
        if reply[0] == _DELETED:
            raise _gone(entry.rollout)
        position, is_late, is_restored = reply
        return Appended(position, bool(is_late), bool(is_restored))

    async def mark(self, rollout: str, incarnation: str, marks: Mapping[str, bytes], *, now_ms: int) -> None:
        """Set small facts learnt after a record was stored. Raises `RolloutDeleted`."""
        pairs = (part for mark in marks.items() for part in mark)
        if await self._write_knowing(scripts.MARK, rollout, now_ms, incarnation, *pairs) < 0:
            raise _gone(rollout)

    async def renew(self, rollout: str, incarnation: str | None) -> bool:
        """Begin the lifetime of a rollout anew; whether that life of it is there."""
        keys = rollout_keys(self._prefix, rollout)
        return bool(await self._swiftly(scripts.RENEW, keys.all(), (keys.encoded, 0, self._ttl_s, incarnation or "")))

    async def marks(self, rollout: str, names: Sequence[str] | None = None) -> dict[str, bytes]:
        """The marks of these names that exist; all marks of the rollout when `names` is None."""
        key = rollout_keys(self._prefix, rollout).marks
        if names is not None:
            values = await self._ask(key, ("HMGET", key, *names)) if names else ()
            return {name: value for name, value in zip(names, values, strict=True) if value is not None}
        return {name.decode(): value for name, value in pairs(await self._ask(key, ("HGETALL", key)))}

    async def read(self, rollout: str, start: int, limit: int) -> list[bytes]:
        """Up to `limit` records from index `start` on, in the order they were appended."""
        if start < 0 or limit <= 0:  # Redis would count from the end
            return []
        key = rollout_keys(self._prefix, rollout).records
        records: list[bytes] = await self._ask(key, ("LRANGE", key, start, start + limit - 1))
        return records

    async def read_all(self, rollout: str, limit: int) -> FullRollout | None:
        """Up to `limit` records and all else of a rollout, in one round trip; None if there is no such rollout."""
        keys = rollout_keys(self._prefix, rollout)
        asked: list[Command] = [("LRANGE", keys.records, 0, max(1, limit) - 1)]
        asked += [("HGETALL", key) for key in (keys.blocks, keys.marks, keys.rollout)]
        records, blocks, marks, found = map(checked, await self._servers.ask(keys.rollout, asked))
        if not found:
            return None
        named = {name.decode(): value for name, value in pairs(marks)}
        return FullRollout(read_rollout(rollout, found), records, dict(pairs(blocks)), named)

    async def find(self, rollout: str, name: str) -> tuple[int, bytes] | None:
        """The index and the record of this name, or None."""
        keys = rollout_keys(self._prefix, rollout)
        reply = await self._run(scripts.FIND, keys.all(), (keys.encoded, 0, 0, name), Barrier())
        return (reply[0], reply[1]) if reply else None

    async def blocks(self, rollout: str, names: Sequence[bytes] | None = None) -> dict[bytes, bytes]:
        """The blocks of these names that exist; all blocks of the rollout when `names` is None."""
        key = rollout_keys(self._prefix, rollout).blocks
        if names is None:
            return dict(pairs(await self._ask(key, ("HGETALL", key))))
        if not names:
            return {}
        blocks = await self._ask(key, ("HMGET", key, *names))
        return {name: block for name, block in zip(names, blocks, strict=True) if block is not None}

    async def list(self, *, cursor: str | None = None, limit: int = 100, since_ms: int | None = None) -> Page:
        """Rollout names, newest first. Raises `ValueError` for a cursor that is not one of ours."""
        return await self._listing.page(cursor, limit, since_ms)

    def names(self) -> AsyncIterator[str]:
        """All rollout names, newest first, in constant memory."""
        return self._listing.names()

    async def delete(self, rollout: str) -> bool:
        """Delete everything of a rollout; whether there was anything. Appends under its incarnation fail from then on."""
        return bool(await self._write_knowing(scripts.DELETE, rollout, 0))

    async def set_once(self, name: str, value: bytes) -> bytes:
        """Set a constant of the whole store if it is not set yet; give back what holds."""
        key = constants_key(self._prefix)
        commands = [("HSETNX", key, name, value), ("HGET", key, name), *self._barrier.commands]
        replies = await self._servers.ask(key, commands, confirmed=self._barrier.confirmed)
        checked(replies[0])
        holds: bytes = checked(replies[1])
        self._barrier.check(replies[2:])
        return holds

    async def info(self) -> dict[str, str]:
        """What is there: server, version, durability, and anything an operator should know. Reaches the store."""
        servers = [await fetch_info(server) for server in await self._servers.all()]
        return {"durability": self._durability, "ttl_s": str(self._ttl_s or "none"), **summarize(servers)}

    async def warnings(self) -> Sequence[ServerWarning]:
        """What speaks against the servers, each with what to do about it. Reaches the store."""
        return [warning for server in await self._servers.all() for warning in (await fetch_info(server)).warnings]

    async def ping(self) -> None:
        """Return if the store answers; else raise `StoreUnreachable`."""
        for server in await self._servers.all():
            (reply,) = await server.ask([("PING",)])
            checked(reply)

    async def close(self) -> None:
        """Let go of connections; for an embedded store, stop its server cleanly."""
        await self._servers.close()
        if self._stop:
            await self._stop()

    async def _ask(self, key: bytes, command: Command) -> Reply:
        (reply,) = await self._servers.ask(key, [command])
        return checked(reply)

    async def _write(self, script: Script, keys: RolloutKeys, now_ms: int, *arguments: bytes | str | int) -> Reply:
        return await self._durably(script, keys.all(), (keys.encoded, now_ms, self._ttl_s, *arguments))

    async def _write_knowing(self, script: Script, rollout: str, now_ms: int, *arguments: bytes | str | int) -> Reply:
        """Write as `_write` does, by a script that gets the births of deleted rollouts as well."""
        keys = rollout_keys(self._prefix, rollout)
        every = (*keys.all(), deleted_key(self._prefix, bucket_for(rollout)))
        return await self._durably(script, every, (keys.encoded, now_ms, self._ttl_s, *arguments))

    def _space(self, name: str, ttl_s: int) -> "RedisStore":
        if name not in self._spaces:
            options = StoreOptions(self._prefix + name, ttl_s or None, self._durability)
            self._spaces[name] = RedisStore(self._servers, options, self._barrier)
        return self._spaces[name]

    async def _durably(self, script: Script, keys: Sequence[bytes], arguments: Sequence[bytes | str | int]) -> Reply:
        # What a barrier waits for, all behind it on a line would wait for.
        return await self._run(script, keys, arguments, self._barrier, shared=not self._barrier.commands)

    async def _swiftly(self, script: Script, keys: Sequence[bytes], arguments: Sequence[bytes | str | int]) -> Reply:
        return await self._run(script, keys, arguments, Barrier(), shared=True)

    async def _loosely(self, script: Script, keys: Sequence[bytes], arguments: Sequence[bytes | str | int]) -> Reply:
        return await self._run(script, keys, arguments, Barrier())

    async def _run(
        self,
        script: Script,
        keys: Sequence[bytes],
        arguments: Sequence[bytes | str | int],
        barrier: Barrier,
        *,
        shared: bool = False,
    ) -> Reply:
        """Run a script, and wait for the barrier behind it on the same connection."""
        command = script.call(keys, arguments)
        ask = partial(self._servers.ask, keys[0], shared=shared, confirmed=barrier.confirmed)
        reply, *said = await ask([command, *barrier.commands])
        if isinstance(reply, NoScriptError):
            reply, *said = await ask([script.teach(command), *barrier.commands])
        reply = checked(reply)
        barrier.check(said)
        return reply


def _gone(rollout: str) -> RolloutDeleted:
    return RolloutDeleted(f"rollout {rollout!r} was deleted since it was opened")
