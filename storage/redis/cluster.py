"""The primaries of a Redis cluster, their slots, and redirections.

Replicas are not used: they may not have data yet that was reported as stored.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import AskError, MovedError, ResponseError, TryAgainError

from storage.errors import StorageError, StoreUnreachable
from storage.redis.connections import Connections, Request
from storage.redis.replies import Reply, checked
from storage.redis.scripts import Command

HostPort = tuple[str, int]

_MAX_REDIRECTS: Final = 5
_UNSENT: Final = StoreUnreachable("the command was not sent")
_TRY_AGAIN_INTERVAL_S: Final = 0.1
_SLOTS_TIMEOUT_S: Final = 1.0  # for each server: a dead one must not delay the request to the next


class Cluster:
    """The primaries of a cluster, discovered from `seeds`; `connect` creates the connection pool of a server."""

    def __init__(self, seeds: Sequence[HostPort], connect: Callable[[str, int], Connections]) -> None:
        self._seeds = tuple(seeds)
        self._connect = connect
        self._servers: dict[HostPort, Connections] = {}
        self._owners: list[HostPort | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        self._refresh_lock = asyncio.Lock()
        self._refreshes = 0

    def __repr__(self) -> str:
        return f"<Cluster of {len(set(self._owners) - {None})} primaries>"

    async def execute(
        self, key: bytes, commands: Sequence[Command], *, shared: bool = False, confirmed: bool = False
    ) -> list[Reply]:
        """Send commands to the primary of the slot of `key`, in one write on one connection; return one reply for each.

        If it cannot be reached, the slots are requested again; if the slot has another primary now, that one is used.
        """
        slot = key_slot(key)
        for _ in range(_MAX_REDIRECTS):
            owner = await self._owner(slot)
            try:
                replies = await self._server(owner).execute(key, commands, shared=shared, confirmed=confirmed)
            except StoreUnreachable:
                await self._refresh(self._refreshes)
                if await self._owner(slot) == owner:
                    raise
                continue
            redirect = replies[0]
            if isinstance(redirect, MovedError):
                await self._follow(redirect, owner)
                continue
            if isinstance(redirect, AskError):
                _, *replies = await self._server((redirect.host, redirect.port)).execute(
                    key, [("ASKING",), *commands], shared=shared, confirmed=confirmed
                )
            if not isinstance(replies[0], TryAgainError):
                return replies
            await asyncio.sleep(_TRY_AGAIN_INTERVAL_S)  # some keys of the slot are being moved to another server
        raise StoreUnreachable(f"slot {slot} of the cluster is being moved to another server; try again later")

    async def execute_all(
        self,
        requests: Sequence[Request],
        after: Sequence[Command] = (),
        *,
        shared: bool = False,
        confirmed: bool = False,
    ) -> list[list[Reply] | StorageError]:
        """Send the commands of all requests, in one write to each primary; see `Servers.execute_all`.

        Requests that are redirected, or that have a new primary after theirs could not be reached, are sent again one by one.
        """
        found: list[list[Reply] | StorageError] = [_UNSENT] * len(requests)

        async def send_one(number: int) -> None:
            key, commands = requests[number]
            try:
                found[number] = await self.execute(key, [*commands, *after], shared=shared, confirmed=confirmed)
            except StorageError as error:
                found[number] = error

        async def send_to(owner: HostPort, numbers: Sequence[int]) -> None:
            parts = [requests[number] for number in numbers]
            replies = await self._server(owner).execute_all(parts, after, shared=shared, confirmed=confirmed)
            for number, reply in zip(numbers, replies, strict=True):
                found[number] = reply
            again = [number for number, reply in zip(numbers, replies, strict=True) if _is_redirected(reply)]
            if isinstance(replies[0], StoreUnreachable):
                with suppress(StorageError):
                    await self._refresh(self._refreshes)
                again = [
                    number for number in numbers if self._owners[key_slot(requests[number][0])] not in (owner, None)
                ]
            await asyncio.gather(*map(send_one, again))

        owners: defaultdict[HostPort, list[int]] = defaultdict(list)
        for number, (key, _) in enumerate(requests):
            try:
                owners[await self._owner(key_slot(key))].append(number)
            except StorageError as error:
                found[number] = error
        await asyncio.gather(*(send_to(owner, numbers) for owner, numbers in owners.items()))
        return found

    async def divide(self, keys: Sequence[bytes]) -> list[tuple[Connections, list[bytes]]]:
        """Return the primaries that have these keys, each with its keys; keys of slots without a primary are absent."""
        await self.all()
        owners: defaultdict[HostPort, list[bytes]] = defaultdict(list)
        for key in keys:
            if (owner := self._owners[key_slot(key)]) is not None:
                owners[owner].append(key)
        return [(self._server(owner), own) for owner, own in owners.items()]

    async def all(self) -> list[Connections]:
        """Return all primaries."""
        if self._refreshes == 0:
            await self._refresh(0)
        return [self._server(address) for address in sorted({owner for owner in self._owners if owner})]

    async def close(self) -> None:
        """Close all connections."""
        for server in self._servers.values():
            await server.close()

    def _server(self, address: HostPort) -> Connections:
        if address not in self._servers:
            self._servers[address] = self._connect(*address)
        return self._servers[address]

    async def _owner(self, slot: int) -> HostPort:
        if self._refreshes == 0:
            await self._refresh(0)
        owner = self._owners[slot]
        if owner is None:
            await self._refresh(self._refreshes)
            owner = self._owners[slot]
        if owner is None:
            raise StoreUnreachable(
                f"no server of the cluster at {self._server(self._seeds[0]).address} owns slot {slot}"
            )
        return owner

    async def _follow(self, moved: MovedError, owner: HostPort) -> None:
        await self._refresh(self._refreshes)
        if self._owners[moved.slot_id] == owner:  # the server that replied does not know about the move yet
            self._owners[moved.slot_id] = (moved.host or owner[0], moved.port)

    async def _refresh(self, seen: int) -> None:
        """Request the slots from the first server that responds, unless there was another refresh after `seen`."""
        async with self._refresh_lock:
            if self._refreshes > seen:
                return
            errors = []
            for address in dict.fromkeys((*self._servers, *self._seeds)):
                server = self._server(address)
                try:
                    async with asyncio.timeout(_SLOTS_TIMEOUT_S):
                        (slots,) = await server.execute(b"", [("CLUSTER", "SLOTS")])
                except (StoreUnreachable, TimeoutError) as error:
                    errors.append(str(error) or f"{server.address} did not respond within {_SLOTS_TIMEOUT_S:g} s")
                    continue
                self._apply_slots(slots, address, server.address)
                self._refreshes += 1
                return
            raise StoreUnreachable(f"no server of the cluster can be reached: {'; '.join(errors)}")

    def _apply_slots(self, slots: Reply, source: HostPort, source_name: str) -> None:
        """Apply the reply of CLUSTER SLOTS: start, end, then host and port of the primary, for each range."""
        if isinstance(slots, ResponseError) and "cluster support disabled" in str(slots):
            raise StorageError(f"{source_name} is not a server of a cluster: use the URL redis://{source_name}")
        owners: list[HostPort | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        for start, end, (host, port, *_), *_ in checked(slots):
            # An empty host is the host of the server that replied.
            owners[start : end + 1] = [((host or b"").decode() or source[0], port)] * (end + 1 - start)
        self._owners = owners


def _is_redirected(replies: list[Reply] | StorageError) -> bool:
    return isinstance(replies, list) and isinstance(replies[0], MovedError | AskError | TryAgainError)
