"""The servers of a Redis cluster.

Holds who owns which slot, and follows the cluster when that changes. It must not know a key's meaning, a script or a
rollout. Only primaries are asked: a replica may not have yet what a client was told is stored.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import AskError, MovedError, ResponseError, TryAgainError

from storage.errors import StorageError, StoreUnreachable
from storage.redis.connections import Connections
from storage.redis.errors import checked
from storage.redis.multiplexed import Reply
from storage.redis.scripts import Command

Place = tuple[str, int]  # host and port

_REDIRECTS: Final = 5
_SETTLE_S: Final = 0.1
_LEARN_TIMEOUT_S: Final = 1.0  # for each server asked who owns what: a dead one must not hold up the others' answer


class Cluster:
    """The primaries of a cluster, found from `seeds`; `connect` makes the connections to one of them."""

    def __init__(self, seeds: Sequence[Place], connect: Callable[[str, int], Connections]) -> None:
        self._seeds = tuple(seeds)
        self._connect = connect
        self._servers: dict[Place, Connections] = {}
        self._owners: list[Place | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        self._learning = asyncio.Lock()
        self._lessons = 0

    def __repr__(self) -> str:
        return f"<Cluster of {len(set(self._owners) - {None})} primaries>"

    async def ask(
        self, key: bytes, commands: Sequence[Command], *, shared: bool = False, confirmed: bool = False
    ) -> list[Reply]:
        """Send commands to the primary that holds `key`, in one write on one connection; one reply for each.

        When it cannot be reached, who owns what is learnt anew, and if that is another one now, it is asked.
        """
        slot = key_slot(key)
        for _ in range(_REDIRECTS):
            owner = await self._owner(slot)
            try:
                replies = await self._server(owner).ask(commands, shared=shared, confirmed=confirmed)
            except StoreUnreachable:
                await self._learn(self._lessons)
                if await self._owner(slot) == owner:
                    raise
                continue
            redirect = replies[0]
            if isinstance(redirect, MovedError):
                await self._follow(redirect, owner)
                continue
            if isinstance(redirect, AskError):
                _, *replies = await self._server((redirect.host, redirect.port)).ask(
                    [("ASKING",), *commands], shared=shared, confirmed=confirmed
                )
            if not isinstance(replies[0], TryAgainError):
                return replies
            await asyncio.sleep(_SETTLE_S)  # some keys of the slot are on their way to another server
        raise StoreUnreachable(f"slot {slot} of the cluster is moving from one server to another; try again later")

    async def all(self) -> list[Connections]:
        """Every primary."""
        if self._lessons == 0:
            await self._learn(0)
        return [self._server(place) for place in sorted({owner for owner in self._owners if owner})]

    async def close(self) -> None:
        """Let go of all connections."""
        for server in self._servers.values():
            await server.close()

    def _server(self, place: Place) -> Connections:
        if place not in self._servers:
            self._servers[place] = self._connect(*place)
        return self._servers[place]

    async def _owner(self, slot: int) -> Place:
        if self._lessons == 0:
            await self._learn(0)
        owner = self._owners[slot]
        if owner is None:
            await self._learn(self._lessons)
            owner = self._owners[slot]
        if owner is None:
            raise StoreUnreachable(f"no server of the cluster at {self._server(self._seeds[0]).where} owns slot {slot}")
        return owner

    async def _follow(self, moved: MovedError, owner: Place) -> None:
        await self._learn(self._lessons)
        if self._owners[moved.slot_id] == owner:  # the one that answered has not heard of it yet
            self._owners[moved.slot_id] = (moved.host or owner[0], moved.port)

    async def _learn(self, lessons: int) -> None:
        """Learn who owns what from the first server that says so, unless somebody did since `lessons`."""
        async with self._learning:
            if self._lessons > lessons:
                return
            faults = []
            for place in dict.fromkeys((*self._servers, *self._seeds)):
                server = self._server(place)
                try:
                    async with asyncio.timeout(_LEARN_TIMEOUT_S):
                        (slots,) = await server.ask([("CLUSTER", "SLOTS")])
                except (StoreUnreachable, TimeoutError) as error:
                    faults.append(str(error) or f"{server.where} did not answer within {_LEARN_TIMEOUT_S:g} s")
                    continue
                self._believe(slots, place, server.where)
                self._lessons += 1
                return
            raise StoreUnreachable(f"no server of the cluster can be reached: {'; '.join(faults)}")

    def _believe(self, slots: Reply, teller: Place, where: str) -> None:
        """Take over the reply of CLUSTER SLOTS: start, end, then host and port of the primary, for each range."""
        if isinstance(slots, ResponseError) and "cluster support disabled" in str(slots):
            raise StorageError(f"{where} is a server of its own, not one of a cluster: write redis://{where}")
        owners: list[Place | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        for start, end, (host, port, *_), *_ in checked(slots):
            # An empty host means: the one you are talking to.
            owners[start : end + 1] = [((host or b"").decode() or teller[0], port)] * (end + 1 - start)
        self._owners = owners
