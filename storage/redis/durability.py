"""The barrier that a durability requires, checked against the configuration of the servers."""

from collections.abc import Sequence
from typing import Final

from storage.errors import StorageError
from storage.options import StoreOptions
from storage.redis.connections import Barrier, Connections
from storage.redis.replies import checked
from storage.redis.server_info import ServerInfo

_WAITAOF_SINCE: Final = (7, 2)


async def barrier_for(servers: Sequence[tuple[Connections, ServerInfo]], options: StoreOptions) -> Barrier:
    """Return the barrier for the durability of the options. Raises `StorageError` if the servers do not support it."""
    wait_ms = max(
        1, int(options.timeout_s * 750)
    )  # less than the timeout, so that callers get the number of confirmations
    if options.durability == "acknowledged":
        # A PING confirms writes with appendfsync no only: with everysec, a write can be delayed for two seconds while an fsync
        # runs; with always, the server exits if the write fails (flushAppendOnlyFile in aof.c, Valkey 9.1).
        are_confirmed_by_ping = (
            info.fields.get("aof_enabled") == "1" and info.fields.get("appendfsync") == "no" for _, info in servers
        )
        return Barrier(confirmed=any(are_confirmed_by_ping))
    if options.durability == "replicated":
        return Barrier((("WAIT", options.replicas, wait_ms),), options.replicas)
    for _, info in servers:
        if info.fields.get("aof_enabled") != "1":
            raise StorageError(f"durability fsync requires an append-only file: set appendonly yes on {info.address}")
    if all(info.compatible >= _WAITAOF_SINCE for _, info in servers):
        return Barrier((("WAITAOF", 1, 0, wait_ms),), 1)
    for server, info in servers:
        (reply,) = await server.execute(b"", [("CONFIG", "GET", "appendfsync")])
        if checked(reply) != [b"appendfsync", b"always"]:
            raise StorageError(
                f"durability fsync requires Redis 7.2 or newer, or appendfsync always, on {info.address}, which is "
                f"{info.name} {info.version}"
            )
    return Barrier()  # with appendfsync always, the server replies after the fsync
