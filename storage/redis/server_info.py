"""What a server says of itself, and whether TokenTape can use it.

Holds the reading of INFO and what follows from it. It must not start, configure or change a server.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from storage.errors import StorageError
from storage.redis.connections import Connections
from storage.redis.errors import checked
from storage.types import ServerWarning

_OLDEST: Final = (7, 0)


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server: its name and version, the Redis version it is compatible with, and what INFO `said` besides."""

    where: str
    name: str
    version: str
    compatible: tuple[int, int]
    said: dict[str, str]

    @property
    def writes_file(self) -> bool:
        """Whether it keeps an append-only file, and its last write and rewrite of it went well."""
        told = (self.said.get("aof_last_write_status", "ok"), self.said.get("aof_last_bgrewrite_status", "ok"))
        return self.said.get("aof_enabled") == "1" and told == ("ok", "ok")

    @property
    def warnings(self) -> list[ServerWarning]:
        """What an operator should mend, or at least know."""
        policy, role = self.said.get("maxmemory_policy", "noeviction"), self.said.get("role", "master")
        is_bounded = self.said.get("maxmemory", "0") != "0"
        has_failed = "err" in (self.said.get("aof_last_write_status"), self.said.get("aof_last_bgrewrite_status"))
        # Our own server, on a socket of ours, is fsynced by us (storage.embedded.server).
        is_lazy = self.said.get("appendfsync") == "no" and self.said.get("aof_enabled") == "1" and "/" not in self.where
        found = {
            ServerWarning(
                f"{self.where} throws keys away when its memory is full (maxmemory-policy {policy})",
                "set maxmemory-policy noeviction: a full store then refuses steps, and nothing is lost unseen",
            ): is_bounded and policy != "noeviction",
            ServerWarning(
                f"{self.where} keeps no append-only file: what it got since its last snapshot dies with it",
                "set appendonly yes, and appendfsync everysec or always",
            ): self.said.get("aof_enabled") == "0",
            ServerWarning(
                f"{self.where} cannot write its append-only file",
                "look at its log and its disk: what it took since is in memory only",
            ): has_failed,
            ServerWarning(
                f"{self.where} leaves it to the system when its file is on disk (appendfsync no)",
                "set appendfsync everysec: a power cut else costs what the system had not written, some 30 s",
                can_lose_data=False,
            ): is_lazy,
            ServerWarning(
                f"{self.where} is a replica ({role}), which takes no writes",
                f"give the primary's address: {self.said.get('master_host')}:{self.said.get('master_port')}",
            ): role in {"slave", "replica"},
        }
        return [warning for warning, applies in found.items() if applies]


async def fetch_info(server: Connections) -> ServerInfo:
    """What the server says of itself, and how it writes its file, if we may ask that."""
    reply, setting = await server.ask([("INFO",), ("CONFIG", "GET", "appendfsync")])
    lines = checked(reply).decode("utf-8", "replace").splitlines()
    said = dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))
    if isinstance(setting, list) and len(setting) == 2:
        said["appendfsync"] = setting[1].decode()
    redis_version = said.get("redis_version", "0.0")  # Valkey 8 and 9 call themselves Redis 7.2.4 here
    major, minor, *_ = redis_version.split(".")
    return ServerInfo(
        where=server.where,
        name=said.get("server_name", "redis"),
        version=said.get("valkey_version") or redis_version,
        compatible=(int(major), int(minor)),
        said=said,
    )


def check_supported(facts: ServerInfo, *, in_cluster: bool) -> None:
    """Raise `StorageError` if this is not a server that can be used so."""
    if facts.compatible < _OLDEST:
        raise StorageError(
            f"{facts.where} is {facts.name} {facts.version}; TokenTape needs Redis 7 or Valkey 8, or newer"
        )
    if facts.said.get("cluster_enabled") == "1" and not in_cluster:
        raise StorageError(f"{facts.where} is one server of a cluster: write redis+cluster://{facts.where}")


def summarize(servers: Sequence[ServerInfo]) -> dict[str, str]:
    """What an operator is told of all servers of a store."""
    bounds = [int(server.said.get("maxmemory", 0)) for server in servers]
    return {
        "servers": ", ".join(server.where for server in servers),
        "version": ", ".join(sorted({f"{server.name} {server.version}" for server in servers})),
        "memory_bytes": str(sum(int(server.said.get("used_memory", 0)) for server in servers)),
        "memory_limit_bytes": str(sum(bounds) if all(bounds) else 0),
        "aof_ok": str(int(all(server.writes_file for server in servers))),
        "clock_s": str(max((int(server.said.get("server_time_usec", 0)) for server in servers), default=0) / 1e6),
    }
