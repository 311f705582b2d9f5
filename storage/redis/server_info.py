"""The reply of INFO: whether a server is supported, and warnings about its configuration and state."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from storage.errors import StorageError, StoreUnreachable
from storage.options import StoreOptions
from storage.redis.connections import Barrier, Connections, checked, pairs
from storage.types import ServerWarning

_MIN_VERSION: Final = (7, 0)


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server: its address, name and version, the Redis version it is compatible with, and all fields of INFO."""

    address: str
    name: str
    version: str
    compatible: tuple[int, int]
    fields: dict[str, str]

    @property
    def is_aof_ok(self) -> bool:
        """Whether the append-only file is enabled, and its last write and rewrite succeeded."""
        statuses = (self.fields.get("aof_last_write_status", "ok"), self.fields.get("aof_last_bgrewrite_status", "ok"))
        return self.fields.get("aof_enabled") == "1" and statuses == ("ok", "ok")

    @property
    def warnings(self) -> list[ServerWarning]:
        """The problems that an operator should fix, or at least know."""
        policy = self.fields.get("maxmemory_policy", "noeviction")
        is_limited = self.fields.get("maxmemory", "0") != "0"
        is_aof_enabled = self.fields.get("aof_enabled") == "1"
        has_failed = "err" in (self.fields.get("aof_last_write_status"), self.fields.get("aof_last_bgrewrite_status"))
        # The append-only file of the embedded server, on a Unix socket, is fsynced by storage.embedded.server.
        is_embedded = "/" in self.address
        is_without_fsync = self.fields.get("appendfsync") == "no" and is_aof_enabled and not is_embedded
        warnings = {
            ServerWarning(
                f"{self.address} evicts keys when its memory is full (maxmemory-policy {policy})",
                "set maxmemory-policy noeviction: when its memory is full, the server then refuses writes and loses no data",
            ): is_limited and policy != "noeviction",
            ServerWarning(
                f"{self.address} has no append-only file: if it stops, it loses all writes since its last snapshot",
                "set appendonly yes, and appendfsync everysec or always",
            ): self.fields.get("aof_enabled") == "0",
            ServerWarning(
                f"{self.address} cannot write its append-only file",
                "check its log and its disk: newer writes are in memory only",
            ): has_failed,
            ServerWarning(
                f"{self.address} does not fsync its append-only file (appendfsync no)",
                "set appendfsync everysec: without it, a power failure can lose the writes of about 30 s",
                can_lose_data=False,
            ): is_without_fsync,
            ServerWarning(
                f"{self.address} refuses all commands while another server is missing (cluster-require-full-coverage yes)",
                "set cluster-require-full-coverage no: then a dead server affects its own rollouts only",
                can_lose_data=False,
            ): self.fields.get("cluster-require-full-coverage") == "yes" and self.fields.get("cluster_enabled") == "1",
        }
        return [warning for warning, applies in warnings.items() if applies]


async def fetch_info(server: Connections) -> ServerInfo:
    """Request INFO, and some settings if the user has the permission for CONFIG GET."""
    wanted = ("appendfsync", "cluster-require-full-coverage")
    reply, settings = await server.execute(b"", [("INFO",), ("CONFIG", "GET", *wanted)])
    lines = checked(reply).decode("utf-8", "replace").splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))
    if isinstance(settings, list):
        fields |= {name.decode(): value.decode() for name, value in pairs(settings)}
    redis_version = fields.get("redis_version", "0.0")  # Valkey 8 and 9 report 7.2.4 here
    major, minor, *_ = redis_version.split(".")
    return ServerInfo(
        address=server.address,
        name=fields.get("server_name", "redis"),
        version=fields.get("valkey_version") or redis_version,
        compatible=(int(major), int(minor)),
        fields=fields,
    )


async def fetch_infos(
    servers: Sequence[Connections],
) -> tuple[dict[Connections, ServerInfo], dict[Connections, StoreUnreachable]]:
    """Request INFO of each server; return the replies, and the errors of the servers that do not respond.

    Raises `StoreUnreachable` if none responds.
    """
    infos, failures = {}, {}
    replies = await asyncio.gather(*map(fetch_info, servers), return_exceptions=True)
    for server, reply in zip(servers, replies, strict=True):
        if isinstance(reply, ServerInfo):
            infos[server] = reply
        elif isinstance(reply, StoreUnreachable):
            failures[server] = reply
        else:
            raise reply
    if not infos:
        raise next(iter(failures.values()))
    return infos, failures


async def ping_each(servers: Sequence[Connections], timeout_s: float | None) -> dict[str, str | None]:
    """Return None for each server, by its address, that responds within the timeout, and for the others why not."""

    async def ping(server: Connections) -> str | None:
        try:
            async with asyncio.timeout(timeout_s):
                (reply,) = await server.execute(b"", [("PING",)])
            checked(reply)
        except (StorageError, TimeoutError) as error:
            return str(error) or f"the store at {server.address} did not respond within {timeout_s:g} s"
        return None

    return dict(zip((server.address for server in servers), await asyncio.gather(*map(ping, servers)), strict=True))


