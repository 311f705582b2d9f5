"""A connection that many callers share.

redis-py opens it (TLS, AUTH, SELECT). Then an asyncio protocol sends the commands and passes the replies to the callers in
order, without a task or a stream in between. Commands that are executed in the same iteration of the event loop are sent in
one write. It is for short commands: a long or blocking command delays all commands after it. Nothing is retried.

A write can be confirmed by a PING. Valkey and Redis write the append-only file before they send replies, but they send the
replies even if that write failed, and refuse only later writes and PING (MISCONF; Valkey 9.1, processCommand in server.c). So a
PING that is sent on the same connection after the reply, and answered with PONG, shows that the write is in the file.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from hiredis import Reader, pack_command
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, RedisError, ResponseError

Reply: TypeAlias = Any  # bytes, int, None, a list of these, or a ResponseError
PING: Final[bytes] = pack_command(("PING",))
_CHECKS: Final = 4  # checks for progress within the timeout
_INCOMPLETE: Final = object()  # instead of a reply


class MultiplexedConnection:
    """One connection at a time: opened by the first command, and reopened by the first command after it broke."""

    def __init__(self, make: Callable[[], AbstractConnection], timeout_s: float) -> None:
        self._make = make
        self._timeout_s = timeout_s
        self._session: _Session | None = None

    def execute(self, packed: Sequence[bytes], *, confirmed: bool = False) -> "asyncio.Future[list[Reply]]":
        """Send packed commands; return one reply for each and, if `confirmed`, the reply of a PING that follows them.

        Raises redis-py's ConnectionError if the connection breaks, and TimeoutError if no reply to any caller is received
        within the timeout; then the connection is closed.
        """
        session = self._session
        if session is None or session.is_closed:
            session = self._session = _Session(self._make(), self._timeout_s / _CHECKS)
        return session.execute(packed, confirmed=confirmed)

    async def close(self) -> None:
        """Close the connection."""
        if self._session is not None:
            await self._session.close()


@dataclass(slots=True)
class _PendingReply:
    """The callers that wait for `count` replies, each with the replies that it has already.

    `sent_at` is the number of checks that had been made before it. A command has one caller, a PING all those it confirms.
    """

    count: int
    confirmed: bool
    sent_at: int
    callers: "Sequence[tuple[asyncio.Future[list[Reply]], list[Reply]]]"

    def fail(self, error: BaseException) -> None:
        """Pass an error to the callers that wait: a copy, because each is raised in a task of its own."""
        for result, _ in self.callers:
            if not result.done():
                result.set_exception(copy(error))


class _Session(asyncio.Protocol):
    """One open connection.

    A timeout is a number of checks without progress rather than a time: while the event loop is blocked (thousands of calls at
    once), no reply can be read.
    """

    def __init__(self, connection: AbstractConnection, check_interval_s: float) -> None:
        self._connection = connection
        self._check_interval_s = check_interval_s
        self._transport: asyncio.WriteTransport | None = None  # None: not open yet
        self._outbox: list[bytes] = []  # commands for when it is open
        parse_error = connection._parser.parse_error  # noqa: SLF001 - redis-py's error classes, by the prefix of the reply
        self._reader = Reader(InvalidResponse, parse_error, notEnoughData=_INCOMPLETE)
        self._pending: deque[_PendingReply] = deque()
        self._replies: list[Reply] = []  # of the first pending command
        self._unconfirmed: list[tuple[asyncio.Future[list[Reply]], list[Reply]]] = []
        self._checks = 0
        self._checks_without_reply = 0
        self._next_check: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run())
        self.is_closed = False

    def execute(self, packed: Sequence[bytes], *, confirmed: bool = False) -> "asyncio.Future[list[Reply]]":
        result: asyncio.Future[list[Reply]] = self._loop.create_future()
        self._send(packed, _PendingReply(len(packed), confirmed, self._checks, ((result, []),)))
        return result

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    def _send(self, packed: Sequence[bytes], pending: _PendingReply) -> None:
        self._pending.append(pending)
        if not self._outbox and self._transport is not None:
            self._loop.call_soon(self._flush)
        self._outbox += packed
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
            self._next_check = self._loop.call_later(self._check_interval_s, self._check)
            return
        for pending in self._pending:
            if pending.sent_at < self._checks - 1:
                pending.fail(TimeoutError())
        self._abort(RedisConnectionError("the connection was closed"))

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
                self._receive(reply)
        except RedisError as error:
            self._abort(error)
        if self._unconfirmed:
            self._confirm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all callers that wait."""
        self._abort(RedisConnectionError(str(exc) if exc else "the server closed the connection"))

    def _receive(self, reply: Reply) -> None:
        """Handle a reply. Raises redis-py's ConnectionError for replies after which a connection cannot be used (LOADING)."""
        if isinstance(reply, RedisConnectionError):
            raise reply
        if not self._pending:
            raise RedisConnectionError("received a reply without a command")
        pending = self._pending[0]
        self._replies.append(reply)
        if len(self._replies) < pending.count:
            return
        self._pending.popleft()
        replies, self._replies = self._replies, []
        self._checks_without_reply = 0
        for result, before in pending.callers:
            if result.done():
                continue
            if pending.confirmed:
                self._unconfirmed.append((result, replies))
            else:
                result.set_result([*before, *replies])

    def _confirm(self) -> None:
        """Send one PING for all callers whose replies were received together."""
        ping = _PendingReply(1, confirmed=False, sent_at=self._checks, callers=self._unconfirmed)
        self._unconfirmed = []
        if self.is_closed:  # it would never be answered
            ping.fail(RedisConnectionError("the connection was closed"))
        else:
            self._send([PING], ping)

    def _abort(self, error: BaseException) -> None:
        """Close the connection because of an error."""
        if not self.is_closed:
            self._end(error)
            self._task.cancel()

    def _end(self, error: BaseException) -> None:
        """Fail all callers that wait, once."""
        self.is_closed = True
        if self._next_check is not None:
            self._next_check.cancel()
        while self._pending:
            self._pending.popleft().fail(error)


async def read_reply(connection: AbstractConnection) -> Reply:
    """Read one reply. An error reply is returned, not raised, so that the replies after it are read as well."""
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error
