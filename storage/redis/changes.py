"""Notifications about changes of rollouts, which the scripts publish on the server of the rollout.

They are sharded: a primary of a cluster sends a message to its replicas only (docs/decisions/146).
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final, TypeAlias
from urllib.parse import unquote

from redis.exceptions import ResponseError

from storage.errors import StorageError, StoreUnreachable
from storage.redis.cluster import Servers
from storage.redis.keys import Layout
from storage.types import Change

_IDLE_TIMEOUT_S: Final = 10.0
_RETRY_INTERVAL_S: Final = 1.0
_MAX_WAITING: Final = 1000  # messages; then a server waits for the reader

_Item: TypeAlias = bytes | StorageError | None


class Changes:
    """Notifications about changes of rollouts, made by any process. They are not stored."""

    def __init__(self, servers: Servers, layout: Layout) -> None:
        self._servers = servers
        self._channels = [bucket.listing for bucket in layout.buckets]

    @asynccontextmanager
    async def subscribe(self) -> AsyncIterator[AsyncIterator[Change | None]]:
        """Iterate over the changes after the context was entered, in order for each rollout, without end.

        None means that a server sent nothing for some seconds and still responds. Raises `StoreUnreachable`, on entering or
        later, if no server of the store responds. If one of several does not, the others' changes follow, and the iterator
        raises as soon as it responds again. Changes made while not subscribed are lost: read the rollouts after subscribing
        again.
        """
        items: asyncio.Queue[_Item] = asyncio.Queue(_MAX_WAITING)
        tasks = []
        async with AsyncExitStack() as stack:
            divided = await self._servers.divide(self._channels)
            entered = await asyncio.gather(
                *(stack.enter_async_context(server.subscribe(own, _IDLE_TIMEOUT_S)) for server, own in divided),
                return_exceptions=True,
            )
            streams = [stream for stream in entered if not isinstance(stream, BaseException)]
            for failure in entered:
                if isinstance(failure, BaseException) and (not streams or not isinstance(failure, StorageError)):
                    raise failure
            is_whole = len(self._channels) == sum(
                len(own)
                for (_, own), stream in zip(divided, entered, strict=True)
                if not isinstance(stream, BaseException)
            )
            try:
                tasks += [asyncio.create_task(_read(stream, items)) for stream in streams]  # noqa: TID251 - ends with this context
                yield self._changes(items, len(streams), tasks, is_whole=is_whole)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _changes(
        self, items: asyncio.Queue[_Item], live: int, tasks: list[asyncio.Task[None]], *, is_whole: bool
    ) -> AsyncIterator[Change | None]:
        while True:
            if not is_whole:
                tasks.append(asyncio.create_task(self._end_when_whole(items)))  # noqa: TID251 - as the readers
                is_whole = True
            item = await items.get()
            if isinstance(item, _Whole):
                raise item
            if isinstance(item, StorageError):
                live, is_whole = live - 1, False
                if not live:
                    raise item
            else:
                yield None if item is None else decode_change(item)

    async def _end_when_whole(self, items: asyncio.Queue[_Item]) -> None:
        """End the iteration when all servers respond: changes may have been missed."""
        while True:
            await asyncio.sleep(_RETRY_INTERVAL_S)
            found = await self._servers.execute_all([(key, [("EXISTS", key)]) for key in self._channels], shared=True)
            if not any(isinstance(replies, StorageError) or isinstance(replies[0], ResponseError) for replies in found):
                await items.put(
                    _Whole("a server of the store responds again; changes of its rollouts may have been missed")
                )
                return


class _Whole(StoreUnreachable):
    """Ends a subscription that missed changes."""


async def _read(stream: AsyncIterator[bytes | None], items: asyncio.Queue[_Item]) -> None:
    try:
        async for message in stream:
            await items.put(message)
    except StorageError as error:
        await items.put(error)


def decode_change(message: bytes) -> Change:
    """Decode a message: the encoded name of a rollout, followed by position and name if a record was appended."""
    name, *record = message.decode("utf-8", "surrogatepass").split(" ", 2)
    rollout = unquote(name, errors="surrogatepass")
    return Change(rollout, int(record[0]), record[1]) if record else Change(rollout)
