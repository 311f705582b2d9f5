"""Changes over the Redis protocol: published by the scripts that make them.

Holds `RedisChanges`, which subscribes. A bucket's channel is called as its listing, so that no script needs one more
argument. In a cluster a message reaches every server, so any of them is listened to.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Final
from urllib.parse import unquote

from storage.errors import StoreUnreachable
from storage.redis.connections import Servers
from storage.redis.keys import BUCKETS, bucket_keys
from storage.types import Change

_QUIET_S: Final = 10.0


class RedisChanges:
    """What is published of the rollouts under `prefix`."""

    def __init__(self, servers: Servers, prefix: str) -> None:
        self._servers = servers
        self._channels = [bucket_keys(prefix, bucket)[0] for bucket in BUCKETS]

    @asynccontextmanager
    async def subscribe(self) -> AsyncIterator[AsyncIterator[Change | None]]:
        """Listen, on a connection of its own, to the first server that lets us."""
        async with AsyncExitStack() as stack:
            messages = await self._listened(stack)
            yield (None if message is None else read_change(message) async for message in messages)

    async def _listened(self, stack: AsyncExitStack) -> AsyncIterator[bytes | None]:
        *others, last = await self._servers.all()
        for server in others:
            with suppress(StoreUnreachable):
                return await stack.enter_async_context(server.listen(self._channels, _QUIET_S))
        return await stack.enter_async_context(last.listen(self._channels, _QUIET_S))


def read_change(message: bytes) -> Change:
    """What the scripts' `tell` published: encoded name, and of a record its index and name."""
    name, *record = message.decode("utf-8", "surrogatepass").split(" ", 2)
    rollout = unquote(name, errors="surrogatepass")
    return Change(rollout, int(record[0]), record[1]) if record else Change(rollout)