def warnings_of(
    servers: Mapping[Connections, ServerInfo], failures: Mapping[Connections, StoreUnreachable]
) -> list[ServerWarning]:
    """Return the problems of all servers of a store, and of differences between them."""
    warnings = [ServerWarning(str(failure), "start it, or promote its replica") for failure in failures.values()]
    warnings += [warning for info in servers.values() for warning in info.warnings]
    policies = {server.address: info.fields.get("maxmemory_policy", "noeviction") for server, info in servers.items()}
    if len(set(policies.values())) > 1:
        found = ", ".join(f"{address} {policy}" for address, policy in policies.items())
        problem = f"the servers of store.url have different settings of maxmemory-policy: {found}"
        warnings.append(ServerWarning(problem, "set maxmemory-policy noeviction on each"))
    return warnings


def check_supported(info: ServerInfo, *, in_cluster: bool) -> None:
    """Raise `StorageError` if the version is not supported, or if a URL without `cluster` names a server of a cluster.

    Raises `StoreUnreachable` for a replica, which may become a primary.
    """
    if info.compatible < _MIN_VERSION:
        raise StorageError(
            f"{info.address} is {info.name} {info.version}; TokenTape requires Redis 7 or Valkey 8, or newer"
        )
    if info.fields.get("cluster_enabled") == "1" and not in_cluster:
        raise StorageError(
            f"store.url: {info.address} is a server of a cluster: use the URL redis+cluster://{info.address}"
        )
    if info.fields.get("role") in {"slave", "replica"}:
        primary = f"{info.fields.get('master_host')}:{info.fields.get('master_port')}"
        raise StoreUnreachable(
            f"{info.address} in store.url is a replica, which does not accept writes: use its primary, {primary}, "
            "or redis+sentinel:// with the addresses of its sentinels",
            info.address,
        )


def summarize(
    servers: Mapping[Connections, ServerInfo], failures: Mapping[Connections, StoreUnreachable]
) -> dict[str, str]:
    """Return the facts about all servers of a store that operators see."""
    infos = servers.values()
    used = [int(info.fields.get("used_memory", 0)) for info in infos]
    limits = [int(info.fields.get("maxmemory", 0)) for info in infos]
    unreachable = {"unreachable": ", ".join(server.address for server in failures)} if failures else {}
    return unreachable | {
        "servers": ", ".join(info.address for info in infos),
        "version": ", ".join(sorted({f"{info.name} {info.version}" for info in infos})),
        "memory_bytes": str(sum(used)),
        "memory_limit_bytes": str(sum(limits) if all(limits) else 0),
        "memory_share": str(max((each / limit for each, limit in zip(used, limits, strict=True) if limit), default=0)),
        "aof_ok": str(int(all(info.is_aof_ok for info in infos))),
        "clock_s": str(max((int(info.fields.get("server_time_usec", 0)) for info in infos), default=0) / 1e6),
    }


_WAITAOF_SINCE: Final = (7, 2)


async def barrier_for(servers: Mapping[Connections, ServerInfo], options: StoreOptions) -> Barrier:
    """Return the barrier for the durability of the options. Raises `StorageError` if the servers do not support it."""
    wait_ms = max(
        1, int(options.timeout_s * 750)
    )  # less than the timeout, so that callers get the number of confirmations
    if options.durability == "acknowledged":
        # A PING confirms writes with appendfsync no only: with everysec, a write can be delayed for two seconds while an fsync
        # runs; with always, the server exits if the write fails (flushAppendOnlyFile in aof.c, Valkey 9.1).
        are_confirmed_by_ping = (
            info.fields.get("aof_enabled") == "1" and info.fields.get("appendfsync") == "no"
            for info in servers.values()
        )
        return Barrier(confirmed=any(are_confirmed_by_ping))
    if options.durability == "replicated":
        return Barrier((("WAIT", options.replicas, wait_ms),), options.replicas)
    for info in servers.values():
        if info.fields.get("aof_enabled") != "1":
            raise StorageError(f"durability fsync requires an append-only file: set appendonly yes on {info.address}")
    if all(info.compatible >= _WAITAOF_SINCE for info in servers.values()):
        return Barrier((("WAITAOF", 1, 0, wait_ms),), 1)
    for server, info in servers.items():
        (reply,) = await server.execute(b"", [("CONFIG", "GET", "appendfsync")])
        if checked(reply) != [b"appendfsync", b"always"]:
            raise StorageError(
                f"durability fsync requires Redis 7.2 or newer, or appendfsync always, on {info.address}, which is "
                f"{info.name} {info.version}"
            )
    return Barrier()  # with appendfsync always, the server replies after the fsync
