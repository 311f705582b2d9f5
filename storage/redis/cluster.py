"""The servers of a store; those whose keys another server can take over: a Redis cluster, and a primary under Sentinel.

A call depends only on the server that has its key. Replicas are not used: they may not have data yet that was reported as
stored.

Rule 1: a command is sent again until its deadline while its slot has no server or moves to another one. All commands are
        idempotent.
Rule 2: when a server is suspected, the servers are discovered again in the background, and one that was replaced is retired.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final, TypeAlias

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import AskError, ClusterDownError, MovedError, ReadOnlyError, ResponseError, TryAgainError

from storage.errors import StorageError, StoreUnreachable
from storage.redis.connections import Connections, Refresh, Reply, Request, checked, pairs, refused
from storage.redis.scripts import Command

HostPort: TypeAlias = tuple[str, int]
Connect: TypeAlias = Callable[[str, int, Refresh], Connections]
Slots: TypeAlias = Iterable[tuple[int, int, HostPort]]  # first and last slot, and their primary

# Replies after which another try can succeed.
_ELSEWHERE: Final = (
    MovedError,
    AskError,
    TryAgainError,
    ClusterDownError,
    ReadOnlyError,
)
_BARRIERS: Final = ("WAIT", "WAITAOF")  # they have no key, and follow a write on its connection
_DISCOVERY_TIMEOUT_S: Final = 1.0  # for each server: a dead one must not delay the request to the next
_FIRST_PAUSE_S: Final = 0.005
_LONGEST_PAUSE_S: Final = 0.25
_FAILOVERS: Final = (b"+promoted-slave", b"+switch-master")  # by the sentinel that promotes, and later by all
_IDLE_TIMEOUT_S: Final = 10.0
_LISTEN_AGAIN_S: Final = 1.0
_UNSENT: Final = StoreUnreachable("the command was not sent")


class Primaries(ABC):
    """The servers that have the slots. `connect` makes the connections to one; it gets the function to call when in doubt."""

    def __init__(self, connect: Connect, timeout_s: float) -> None:
        self._connect = connect
        self._timeout_s = timeout_s
        self._servers: dict[HostPort, Connections] = {}
        self._owners: list[Connections | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        self._discovering: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(set(self._owners) - {None})} primaries>"

    @abstractmethod
    async def _discover(self) -> Slots:
        """Request which servers are primaries. Raises `StorageError`."""

    def server_of(self, key: bytes) -> Connections | None:
        """Return the primary of the slot of `key`, as far as is known without a request."""
        return self._owners[key_slot(key)]

    async def execute(
        self, key: bytes, commands: Sequence[Command], *, shared: bool = False, confirmed: bool = False
    ) -> list[Reply]:
        """Send commands to the primary of the slot of `key`, in one write on one connection; return one reply for each.

        If the slot is moving, or its primary is being replaced, they are sent until `timeout_s` has passed, one by one.
        """
        slot = key_slot(key)
        end = asyncio.get_running_loop().time() + self._timeout_s
        server = self._owners[slot]
        if server is not None:
            try:
                replies = await server.execute(key, commands, shared=shared, confirmed=confirmed, end=end)
            except StoreUnreachable as error:
                await self._replaced(slot, server, error, end)
            else:
                for reply in replies:
                    if isinstance(reply, _ELSEWHERE):
                        break
                else:
                    return replies
        barrier = [command for command in commands if command[0] in _BARRIERS]
        own = [
            await self._send(slot, key, [command, *barrier], end, shared=shared, confirmed=confirmed)
            for command in commands[: len(commands) - len(barrier)]
        ]
        return [*(reply for reply, *_ in own), *own[0][1:]]  # the write is the first one

    async def execute_all(
        self,
        requests: Sequence[Request],
        after: Sequence[Command] = (),
        *,
        shared: bool = False,
        confirmed: bool = False,
    ) -> list[list[Reply] | StorageError]:
        """Send the commands of all requests, in one write to each primary; see `Connections.execute_all`.

        Requests that are redirected, or that have a new primary after theirs could not be reached, are sent again one by one.
        """
        found: list[list[Reply] | StorageError] = [_UNSENT] * len(requests)

        async def send_one(number: int) -> None:
            key, commands = requests[number]
            try:
                found[number] = await self.execute(key, [*commands, *after], shared=shared, confirmed=confirmed)
            except StorageError as error:
                found[number] = error

        async def send_to(server: Connections | None, numbers: Sequence[int]) -> None:
            if server is None:
                again = list(numbers)
            else:
                parts = [requests[number] for number in numbers]
                replies = await server.execute_all(parts, after, shared=shared, confirmed=confirmed)
                for number, reply in zip(numbers, replies, strict=True):
                    found[number] = reply
                again = [number for number in numbers if _is_elsewhere(found[number])]
                if isinstance(found[numbers[0]], StoreUnreachable):
                    if server.unreachable is None:
                        await self.refresh()
                    again = [number for number in numbers if self.server_of(requests[number][0]) is not server]
            await asyncio.gather(*map(send_one, again))

        owners: defaultdict[Connections | None, list[int]] = defaultdict(list)
        for number, (key, _) in enumerate(requests):
            owners[self.server_of(key)].append(number)
        await asyncio.gather(*(send_to(server, numbers) for server, numbers in owners.items()))
        return found

    async def divide(self, keys: Sequence[bytes]) -> list[tuple[Connections, list[bytes]]]:
        """Return the primaries that have these keys, each with its keys; keys of slots without a primary are absent."""
        await self.all()
        owners: defaultdict[Connections, list[bytes]] = defaultdict(list)
        for key in keys:
            if (owner := self.server_of(key)) is not None:
                owners[owner].append(key)
        return list(owners.items())

    async def all(self) -> list[Connections]:
        """Return all primaries."""
        if not any(self._owners):
            await self.discover()
        return sorted({owner for owner in self._owners if owner}, key=lambda server: server.address)

    async def close(self) -> None:
        """Close all connections."""
        if self._discovering is not None:
            self._discovering.cancel()
            await asyncio.wait([self._discovering])
        for server in self._servers.values():
            await server.close()
        if self._closing:
            await asyncio.wait(self._closing)

    async def discover(self) -> None:
        """Request which servers are primaries; concurrent callers share one request. Raises `StorageError`."""
        if self._discovering is None or self._discovering.done():
            self._discovering = asyncio.get_running_loop().create_task(self._update())
        await asyncio.shield(self._discovering)

    async def refresh(self) -> None:
        """Request which servers are primaries; on failure, nothing changes."""
        with suppress(StorageError):
            await self.discover()

    async def _update(self) -> None:
        owners: list[Connections | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        for first, last, address in await self._discover():
            owners[first : last + 1] = [self._server(address)] * (last + 1 - first)
        before, self._owners = set(self._owners), owners
        for server in before.difference(owners):
            if server is not None:
                self._retire(server)

    def _retire(self, server: Connections) -> None:
        self._servers = {address: other for address, other in self._servers.items() if other is not server}
        server.retire()
        closing = asyncio.get_running_loop().create_task(server.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _server(self, address: HostPort) -> Connections:
        if address not in self._servers:
            self._servers[address] = self._connect(*address, self.refresh)
        return self._servers[address]

    async def _replaced(self, slot: int, server: Connections, error: StoreUnreachable, end: float) -> None:
        """Return if the slot has another primary than `server`, which failed. Raises `error` otherwise."""
        if self._owners[slot] is server and server.unreachable is None:
            await self.refresh()
        if self._owners[slot] is server or asyncio.get_running_loop().time() > end:
            raise error

    async def _send(
        self, slot: int, key: bytes, commands: Sequence[Command], end: float, *, shared: bool, confirmed: bool
    ) -> list[Reply]:
        """Send a command, with the barrier that follows it, to the server that has the key now, until the deadline."""
        importing: HostPort | None = None  # the server to which the slot is moving
        pauses, loop = _pauses(), asyncio.get_running_loop()
        while True:
            server = await self._owner(slot) if importing is None else self._server(importing)
            asking: list[Command] = [] if importing is None else [("ASKING",)]
            try:
                replies = await server.execute(key, [*asking, *commands], shared=shared, confirmed=confirmed, end=end)
            except StoreUnreachable as error:
                if importing is None:
                    await self._replaced(slot, server, error, end)
                failure, importing = error, None
            else:
                reply = replies[len(asking)]
                if not isinstance(reply, _ELSEWHERE):
                    return replies[len(asking) :]
                importing = _target(reply, server) if isinstance(reply, AskError) else None
                if isinstance(reply, MovedError):
                    self._owners[slot] = self._server(_target(reply, server))
                if isinstance(reply, ReadOnlyError | ClusterDownError):
                    await self.refresh()
                failure = _failure(reply, slot, server)
            pause_s = next(pauses)
            if loop.time() + pause_s > end:
                raise failure
            await asyncio.sleep(pause_s)

    async def _owner(self, slot: int) -> Connections:
        if self._owners[slot] is None:
            await self.discover()
        owner = self._owners[slot]
        if owner is None:
            raise StoreUnreachable(f"no server of the cluster has slot {slot}")
        return owner


Servers: TypeAlias = Connections | Primaries  # of a store


async def listen(servers: Servers, channel: bytes, heard: asyncio.Event) -> None:
    """Set an event for each message of a channel, and whenever a subscription begins, without end. Messages can be lost."""
    while True:
        with suppress(StorageError):
            for server, own in await servers.divide([channel]):
                async with server.subscribe(own, _IDLE_TIMEOUT_S) as messages:
                    heard.set()
                    async for message in messages:
                        if message is not None:
                            heard.set()
        await asyncio.sleep(_LISTEN_AGAIN_S)


class Cluster(Primaries):
    """The primaries of a Redis cluster, discovered from `seeds`."""

    def __init__(self, seeds: Sequence[HostPort], connect: Connect, timeout_s: float) -> None:
        super().__init__(connect, timeout_s)
        self._seeds = tuple(seeds)
        self._replicas: list[HostPort] = []  # asked if no primary responds

    async def _discover(self) -> Slots:
        """Request the slots from the first server that responds."""
        known = sorted(self._servers, key=lambda address: self._servers[address].is_suspect)
        errors = []
        for address in dict.fromkeys((*known, *self._seeds, *self._replicas)):
            server = self._server(address)
            try:
                (reply,) = await _request(server, ("CLUSTER", "SLOTS"))
            except StoreUnreachable as error:
                errors.append(str(error))
                continue
            if isinstance(reply, ResponseError) and "cluster support disabled" in str(reply):
                raise StorageError(
                    f"store.url: {server.address} is not a server of a cluster: use the URL redis://{server.address}"
                )
            return self._slots(checked(reply), address)
        raise StoreUnreachable(f"no server of the cluster in store.url can be reached: {'; '.join(errors)}")

    def _slots(self, reply: Reply, source: HostPort) -> Slots:
        """Decode CLUSTER SLOTS: start, end, then host and port of the primary and of its replicas, for each range."""
        found = []
        self._replicas = []
        for first, last, *servers in reply:
            # An empty host is the host of the server that replied.
            primary, *replicas = [((host or b"").decode() or source[0], port) for host, port, *_ in servers]
            found.append((first, last, primary))
            self._replicas += replicas
        return found


class Sentinel(Primaries):
    """A primary that sentinels monitor under the name `service`.

    Sentinels that did not take part in a failover name the old primary for some seconds, which accepts writes that are lost as
    soon as it becomes a replica. So all are asked, whenever one announces a failover, and the answer with the highest epoch
    counts.
    """

    def __init__(self, sentinels: Sequence[Connections], service: str, connect: Connect, timeout_s: float) -> None:
        super().__init__(connect, timeout_s)
        self._sentinels = sentinels
        self._service = service
        self._epoch = -1
        self._following: list[asyncio.Task[None]] = []

    async def close(self) -> None:
        """Close all connections."""
        for task in self._following:
            task.cancel()
        await asyncio.gather(*self._following, return_exceptions=True)
        await super().close()
        for sentinel in self._sentinels:
            await sentinel.close()

    async def _follow(self, sentinel: Connections) -> None:
        """Discover the primary again whenever this sentinel announces a failover."""
        while True:
            with suppress(StorageError):
                async with sentinel.subscribe(_FAILOVERS, _IDLE_TIMEOUT_S, by="SUBSCRIBE") as messages:
                    await self.refresh()  # one may have been announced before
                    async for message in messages:
                        if message is not None:
                            await self.refresh()
            await asyncio.sleep(_LISTEN_AGAIN_S)

    async def _discover(self) -> Slots:
        answers = await asyncio.gather(*map(self._ask, self._sentinels), return_exceptions=True)
        found = [answer for answer in answers if isinstance(answer, tuple)]
        names = ", ".join(sentinel.address for sentinel in self._sentinels)
        if not found:
            errors = [answer for answer in answers if isinstance(answer, BaseException)]
            if len(errors) == len(answers):
                refusals = [error for error in errors if not isinstance(error, StoreUnreachable)]
                if refusals:
                    raise refusals[0]
                raise StoreUnreachable(f"no sentinel in store.url can be reached: {'; '.join(map(str, errors))}")
            raise StorageError(
                f"the sentinels at {names} monitor no primary with the name {self._service!r}: correct the end of store.url"
            )
        epoch, address = max(found)
        current = self._owners[0]
        if current is not None and epoch < self._epoch and len(found) < len(self._sentinels):
            raise StoreUnreachable("the sentinels that respond do not know about the last failover yet")
        if current is None or current is not self._servers.get(address):
            await self._check_role(self._server(address))
        self._epoch = epoch
        if not self._following:
            loop = asyncio.get_running_loop()
            self._following = [loop.create_task(self._follow(sentinel)) for sentinel in self._sentinels]
        return [(0, REDIS_CLUSTER_HASH_SLOTS - 1, address)]

    async def _ask(self, sentinel: Connections) -> tuple[int, HostPort] | None:
        """Return the epoch and the address of the primary; None if this sentinel does not know it."""
        try:
            address, state = await _request(
                sentinel,
                ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service),  # the new primary, as soon as it was promoted
                ("SENTINEL", "MASTER", self._service),
            )
            if checked(address) is None or isinstance(state, ResponseError):
                return None
        except StoreUnreachable:
            raise
        except StorageError as error:
            raise StorageError(
                f"the sentinel at {sentinel.address} refused: {error} (store.sentinel_username, store.sentinel_password)"
            ) from error
        fields = dict(pairs(state))
        return int(fields[b"config-epoch"]), (address[0].decode(), int(address[1]))

    async def _check_role(self, server: Connections) -> None:
        (role,) = await _request(server, ("ROLE",))
        if checked(role)[0] != b"master":
            raise StoreUnreachable(
                f"{server.address}, which the sentinels name as the primary {self._service!r}, is a replica at the moment",
                server.address,
            )


async def _request(server: Connections, *commands: Command) -> list[Reply]:
    try:
        async with asyncio.timeout(_DISCOVERY_TIMEOUT_S):
            return await server.execute(b"", commands)
    except TimeoutError:
        raise StoreUnreachable(
            f"{server.address} did not respond within {_DISCOVERY_TIMEOUT_S:g} s", server.address
        ) from None


def _pauses() -> Iterator[float]:
    """Yield no pause for three redirections, then growing ones."""
    yield from (0, 0, 0)
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(_LONGEST_PAUSE_S, 1.5 * pause_s)


def _is_elsewhere(outcome: list[Reply] | StorageError) -> bool:
    return isinstance(outcome, list) and any(isinstance(reply, _ELSEWHERE) for reply in outcome)


def _target(redirection: AskError, server: Connections) -> HostPort:
    """Return the server of a redirection; without a host, it is on the host of the server that replied."""
    return redirection.host or server.address.rpartition(":")[0].strip("[]"), redirection.port


def _failure(reply: ResponseError, slot: int, server: Connections) -> StoreUnreachable:
    """Return the error for a reply that did not change until the deadline."""
    if isinstance(reply, ClusterDownError | ReadOnlyError):
        return StoreUnreachable(str(refused(reply)), server.address)
    return StoreUnreachable(
        f"slot {slot} is moving to another server of the cluster, for longer than store.timeout_s; try again later"
    )
