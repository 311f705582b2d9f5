"""Opens stores: connects to the servers of a URL, or starts the embedded one, and creates a store that does not exist."""

import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Any, Final

from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection

from storage.errors import StorageError
from storage.options import Address, StoreOptions, are_buckets, parse_url
from storage.redis.cluster import Cluster, Primaries, Sentinel, Servers
from storage.redis.connections import Barrier, Connections, Refresh, checked
from storage.redis.keys import CLUSTER_BUCKETS, DEFAULT_BUCKETS, Layout, creation_key
from storage.redis.scripts import Command
from storage.redis.server_info import barrier_for, check_supported, fetch_infos
from storage.redis.store import Store

# By default, redis-py reads its own version from disk for each connection, to send it to the server (8.1: 0.5 ms).
_NO_CLIENT_INFO: Final[dict[str, None]] = (
    {"driver_info": None}
    if "driver_info" in signature(AbstractConnection.__init__).parameters
    else {"lib_name": None, "lib_version": None}  # redis-py before 7.2
)

if TYPE_CHECKING:
    from storage.embedded.server import EmbeddedServer


async def open_store(url: str, options: StoreOptions | None = None) -> Store:
    """Open the store at `url`: `embedded:PATH`, `unix:PATH`, `redis://`, `redis+cluster://`, `redis+sentinel://`, ….

    Connects to the servers and checks them before it returns.

    Raises:
        ValueError: the URL is invalid.
        StoreUnreachable: a server does not respond.
        StorageError: a server is not supported or cannot provide the durability of the options.
    """
    address = parse_url(url)
    options = options or StoreOptions()
    if address.kind == "embedded":
        return await _open_embedded(address, options)
    if address.kind == "unix":
        return await _open(connections_to_socket(str(address.path), address, options), options)
    if address.kind == "single":
        return await _open(connections_to(*address.hosts[0], address, options), options)
    return await _open(_primaries(address, options), options)


def _primaries(address: Address, options: StoreOptions) -> Primaries:
    def connect(host: str, port: int, refresh: Refresh) -> Connections:
        return connections_to(host, port, address, options, refresh)

    if address.kind == "cluster":
        return Cluster(address.hosts, connect, options.timeout_s)
    plain = replace(address, db=0, username=None, password=None)
    own = replace(options, username=options.sentinel_username, password=options.sentinel_password)
    sentinels = [connections_to(host, port, plain, own) for host, port in address.hosts]
    return Sentinel(sentinels, address.service, connect, options.timeout_s)


async def start_shared(url: str, options: StoreOptions) -> "EmbeddedServer | None":
    """Start the server of an embedded store and return it; return None for any other URL.

    Other processes open the store with `unix:` and the path of the server's socket. The caller stops the server. Raises the
    same errors as `open_store`.
    """
    address = parse_url(url)
    return await _start(address, options) if address.kind == "embedded" else None


async def _open_embedded(address: Address, options: StoreOptions) -> Store:
    server = await _start(address, options)
    return await _open(connections_to_socket(server.socket, address, options), options, server.stop)


async def _start(address: Address, options: StoreOptions) -> "EmbeddedServer":
    if options.durability == "replicated":
        raise ValueError(
            "an embedded store has no replicas: set durability to acknowledged or fsync, or use another store"
        )
    if sys.platform == "win32":
        raise StorageError("the embedded store is not available on Windows: use a Redis or Valkey server (redis://…)")
    from storage.embedded.server import start_embedded  # noqa: PLC0415 - needs fcntl, which Windows does not have

    return await start_embedded(address.path, options.durability)


async def _open(servers: Servers, options: StoreOptions, stop: Callable[[], Awaitable[None]] | None = None) -> Store:
    try:
        infos, _ = await fetch_infos(await servers.all())
        for info in infos.values():
            check_supported(info, in_cluster=isinstance(servers, Cluster))
        barrier = await barrier_for(infos, options)
        layout = Layout(options.prefix, await _buckets(servers, options, barrier))
    except BaseException:
        await servers.close()
        if stop:
            await stop()
        raise
    return Store(servers, layout, options, barrier, stop)


async def _buckets(servers: Servers, options: StoreOptions, barrier: Barrier) -> int:
    """Return the number of buckets of the store; create the store, in one command, if it does not exist."""
    key = creation_key(options.prefix)
    reading: list[Command] = [("TYPE", key), ("GET", key)]
    kind, value = await servers.execute(key, reading)
    if checked(kind) == b"none":
        wanted = options.buckets or (CLUSTER_BUCKETS if isinstance(servers, Cluster) else DEFAULT_BUCKETS)
        create = ("HSETNX", key, "buckets", wanted) if wanted == DEFAULT_BUCKETS else ("SET", key, wanted, "NX")
        created, kind, value, *more = await servers.execute(
            key, [create, *reading, *barrier.commands], confirmed=barrier.confirmed
        )
        if checked(kind) == b"none":
            checked(created)
        barrier.check(more)
    if kind == b"hash":
        found = DEFAULT_BUCKETS
    elif kind == b"string" and value.isdigit() and are_buckets(int(value[:9])):
        found = int(value)
    else:
        raise StorageError(f"the key {key.decode()} was not written by TokenTape: use another prefix (store.prefix)")
    if options.buckets not in (None, found):
        raise StorageError(
            f"store.buckets is {options.buckets}, but the store with the prefix {options.prefix!r} was created with {found}: "
            "remove the setting. A store keeps its number; to change it, move the rollouts with `tokentape archive` and "
            "`tokentape import` to a store with another prefix"
        )
    return found


def connections_to(
    host: str,
    port: int,
    address: Address,
    options: StoreOptions,
    refresh: Refresh | None = None,
) -> Connections:
    """Return a pool for a server on the network, with the credentials and TLS of the address and the options.

    With `refresh` it is patient: another server may replace it.
    """
    kwargs = _common_kwargs(address, options) | {"host": host, "port": port}
    kind: type[Connection] = Connection
    if address.tls:
        kind = SSLConnection
        kwargs["ssl_ca_certs"] = options.ca_file and str(options.ca_file)
    server_address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return Connections(lambda: kind(**kwargs), server_address, options, patient=refresh is not None, refresh=refresh)


def connections_to_socket(path: str, address: Address, options: StoreOptions) -> Connections:
    """Return a patient pool for a server on a Unix socket: its owner restarts it when it stops."""
    kwargs = _common_kwargs(address, options) | {"path": path}
    return Connections(lambda: UnixDomainSocketConnection(**kwargs), path, options, patient=True)


def _common_kwargs(address: Address, options: StoreOptions) -> dict[str, Any]:
    return {
        "db": address.db,
        "username": options.username or address.username,
        "password": options.password or address.password,
        **_NO_CLIENT_INFO,
        "protocol": 2,  # RESP3 is not needed, and an ACL can forbid its HELLO
        "socket_timeout": None,  # the timeout of `execute` applies; redis-py's creates a task for each write
        "socket_connect_timeout": options.timeout_s,
    }
