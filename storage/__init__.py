"""Bytes, names and counts, kept durably over the Redis protocol. Imports nothing of `proxy`.

    types      the values that cross the protocols
    errors     the errors
    store      the protocols: the verbs and what each promises
    queue      the protocol of the queue of groups
    options    the options of a store and its URL
    redis/     the store on Redis or Valkey
    embedded/  the bundled valkey-server

Each imports only what is above it; `redis/` and `embedded/` do not import each other.
"""

import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from storage.errors import StorageError
from storage.options import Address, StoreOptions, read_url
from storage.redis.cluster import Cluster
from storage.redis.connections import Servers, SingleServer, connections_to, connections_to_socket
from storage.redis.durability import barrier_for
from storage.redis.server_info import check_supported, fetch_info
from storage.redis.store import RedisStore
from storage.store import Store

if TYPE_CHECKING:
    from storage.embedded.server import EmbeddedServer

__all__ = ["StoreOptions", "open_store", "start_shared"]

# The `tokentape` command looks for this line before it imports the package; see tokentape/__main__.py.
DISTRIBUTION = "tokentape"


async def open_store(url: str, options: StoreOptions | None = None) -> Store:
    """Open the store at `url`: `embedded:PATH`, `unix:PATH`, `redis://`, `rediss://`, `redis+cluster://`, ….

    It is reached and checked before this returns. Raises `ValueError` for a URL that is none, `StoreUnreachable` when nothing
    answers, `StorageError` when what answers cannot keep what the options promise.
    """
    address = read_url(url)
    options = options or StoreOptions()
    if address.kind == "embedded":
        return await _open_embedded(address, options)
    if address.kind == "unix":
        return await _open(SingleServer(connections_to_socket(str(address.path), address, options)), options)
    if address.kind == "single":
        return await _open(SingleServer(connections_to(*address.hosts[0], address, options)), options)
    cluster = Cluster(address.hosts, lambda host, port: connections_to(host, port, address, options))
    return await _open(cluster, options)


async def start_shared(url: str, options: StoreOptions) -> "EmbeddedServer | None":
    """The server of an embedded store, for processes that open it by `unix:` and its socket; None for any other URL.

    It is started here, and its starter's to stop. Raises as `open_store` does.
    """
    address = read_url(url)
    return await _start(address, options) if address.kind == "embedded" else None


async def _open_embedded(address: Address, options: StoreOptions) -> Store:
    server = await _start(address, options)
    return await _open(SingleServer(connections_to_socket(server.socket, address, options)), options, server.stop)


async def _start(address: Address, options: StoreOptions) -> "EmbeddedServer":
    if options.durability == "replicated":
        raise ValueError("an embedded store has no replicas: choose durability acknowledged or fsync, or another store")
    if sys.platform == "win32":
        raise StorageError("there is no embedded store on Windows: use a server of your own (redis://…)")
    from storage.embedded.server import start_embedded  # noqa: PLC0415 - needs fcntl, which Windows has not

    return await start_embedded(address.path, options.durability)


async def _open(
    servers: Servers, options: StoreOptions, stop: Callable[[], Awaitable[None]] | None = None
) -> RedisStore:
    try:
        every = [(server, await fetch_info(server)) for server in await servers.all()]
        for _, facts in every:
            check_supported(facts, in_cluster=isinstance(servers, Cluster))
        barrier = await barrier_for(every, options)
    except BaseException:
        await servers.close()
        if stop:
            await stop()
        raise
    return RedisStore(servers, options, barrier, stop)
