"""A connection that many callers share.

Commands that are executed in the same iteration of the event loop are sent in one write, and replies are received in order. It
is for short commands: a long or blocking command delays all commands after it. Nothing is retried.

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
from functools import partial
from typing import Any, Final, TypeAlias

from hiredis import pack_command
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

Reply: TypeAlias = Any  # bytes, int, None, a list of these, or a ResponseError
PING: Final[bytes] = pack_command(("PING",))
_CHECKS: Final = 4  # checks for progress within the timeout


class MultiplexedConnection:
    """One connection at a time: opened by the first command, and reopened by the first command after it broke."""

    def __init__(self, make: Callable[[], AbstractConnection], timeout_s: float) -> None:
        self._make = make
        self._timeout_s = timeout_s
        self._session: _Session | None = None

    async def execute(self, packed: Sequence[bytes], *, confirmed: bool = False) -> list[Reply]:
        """Send packed commands; return one reply for each and, if `confirmed`, the reply of a PING that follows them.

        Raises redis-py's ConnectionError if the connection breaks, and TimeoutError if no reply to any caller is received
        within the timeout; then the connection is closed.
        """
        session = self._session
        if session is None or session.is_closed:
            session = self._session = _Session(self._make(), self._timeout_s / _CHECKS)
        return await session.execute(packed, confirmed=confirmed)

    async def close(self) -> None:
        """Close the connection."""
        if self._session is not None:
            await self._session.close()


@dataclass(slots=True)
class _PendingReply:
    """A caller that waits for `count` replies; `sent_at` is the number of checks that had been made before it."""

    count: int
    confirmed: bool
    sent_at: int
    result: "asyncio.Future[list[Reply]]"


class _Session:
    """One open connection, with one task that writes and one that reads.

    A timeout is a number of checks without progress rather than a time: while the event loop is blocked (thousands of calls at
    once), no reply can be read.
    """

    def __init__(self, connection: AbstractConnection, check_interval_s: float) -> None:
        self._connection = connection
        self._check_interval_s = check_interval_s
        self._outbox: list[bytes] = []
        self._pending: deque[_PendingReply] = deque()
        self._unconfirmed: list[tuple[asyncio.Future[list[Reply]], list[Reply]]] = []
        self._has_output = asyncio.Event()
        self._checks = 0
        self._checks_without_reply = 0
        self._next_check: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run())
        self.is_closed = False

    def execute(self, packed: Sequence[bytes], *, confirmed: bool = False) -> "asyncio.Future[list[Reply]]":
        result: asyncio.Future[list[Reply]] = self._loop.create_future()
        self._outbox += packed
        self._pending.append(_PendingReply(len(packed), confirmed, self._checks, result))
        self._has_output.set()
        if self._next_check is None:
            self._checks_without_reply = 0
            self._next_check = self._loop.call_later(self._check_interval_s, self._check)
        return result

    async def close(self) -> None:
        self.is_closed = True
        self._task.cancel()
        await asyncio.wait([self._task])

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
            if pending.sent_at < self._checks - 1 and not pending.result.done():
                pending.result.set_exception(TimeoutError())
        self.is_closed = True
        self._task.cancel()

    async def _run(self) -> None:
        """Connect, then write and read until either fails; then fail all pending replies."""
        error: BaseException = RedisConnectionError("the connection was closed")
        writing: asyncio.Task[None] | None = None
        try:
            await self._connection.connect()  # type: ignore[no-untyped-call]
            writing = self._loop.create_task(self._write())
            await self._read()
        except (RedisError, OSError) as failure:
            error = failure
        finally:
            self.is_closed = True
            if self._next_check is not None:
                self._next_check.cancel()
            if writing is not None:
                writing.cancel()
            with suppress(RedisError, OSError):
                await self._connection.disconnect(nowait=True)
            for pending in self._pending:
                if not pending.result.done():
                    pending.result.set_exception(copy(error))  # a copy: each is raised in a task of its own

    async def _write(self) -> None:
        """Send the outbox whenever it has commands. A failure closes the connection, which the reader handles."""
        with suppress(RedisError, OSError):
            while True:
                await self._has_output.wait()
                self._has_output.clear()
                outbox, self._outbox = self._outbox, []
                await self._connection.send_packed_command(outbox, check_health=False)

    async def _read(self) -> None:
        """Pass replies to the callers in order. Replies to a cancelled caller are read and dropped."""
        while True:
            first = await read_reply(self._connection)
            if not self._pending:
                raise RedisConnectionError("received a reply without a command")
            pending = self._pending[0]
            replies = [first, *[await read_reply(self._connection) for _ in range(pending.count - 1)]]
            self._pending.popleft()
            self._checks_without_reply = 0
            if pending.result.done():
                continue
            if pending.confirmed:
                if not self._unconfirmed:
                    self._loop.call_soon(self._confirm)
                self._unconfirmed.append((pending.result, replies))
            else:
                pending.result.set_result(replies)

    def _confirm(self) -> None:
        """Send one PING for all callers whose replies were read in this iteration of the event loop."""
        unconfirmed, self._unconfirmed = self._unconfirmed, []
        if self.is_closed:  # a PING sent now would never be answered
            for result, _ in unconfirmed:
                if not result.done():
                    result.set_exception(RedisConnectionError("the connection was closed"))
        else:
            self.execute([PING]).add_done_callback(partial(_resolve, unconfirmed))


def _resolve(
    unconfirmed: Sequence[tuple["asyncio.Future[list[Reply]]", list[Reply]]], pong: "asyncio.Future[list[Reply]]"
) -> None:
    """Pass the replies and the reply of the PING to the callers, or the error that occurred instead."""
    error = pong.exception()
    for result, replies in unconfirmed:
        if result.done():
            continue
        if error is None:
            result.set_result([*replies, *pong.result()])
        else:
            result.set_exception(copy(error))


async def read_reply(connection: AbstractConnection) -> Reply:
    """Read one reply. An error reply is returned, not raised, so that the replies after it are read as well."""
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error
