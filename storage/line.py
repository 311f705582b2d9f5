"""A connection that many callers share.

Holds the `Line`: what callers ask in one turn of the event loop goes out in one write, and answers come back in order. It is
for short questions: whoever asks for much, or for something to be waited for, holds up those behind. It must not know what
is asked, and tries nothing twice.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from typing import Any, TypeAlias

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

Reply: TypeAlias = Any  # bytes, int, None, a list of those, or a ResponseError
_Asked = tuple[int, "asyncio.Future[list[Reply]]"]  # how many replies, and who waits for them


class Line:
    """One connection at a time, made when it is first needed, and made anew when it broke."""

    def __init__(self, make: Callable[[], AbstractConnection], timeout_s: float) -> None:
        self._make = make
        self._timeout_s = timeout_s
        self._talk: _Talk | None = None

    async def ask(self, packed: Sequence[bytes]) -> list[Reply]:
        """Send packed commands; one reply for each.

        Raises redis-py's ConnectionError if the line breaks first, and TimeoutError if the answer takes too long: then the
        line is given up, since what was asked behind would wait as long.
        """
        talk = self._talk
        if talk is None or talk.is_over:
            talk = self._talk = _Talk(self._make())
        answer = talk.ask(packed)
        late = answer.get_loop().call_later(self._timeout_s, talk.give_up, answer)
        try:
            return await answer
        finally:
            late.cancel()

    async def close(self) -> None:
        """Break it off."""
        if self._talk is not None:
            await self._talk.close()


class _Talk:
    """The life of one connection: a task that writes, and one that reads."""

    def __init__(self, connection: AbstractConnection) -> None:
        self._connection = connection
        self._outbox: list[bytes] = []
        self._waiting: deque[_Asked] = deque()
        self._said = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._live())
        self.is_over = False

    def ask(self, packed: Sequence[bytes]) -> "asyncio.Future[list[Reply]]":
        answer: asyncio.Future[list[Reply]] = self._loop.create_future()
        self._outbox += packed
        self._waiting.append((len(packed), answer))
        self._said.set()
        return answer

    def give_up(self, answer: "asyncio.Future[list[Reply]]") -> None:
        if not answer.done():
            answer.set_exception(TimeoutError())
        self.is_over = True
        self._task.cancel()

    async def close(self) -> None:
        self.is_over = True
        self._task.cancel()
        await asyncio.wait([self._task])

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
            if writing is not None:
                writing.cancel()
            with suppress(RedisError, OSError):
                await self._connection.disconnect(nowait=True)
            for _, answer in self._waiting:
                if not answer.done():
                    answer.set_exception(copy(error))  # each is raised by a task of its own

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
            count, answer = self._waiting[0]
            replies = [first, *[await read_reply(self._connection) for _ in range(count - 1)]]
            self._waiting.popleft()
            if not answer.done():
                answer.set_result(replies)


async def read_reply(connection: AbstractConnection) -> Reply:
    """One reply; a refusal is one too, so that those behind it on the line are read as well."""
    try:
        return await connection.read_response()
    except ResponseError as refusal:
        return refusal
