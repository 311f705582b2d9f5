"""The connections to one server, one that short commands share, and a pool for the others; and its replies, decoded.

redis-py opens connections (TLS, AUTH, SELECT) and parses replies. Its clients are not used: they take at least three times the
CPU time of these connections for each call (docs/decisions/143), fail instead of waiting when all connections are in use, and
cannot send a WAIT on the connection of its write in a cluster.

A write can be confirmed by a PING. Valkey and Redis write the append-only file before they send replies, but they send the
replies even if that write failed, and refuse only later writes and PING (MISCONF; Valkey 9.1, processCommand in server.c). So a
PING that is sent on the same connection after the reply, and answered with PONG, shows that the write is in the file.

Code outside `storage.redis` gets no exception of redis-py: errors become errors of the store, and flat replies values of
`storage.types`.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from copy import copy
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any, Final, TypeAlias

from hiredis import Reader, pack_command
from msgspec import Struct
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import (
    AuthenticationError,
    InvalidResponse,
    NoPermissionError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from storage.errors import StorageError, StoreUnreachable
from storage.options import StoreOptions
from storage.redis.scripts import Command
from storage.types import Announcement, StoredEntity

_RETRY_INTERVAL_S: Final = 0.02
_PROBE_TIMEOUT_S: Final = 1.0
_CLOSE_TIMEOUT_S: Final = 1.0
_PROBE_INTERVALS_S: Final = (0.05, 0.1, 0.25)  # the last one repeats
MANY_ARGUMENTS: Final = 2**13  # packing this many takes a millisecond
_MAX_SHARED_BYTES: Final = 2**18  # longer commands would delay those after them on the shared connection
_pack: Final[Callable[[Command], bytes]] = pack_command  # type: ignore[assignment] # the stub requires a 1-tuple
_PING: Final = _pack(("PING",))
_CHECKS: Final = 20  # checks for progress within the timeout
_CHECKS_OF_SUSPECTS: Final = 2  # after which a server is suspected
_INCOMPLETE: Final = object()  # instead of a reply

Reply: TypeAlias = Any  # bytes, int, None, a list of these, or a ResponseError
_Caller: TypeAlias = tuple["asyncio.Future[list[Reply]]", list[Reply]]  # who waits, and the replies that it has already
_Callers: TypeAlias = Sequence[_Caller]
Refresh: TypeAlias = Callable[[], Awaitable[None]]
Request: TypeAlias = tuple[bytes, Sequence[Command]]  # a key, and commands for the server that has it


@dataclass(frozen=True, slots=True)
class Barrier:
    """The commands that follow a write.

    `commands` (none or one) are sent in the same round trip as the write and must return at least `required` confirmations.
    `confirmed`: a PING in another round trip shows that the server wrote its append-only file.
    """

    commands: tuple[Command, ...] = ()
    required: int = 0
    confirmed: bool = False

    def check(self, replies: Sequence[Reply]) -> None:
        """Raise `StoreUnreachable` if there are too few confirmations. The write may be stored nevertheless."""
        for reply in replies:
            if reply == b"PONG":
                continue
            answer = checked(reply)
            # WAIT returns a number of replicas; WAITAOF the number of local disks (0 or 1) and of disks of replicas.
            count, unit = (answer[0], "disks") if isinstance(answer, list) else (answer, "replicas")
            if count < self.required:
                setting = f" (store.replicas: {self.required})" if unit == "replicas" else ""
                raise StoreUnreachable(
                    f"the write reached {count} of {self.required} {unit}{setting} before the timeout; retry: it may be stored "
                    "already, and is not stored twice"
                )


class Connections:
    """The connections to one server: a shared one for short commands, and a pool of up to `max_connections`.

    A long or blocking command would delay all after it on the shared connection. A pooled one is used by one caller at a time;
    further callers wait in order.

    If a connection breaks, its commands are sent once more on a new one, as all connections break when a server restarts. So
    all commands must be idempotent. If `patient`, commands are sent until `timeout_s` has passed, for a server that has
    responded before and is restarting or being replaced.

    After a command has failed, and a PING as well, the server is `unreachable`: commands fail at once with this reason, until a
    PING succeeds. `refresh` is called when a server is suspected, and before each PING: it requests which server has the keys
    now, and may call `retire`.
    """

    def __init__(
        self,
        make: Callable[[], AbstractConnection],
        address: str,
        options: StoreOptions,
        *,
        patient: bool = False,
        refresh: Refresh | None = None,
    ) -> None:
        self.address = address
        self.unreachable: str | None = None
        self._make = make
        self._timeout_s = options.timeout_s
        self._free = asyncio.Semaphore(options.max_connections)
        self._idle: list[_Session] = []
        self._session: _Session | None = None
        self._patient = patient
        self._refresh = refresh
        self._has_responded = False
        self._failure: str | None = None  # why a command failed
        self._probing: asyncio.Task[None] | None = None
        self._exchanges: set[asyncio.Timeout] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"<Connections to {self.address}, {len(self._idle)} idle>"

    @property
    def is_suspect(self) -> bool:
        """Whether connections broke, or replies are missing, and no PING has succeeded since."""
        return self._probing is not None and not self._probing.done()

    async def execute(
        self,
        key: bytes,
        commands: Sequence[Command],
        *,
        shared: bool = False,
        confirmed: bool = False,
        end: float | None = None,
    ) -> list[Reply]:
        """Send commands in one write on one connection; return one reply for each, including error replies.

        This server has every `key`. `shared`: use the shared connection, unless the commands are long; they must not block.
        `confirmed`: after the replies, send a PING on the same connection and add its reply, which is an error if the server
        could not write its append-only file. Raises `StoreUnreachable` if there is no reply within `timeout_s` (or at `end`, a
        time of the event loop), including the time to get a connection.
        """
        if self.unreachable is not None:
            raise StoreUnreachable(self.unreachable, self.address)
        is_long = sum(map(len, commands)) > MANY_ARGUMENTS
        parts = map(_pack, commands)
        packed = await asyncio.to_thread(b"".join, parts) if is_long else b"".join(parts)
        loop, session, attempt = asyncio.get_running_loop(), self._session, 1
        end = end or loop.time() + self._timeout_s
        is_shared = shared and len(packed) <= _MAX_SHARED_BYTES
        try:
            if is_shared and session is not None and not session.is_closed:  # the usual case, without another call
                result: asyncio.Future[list[Reply]] = loop.create_future()
                session.send(packed, len(commands), ((result, []),), confirmed=confirmed)
                try:
                    replies = await result
                except RedisConnectionError:
                    self._suspect()
                else:
                    self._has_responded = True
                    if not isinstance(replies[0], ReadOnlyError):
                        return replies
                attempt = 2
            return await self._send(packed, len(commands), end, attempt, shared=is_shared, confirmed=confirmed)
        except (RedisError, OSError) as error:
            failure = translated(error, self.address, self._timeout_s)
            if isinstance(failure, StoreUnreachable):
                self._failure = str(failure)
                self._suspect()
            raise failure from error

    async def _send(
        self, packed: bytes, count: int, end: float, attempt: int, *, shared: bool, confirmed: bool
    ) -> list[Reply]:
        """Send commands until there is a reply. Raises the error of redis-py after two attempts, or later if patient."""
        while not self._closed:
            if attempt > 1:  # also after a reply of a replica: the name may have the address of another server now
                await self._close_idle()
                await asyncio.sleep(_RETRY_INTERVAL_S * (attempt > 2))
            try:
                if shared:
                    session = self._session
                    if session is None or session.is_closed:
                        session = self._session = self._new_session()
                    replies = await session.exchange(packed, count, confirmed=confirmed)
                else:
                    replies = await self._pooled(packed, count, end, confirmed=confirmed)
            except RedisConnectionError as error:
                self._suspect()
                if isinstance(error, AuthenticationError) or (attempt > 1 and not self._is_restarting(end)):
                    raise
            else:
                self._has_responded = True
                if not isinstance(replies[0], ReadOnlyError) or attempt > 1:
                    return replies
            attempt += 1
        raise StoreUnreachable("the store is closed")

    def _is_restarting(self, end: float) -> bool:
        is_patient = self._patient and self._has_responded and self.unreachable is None
        return is_patient and asyncio.get_running_loop().time() < end - 2 * _RETRY_INTERVAL_S

    async def execute_all(
        self,
        requests: Sequence[Request],
        after: Sequence[Command] = (),
        *,
        shared: bool = False,
        confirmed: bool = False,
    ) -> "list[list[Reply] | StorageError]":
        """Send the commands of all requests in one write; return the replies of each request, or its error.

        `after` follows the last command; its replies are added to those of each request.
        """
        if not requests:
            return []
        commands = [command for _, own in requests for command in own]
        try:
            replies = await self.execute(b"", [*commands, *after], shared=shared, confirmed=confirmed)
        except StorageError as error:
            return [error] * len(requests)
        own, common = iter(replies), replies[len(commands) :]
        return [[*islice(own, len(sent)), *common] for _, sent in requests]

    async def divide(self, keys: Sequence[bytes]) -> "list[tuple[Connections, list[bytes]]]":
        """Return the server itself, with all keys."""
        return [(self, list(keys))]

    def server_of(self, key: bytes) -> "Connections":
        """Return the server itself: it is not a cluster."""
        return self

    async def all(self) -> "list[Connections]":
        """Return the server itself: it is not a cluster."""
        return [self]

    @asynccontextmanager
    async def subscribe(
        self, channels: Sequence[bytes], idle_timeout_s: float, *, by: str = "SSUBSCRIBE"
    ) -> AsyncIterator[AsyncIterator[bytes | None]]:
        """Subscribe on a dedicated connection. Iterates over messages, with None whenever none was received for this long.

        The channels are sharded ones of this server, unless `by` is another command. Raises `StoreUnreachable`, on entering or
        later, if the server cannot be reached, does not respond to a PING, or has a slot no longer.
        """
        connection = self._make()
        try:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await connection.connect()  # type: ignore[no-untyped-call]
                    commands = b"".join(_pack((by, channel)) for channel in channels)  # each of another slot
                    await connection.send_packed_command([commands], check_health=False)
                    for _ in channels:
                        checked(await _read_reply(connection))
            except (RedisError, OSError) as error:
                raise translated(error, self.address, self._timeout_s) from error
            yield self._messages(connection, idle_timeout_s)
        finally:
            with suppress(RedisError, OSError):
                await connection.disconnect(nowait=True)

    async def _messages(self, connection: AbstractConnection, idle_timeout_s: float) -> AsyncIterator[bytes | None]:
        was_pinged = False
        try:
            while True:
                try:
                    async with asyncio.timeout(idle_timeout_s):
                        message = await connection.read_response(disconnect_on_error=False)
                except TimeoutError:
                    if was_pinged:
                        raise
                    was_pinged = True
                    await connection.send_packed_command([_PING], check_health=False)
                    yield None
                    continue
                was_pinged = False
                if message[0] in {b"smessage", b"message"}:
                    yield message[2]
                elif message[0] == b"sunsubscribe":
                    raise RedisConnectionError("a slot was moved to another server")
        except (RedisError, OSError) as error:
            raise translated(error, self.address, idle_timeout_s) from error

    async def close(self) -> None:
        """Close the shared and the idle connections; those in use are closed when their callers have their replies."""
        self._closed = True
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.wait([self._probing])
        if self._session is not None:
            await self._session.close()
        await self._close_idle()

    def retire(self) -> None:
        """Break all connections: another server has the keys. Commands in flight raise `StoreUnreachable`."""
        self._closed = True
        for timeout in self._exchanges:
            if not timeout.expired():
                timeout.reschedule(0)
        if self._session is not None:
            self._session.abort(RedisConnectionError("another server has the keys"))

    def _suspect(self) -> None:
        """Probe the server, if that can change anything."""
        if (self._refresh or self._failure) and not self.is_suspect and not self._closed:
            self._probing = asyncio.get_running_loop().create_task(self._probe())

    async def _probe(self) -> None:
        intervals = chain(_PROBE_INTERVALS_S, repeat(_PROBE_INTERVALS_S[-1]))
        while not self._closed:
            if self._refresh is not None:
                await self._refresh()
            try:
                async with asyncio.timeout(_PROBE_TIMEOUT_S):
                    await self._exchange(_PING, 1, confirmed=False)
            except (RedisError, OSError):
                self.unreachable = self._failure
            else:
                self.unreachable = self._failure = None
                return
            await asyncio.sleep(next(intervals))

    async def _pooled(self, packed: bytes, count: int, end: float, *, confirmed: bool) -> list[Reply]:
        try:
            async with asyncio.timeout_at(end) as timeout:
                self._exchanges.add(timeout)
                async with self._free:
                    return await self._exchange(packed, count, confirmed=confirmed)
        finally:
            self._exchanges.discard(timeout)

    async def _exchange(self, packed: bytes, count: int, *, confirmed: bool) -> list[Reply]:
        session = self._idle.pop() if self._idle else None
        if session is None or session.is_closed:  # the server may have closed an idle one
            session = self._new_session()
        try:
            replies = await session.exchange(packed, count, confirmed=confirmed)
        except BaseException:
            # Also when cancelled: another caller must not wait for the replies that are still to be received.
            session.abort(RedisConnectionError("the caller has gone"))
            raise
        self._idle.append(session)
        if self._closed:
            await self._close_idle()
        return replies

    def _new_session(self) -> "_Session":
        return _Session(self._make(), self._timeout_s / _CHECKS, self._suspect)

    async def _close_idle(self) -> None:
        while self._idle:
            await self._idle.pop().close()


class _PendingReply(Struct):
    """The callers that wait for `count` replies. `sent_at` is the number of checks that had been made before it.

    A command has one caller, a PING all those that it confirms.
    """

    count: int
    confirmed: bool
    sent_at: int
    callers: _Callers


class _Session(asyncio.Protocol):
    """A connection, after redis-py has opened it: an asyncio protocol without a task or a stream in between.

    Commands that are sent in the same iteration of the event loop are one write. Nothing is retried.

    A timeout is a number of checks without progress rather than a time: while the event loop is blocked (thousands of calls at
    once), no reply can be read.
    """

    def __init__(
        self, connection: AbstractConnection, check_interval_s: float, suspect: Callable[[], None] = lambda: None
    ) -> None:
        self._connection = connection
        self._suspect = suspect  # called when replies are missing
        self._check_interval_s = check_interval_s
        self._transport: asyncio.WriteTransport | None = None  # None: not open yet
        self._outbox: list[bytes] = []  # commands for when it is open
        parse_error = connection._parser.parse_error  # noqa: SLF001 - redis-py's error classes, by the prefix of the reply
        self._reader = Reader(InvalidResponse, parse_error, notEnoughData=_INCOMPLETE)
        self._pending: deque[_PendingReply] = deque()
        self._replies: list[Reply] = []  # of the first pending command
        self._unconfirmed: list[_Caller] = []
        self._checks = 0
        self._checks_without_reply = 0
        self._next_check: asyncio.TimerHandle | None = None
        self._lost = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run())
        self.is_closed = False

    async def close(self) -> None:
        """Close the connection, and wait until its socket is closed: with TLS, when the server has confirmed it."""
        self._task.cancel()
        await asyncio.wait([self._task])
        if self._transport is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                    await self._lost.wait()

    async def exchange(self, packed: bytes, count: int, *, confirmed: bool) -> list[Reply]:
        """Send packed commands, and return one reply for each; see `send`."""
        result: asyncio.Future[list[Reply]] = self._loop.create_future()
        self.send(packed, count, ((result, []),), confirmed=confirmed)
        return await result

    def send(self, packed: bytes, count: int, callers: _Callers, *, confirmed: bool = False) -> None:
        """Send packed commands, and pass one reply for each to the callers.

        If `confirmed`, they get the reply of a PING that follows these as well. If the connection breaks, they get redis-py's
        ConnectionError, and TimeoutError if no reply to any caller is received within the timeout; then it is closed.
        """
        self._pending.append(_PendingReply(count, confirmed, self._checks, callers))
        if not self._outbox and self._transport is not None:
            self._loop.call_soon(self._flush)
        self._outbox.append(packed)
        if self._next_check is None:
            self._checks_without_reply = 0
            self._next_check = self._loop.call_later(self._check_interval_s, self._check)

    def _check(self) -> None:
        """Close the connection after a whole timeout without a reply.

        Callers that have waited for less than one interval get a ConnectionError, which can be retried, not a TimeoutError.
        """
        self._next_check = None
        if not self._pending:
            return
        self._checks += 1
        self._checks_without_reply += 1
        if self._checks_without_reply < _CHECKS:
            if self._checks_without_reply >= _CHECKS_OF_SUSPECTS:
                self._suspect()
            self._next_check = self._loop.call_later(self._check_interval_s, self._check)
            return
        for pending in self._pending:
            if pending.sent_at < self._checks - 1:
                _fail(pending.callers, TimeoutError())
        self.abort(RedisConnectionError("the connection was closed"))

    async def _run(self) -> None:
        """Connect, and keep the connection until it is closed or fails."""
        try:
            await self._connection.connect()  # type: ignore[no-untyped-call]
            await self._start()
            await self._loop.create_future()  # until `_task` is cancelled
        except (RedisError, OSError) as error:
            self._end(error)
        finally:
            self._end(RedisConnectionError("the connection was closed"))
            with suppress(RedisError, OSError):
                await self._connection.disconnect(nowait=True)

    async def _start(self) -> None:
        """Take the transport over from redis-py's connection, and send the outbox."""
        stream, writer = self._connection._reader, self._connection._writer  # noqa: SLF001 - redis-py 6.4 to 8.1
        if stream is None or writer is None or stream.at_eof():
            raise RedisConnectionError("the server closed the connection")
        self._transport = writer.transport
        self._transport.set_protocol(self)
        stream.feed_eof()
        early = await stream.read()  # without waiting; a server with too many clients sends an error at once
        self._flush()
        if early:
            self.data_received(early)

    def _flush(self) -> None:
        """Send the commands of one iteration of the event loop (16 busy clients: 0.4 writes per call; without this, 2.4)."""
        if self._outbox and self._transport is not None and not self.is_closed:
            self._transport.write(b"".join(self._outbox))
            self._outbox.clear()

    def data_received(self, data: bytes) -> None:
        """Pass the replies to the callers in order. Replies to a cancelled caller are dropped."""
        self._reader.feed(data)
        try:
            while not self.is_closed and (reply := self._reader.gets()) is not _INCOMPLETE:
                if isinstance(reply, RedisError):
                    self._check_usable(reply)
                if not self._pending:
                    raise RedisConnectionError("received a reply without a command")
                self._replies.append(reply)
                pending = self._pending[0]
                if len(self._replies) < pending.count:
                    continue
                del self._pending[0]
                replies, self._replies = self._replies, []
                self._checks_without_reply = 0
                for result, before in pending.callers:
                    if pending.confirmed:
                        self._unconfirmed.append((result, replies))
                    elif not result.done():
                        result.set_result([*before, *replies])
        except RedisError as error:
            self.abort(error)
        if self._unconfirmed:  # one PING for all commands with replies that were received together
            callers, self._unconfirmed = self._unconfirmed, []
            self.send(_PING, 1, callers)

    def _check_usable(self, reply: RedisError) -> None:
        if isinstance(reply, RedisConnectionError):  # after which a connection cannot be used (LOADING)
            raise reply
        if isinstance(reply, ReadOnlyError):
            self._loop.call_soon(self.abort, RedisConnectionError(f"READONLY {reply}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all callers that wait."""
        self._lost.set()
        self.abort(RedisConnectionError(str(exc) if exc else "the server closed the connection"))

    def abort(self, error: BaseException) -> None:
        """Close the connection and fail all callers that wait."""
        if not self.is_closed:
            self._end(error)
            self._task.cancel()

    def _end(self, error: BaseException) -> None:
        """Fail all callers that wait, once."""
        self.is_closed = True
        if self._next_check is not None:
            self._next_check.cancel()
        while self._pending:
            _fail(self._pending.popleft().callers, error)
        _fail(self._unconfirmed, error)
        self._unconfirmed.clear()


def _fail(callers: _Callers, error: BaseException) -> None:
    """Pass an error to the callers that wait: a copy, because each is raised in a task of its own."""
    for result, _ in callers:
        if not result.done():
            result.set_exception(copy(error))


async def _read_reply(connection: AbstractConnection) -> Reply:
    """Read one reply. An error reply is returned, not raised, so that the replies after it are read as well."""
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error


_LARGEST: Final = 2**63 - 1  # of HINCRBY
_LATEST_MS: Final = 253_402_300_799_999  # the end of the year 9999: later times are no dates
_TIME_DIGITS: Final = 15  # of the latest one
_DIGITS: Final = 18
_SHOWN: Final = 40  # bytes of a damaged value

# Prefixes of error replies after which a retry can succeed. redis-py removes some prefixes and uses an exception class instead.
_RETRYABLE_PREFIXES: Final = frozenset(
    {
        "BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MISCONF", "NOREPLICAS", "OOM", "READONLY", "TRYAGAIN", "UNBLOCKED",
    }
)  # fmt: skip
_PREFIX_BY_CLASS: Final = {
    "BusyLoadingError": "LOADING",
    "ClusterDownError": "CLUSTERDOWN",
    "MasterDownError": "MASTERDOWN",
    "OutOfMemoryError": "OOM",
    "ReadOnlyError": "READONLY",
    "TryAgainError": "TRYAGAIN",
}
_FIXES: Final = {
    "MISCONF": "make room on its disk; its log names the failure",
    "OOM": "raise maxmemory, or delete or archive rollouts",
    "READONLY": "use the address of the primary, or promote this server",
}


def translated(error: BaseException, address: str, timeout_s: float) -> StorageError:
    """Return the `StorageError` for an error of redis-py or of the connection to the server at `address`."""
    if isinstance(error, AuthenticationError | NoPermissionError):
        return StorageError(f"the store at {address} refused authentication: {error}; check username and password")
    if isinstance(error, RedisTimeoutError | TimeoutError):
        return StoreUnreachable(f"the store at {address} did not respond within {timeout_s:g} s", address)
    if isinstance(error, RedisConnectionError | OSError):
        return StoreUnreachable(f"the store at {address} cannot be reached: {error}", address)
    return StorageError(f"the server at {address} does not use the Redis protocol: {error}")


def checked(reply: Any) -> Any:
    """Return the reply. Raises a `StorageError` with the message of the server if it is an error reply."""
    if isinstance(reply, ResponseError):
        raise refused(reply) from reply
    return reply


def refused(reply: ResponseError) -> StorageError:
    """Return the `StorageError` for an error reply."""
    prefix = _PREFIX_BY_CLASS.get(type(reply).__name__)
    message = f"{prefix} {reply}" if prefix else str(reply)
    kind = message.partition(" ")[0]
    if kind in _RETRYABLE_PREFIXES:
        fix = f" ({_FIXES[kind]})" if kind in _FIXES else ""
        return StoreUnreachable(f"the store is not available: {message}{fix}")
    if isinstance(reply, NoPermissionError):
        return StorageError(f"the user of the store does not have a permission that TokenTape requires: {message}")
    return StorageError(f"the store returned an error: {message}")


def decode_entity(
    name: str,
    reply: Reply,
    *,
    new_incarnation: str | None = None,
    announcements: Reply = (),
    has_reservation: int | None = None,
) -> StoredEntity:
    """Decode a reply of HGETALL. The entity is `created` if its incarnation is `new_incarnation`.

    Invalid bytes are listed as damage and raise nothing: a reader of many entities needs the valid ones.
    """
    own: dict[bytes, bytes] = {}
    fields: dict[str, bytes] = {}
    counts: dict[str, int] = {}
    damaged: list[str] = []
    for key, value in zip(reply[::2], reply[1::2], strict=True):
        kind = key[:2]
        if kind == b"f:":
            fields[key[2:].decode(errors="backslashreplace")] = value
        elif kind == b"n:":
            count = key[2:].decode(errors="backslashreplace")
            is_count = len(value) <= _DIGITS and value.isdigit()
            counts[count] = int(value) if is_count else _number(f"count {count!r}", value, damaged)
        else:
            own[key] = value
    incarnation = own.get(b"birth", b"").decode(errors="backslashreplace")
    if not incarnation:
        damaged.append("its incarnation is missing")
    created, touched = own.get(b"created_ms", b""), own.get(b"touched_ms", b"")
    are_times = len(created) < _TIME_DIGITS > len(touched) and created.isdigit() and touched.isdigit()
    return StoredEntity(
        name,
        incarnation,
        created_ms=int(created) if are_times else _number("created_ms", created, damaged, _LATEST_MS),
        touched_ms=int(touched) if are_times else _number("touched_ms", touched, damaged, _LATEST_MS),
        fields=fields,
        counts=counts,
        created=incarnation == new_incarnation,
        announcements=decode_announcements(announcements) if announcements else {},
        has_reservation=None if has_reservation is None else bool(has_reservation),
        damage="; ".join(damaged) or None,
    )


def _number(name: str, value: bytes, damaged: list[str], largest: int = _LARGEST) -> int:
    """Return a stored number; 0 for anything else, which is added to `damaged`."""
    try:
        number = int(value)
    except ValueError:
        number = -1
    if 0 <= number <= largest:
        return number
    damaged.append(f"{name} is {value[:_SHOWN]!r}")
    return 0


def readable(name: bytes) -> str:
    """Return a name as text; bytes that are no text are escaped."""
    return name.decode(errors="backslashreplace")


def decode_announcements(reply: Reply) -> dict[str, Announcement]:
    """Decode a hash of announcements, which has a value and a number (`number:NAME`) for each name.

    An announcement with an unreadable number counts as absent, so that all others apply.
    """
    values = dict(pairs(reply))
    found = {}
    for name, value in values.items():
        number = values.get(b"number:" + name, b"")
        if number.isdigit() and len(number) <= _DIGITS:
            found[readable(name)] = Announcement(value, int(number))
    return found


def pairs(reply: Sequence[bytes]) -> Iterable[tuple[bytes, bytes]]:
    """Iterate over the pairs of a flat reply: name, value, name, value, …."""
    return zip(reply[::2], reply[1::2], strict=True)


def encode_optional(fields: Mapping[str, bytes | None]) -> Iterable[str | bytes]:
    """Encode fields as arguments of a script: `f:NAME`, then `=VALUE`, or an empty argument for None."""
    for name, value in fields.items():
        yield f"f:{name}"
        yield b"" if value is None else b"=" + value
