"""Notifications about changes, by Redis Pub/Sub.

The scripts that make a change publish it. The channel of a bucket has the name of its listing, so scripts need no further
argument. A cluster broadcasts messages to all servers, so one subscription to any of them is sufficient.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Final
from urllib.parse import unquote

from storage.errors import StoreUnreachable
from storage.redis.connections import Servers
from storage.redis.keys import BUCKETS, bucket_keys
from storage.types import Change

_IDLE_TIMEOUT_S: Final = 10.0


class RedisChanges:
    """The changes of the rollouts under `prefix`."""

    def __init__(self, servers: Servers, prefix: str) -> None:
        self._servers = servers
        self._channels = [bucket_keys(prefix, bucket)[0] for bucket in BUCKETS]

    @asynccontextmanager
    async def subscribe(self) -> AsyncIterator[AsyncIterator[Change | None]]:
        """Subscribe on a dedicated connection to the first server that accepts it."""
        async with AsyncExitStack() as stack:
            messages = await self._subscribe(stack)
            yield (None if message is None else decode_change(message) async for message in messages)

    async def _subscribe(self, stack: AsyncExitStack) -> AsyncIterator[bytes | None]:
        *others, last = await self._servers.all()
        for server in others:
            with suppress(StoreUnreachable):
                return await stack.enter_async_context(server.subscribe(self._channels, _IDLE_TIMEOUT_S))
        return await stack.enter_async_context(last.subscribe(self._channels, _IDLE_TIMEOUT_S))


def decode_change(message: bytes) -> Change:
    """Decode a message: the encoded name of a rollout, followed by position and name if a record was appended."""
    name, *record = message.decode("utf-8", "surrogatepass").split(" ", 2)
    rollout = unquote(name, errors="surrogatepass")
    return Change(rollout, int(record[0]), record[1]) if record else Change(rollout)
