"""When a write counts as done.

Holds the barrier: the command that follows every write on its connection, and the check of its reply. It must not write
anything itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from storage.errors import StorageError, StoreUnreachable
from storage.options import StoreOptions
from storage.redis.connections import Connections
from storage.redis.errors import checked
from storage.redis.multiplexed import Reply
from storage.redis.scripts import Command
from storage.redis.server_info import ServerInfo

_WAITAOF_SINCE: Final = (7, 2)


@dataclass(frozen=True, slots=True)
class Barrier:
    """What follows a write.

    `commands`, none or one, are sent in the same round trip, and succeed with `wanted` confirmations. `confirmed`: one more
    round trip shows that the server could write its append-only file (see `multiplexed`).
    """

    commands: tuple[Command, ...] = ()
    wanted: int = 0
    confirmed: bool = False

    def check(self, replies: Sequence[Reply]) -> None:
        """Raise `StoreUnreachable` if the write before it is not confirmed so often. It may be there all the same."""
        for reply in replies:
            answer = checked(reply)
            if answer == b"PONG":
                continue
            # WAIT answers how many replicas; WAITAOF how many own disks (0 or 1), then how many replicas' disks.
            confirmed, by = (answer[0], "disks") if isinstance(answer, list) else (answer, "replicas")
            if confirmed < self.wanted:
                raise StoreUnreachable(
                    f"the write reached {confirmed} of {self.wanted} {by} in time; ask again: it may be there, and will "
                    "not be made twice"
                )


async def barrier_for(servers: Sequence[tuple[Connections, ServerInfo]], options: StoreOptions) -> Barrier:
    """The barrier that keeps the options' promise on these servers. Raises `StorageError` if none can."""
    wait_ms = max(1, int(options.timeout_s * 750))  # less than the timeout, so that a caller learns what was short
    if options.durability == "acknowledged":
        # With everysec a write may be held back for two seconds while an fsync runs, and a PING shows nothing; with always
        # the server exits before it replies (flushAppendOnlyFile in aof.c, Valkey 9.1).
        is_lazy = (
            facts.said.get("aof_enabled") == "1" and facts.said.get("appendfsync") == "no" for _, facts in servers
        )
        return Barrier(confirmed=any(is_lazy))
    if options.durability == "replicated":
        return Barrier((("WAIT", options.replicas, wait_ms),), options.replicas)
    for _, facts in servers:
        if facts.said.get("aof_enabled") != "1":
            raise StorageError(f"durability fsync needs an append-only file: set appendonly yes on {facts.where}")
    if all(facts.compatible >= _WAITAOF_SINCE for _, facts in servers):
        return Barrier((("WAITAOF", 1, 0, wait_ms),), 1)
    for server, facts in servers:
        (reply,) = await server.ask([("CONFIG", "GET", "appendfsync")])
        if checked(reply) != [b"appendfsync", b"always"]:
            raise StorageError(
                f"durability fsync needs Redis 7.2 or newer, or appendfsync always, on {facts.where}, which is "
                f"{facts.name} {facts.version}"
            )
    return Barrier()  # the server itself answers only when it is on disk
