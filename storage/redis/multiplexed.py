"""A connection that many callers share.

Commands that callers send in one turn of the event loop go out in one write, and replies come back in order. It is for short
commands: a long or blocking one delays all that follow. It must not know what the commands mean, and retries nothing.

A write may have to be confirmed. Valkey and Redis write the append-only file before they send replies, but send them also
if that write failed, and only then refuse further writes, and PING (MISCONF; Valkey 9.1, processCommand in server.c). So a
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

Reply: TypeAlias = Any  # bytes, int, None, a list of those, or a ResponseError
CONFIRM: Final[bytes] = pack_command(("PING",))
_LOOKS: Final = 4  # within the time that an answer may take


class MultiplexedConnection:
    """One connection at a time, made when it is first needed, and made anew when it broke."""

    def __init__(self, make: Callable[[], AbstractConnection], timeout_s: float) -> None:
        self._make = make
        self._timeout_s = timeout_s
        self._talk: _Talk | None = None

    async def ask(self, packed: Sequence[bytes], *, confirmed: bool = False) -> list[Reply]:
        """Send packed commands; one reply for each, and if `confirmed` one more: that of the PING which followed them.

        Raises redis-py's ConnectionError if the line breaks first, and TimeoutError if nothing at all is answered for so
        long: then the line is given up.
        """
        talk = self._talk
        if talk is None or talk.is_over:
            talk = self._talk = _Talk(self._make(), self._timeout_s / _LOOKS)
        return await talk.ask(packed, confirmed=confirmed)

    async def close(self) -> None:
        """Break it off."""
        if self._talk is not None:
            await self._talk.close()


@dataclass(slots=True)
class _PendingReply:
    """A caller that waits for `count` replies (and a confirmation), and after which look its commands were sent."""

    count: int
    confirmed: bool
    look: int
    answer: "asyncio.Future[list[Reply]]"


class _Talk:
    """The life of one connection: a task that writes, one that reads, and looks at whether anything is read.

    Silence is counted in looks, not on the clock: while we stood still ourselves (thousands of calls at once), no answer
    could be read.
    """

    def __init__(self, connection: AbstractConnection, look_every_s: float) -> None:
        self._connection = connection
        self._look_every_s = look_every_s
        self._outbox: list[bytes] = []
        self._waiting: deque[_PendingReply] = deque()
        self._unconfirmed: list[tuple[asyncio.Future[list[Reply]], list[Reply]]] = []
        self._said = asyncio.Event()
        self._looks = 0
        self._silent = 0  # looks in a row before which nothing was read
        self._looking: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._live())
        self.is_over = False

    def ask(self, packed: Sequence[bytes], *, confirmed: bool = False) -> "asyncio.Future[list[Reply]]":
        answer: asyncio.Future[list[Reply]] = self._loop.create_future()
        self._outbox += packed
        self._waiting.append(_PendingReply(len(packed), confirmed, self._looks, answer))
        self._said.set()
        if self._looking is None:
            self._silent = 0
            self._looking = self._loop.call_later(self._look_every_s, self._look)
        return answer

    async def close(self) -> None:
        self.is_over = True
        self._task.cancel()
        await asyncio.wait([self._task])

    def _look(self) -> None:
        """Give the line up after a whole time without an answer. Those who asked since the last look may ask another."""
        self._looking = None
        if not self._waiting:
            return
        self._looks += 1
        self._silent += 1
        if self._silent < _LOOKS:
            self._looking = self._loop.call_later(self._look_every_s, self._look)
            return
        for asked in self._waiting:
            if asked.look < self._looks - 1 and not asked.answer.done():
                asked.answer.set_exception(TimeoutError())
        self.is_over = True
        self._task.cancel()

    async def _live(self) -> None:
        """Connect, then write and read until either fails; whoever waits then is told."""
        error: BaseException = RedisConnectionError("the connection was given up")
        writing: asyncio.Task[None] | None = None
        try:
            await self._connection.connect()  # type: ignore[no-untyped-call]
            writing = self._loop.create_task(self._write())
            await self._read()
        except (RedisError, OSError) as failed:
            error = failed
        finally:
            self.is_over = True
            if self._looking is not None:
                self._looking.cancel()
            if writing is not None:
                writing.cancel()
            with suppress(RedisError, OSError):
                await self._connection.disconnect(nowait=True)
            for asked in self._waiting:
                if not asked.answer.done():
                    asked.answer.set_exception(copy(error))  # each is raised by a task of its own

    async def _write(self) -> None:
        """Send what was said since the last time. A failure is the reader's to notice: the connection is closed then."""
        with suppress(RedisError, OSError):
            while True:
                await self._said.wait()
                self._said.clear()
                outbox, self._outbox = self._outbox, []
                await self._connection.send_packed_command(outbox, check_health=False)

    async def _read(self) -> None:
        """Give everybody their replies. One who has left was in the line all the same: theirs are read and dropped."""
        while True:
            first = await read_reply(self._connection)
            if not self._waiting:
                raise RedisConnectionError("it said something that nobody had asked for")
            asked = self._waiting[0]
            replies = [first, *[await read_reply(self._connection) for _ in range(asked.count - 1)]]
            self._waiting.popleft()
            self._silent = 0
            if asked.answer.done():
                continue
            if asked.confirmed:
                if not self._unconfirmed:
                    self._loop.call_soon(self._confirm)
                self._unconfirmed.append((asked.answer, replies))
            else:
                asked.answer.set_result(replies)

    def _confirm(self) -> None:
        """Send one PING for all callers whose replies were read in this turn of the event loop."""
        unconfirmed, self._unconfirmed = self._unconfirmed, []
        if self.is_over:  # what was sent now would never be answered
            for answer, _ in unconfirmed:
                if not answer.done():
                    answer.set_exception(RedisConnectionError("the connection was given up"))
        else:
            self.ask([CONFIRM]).add_done_callback(partial(_settle, unconfirmed))


def _settle(
    unconfirmed: Sequence[tuple["asyncio.Future[list[Reply]]", list[Reply]]], said: "asyncio.Future[list[Reply]]"
) -> None:
    """Give callers their replies with the confirmation behind them, or the error that came instead of it."""
    error = said.exception()
    for answer, replies in unconfirmed:
        if answer.done():
            continue
        if error is None:
            answer.set_result([*replies, *said.result()])
        else:
            answer.set_exception(copy(error))


async def read_reply(connection: AbstractConnection) -> Reply:
    """One reply; a refusal is one too, so that those behind it on the line are read as well."""
    try:
        return await connection.read_response()
    except ResponseError as refusal:
        return refusal
