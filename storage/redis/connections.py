"""Connections to one server.

Holds the pool of connections, their making, and the one round trip that everything goes through. It must not know a
key, a script or a rollout. redis-py opens, secures and parses; its own clients are left out, because they cost two to
three times the CPU time a call, fail rather than wait when all connections are busy, and cannot keep a WAIT on the
connection of its write in a cluster.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from inspect import signature
from typing import Any, Final, Protocol

from hiredis import pack_command
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.exceptions import AuthenticationError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError

from storage.errors import StoreUnreachable
from storage.options import Address, StoreOptions
from storage.redis.errors import checked, translated_errors
from storage.redis.multiplexed import CONFIRM, MultiplexedConnection, Reply, read_reply
from storage.redis.scripts import Command

# redis-py would read its own version off the disk for every connection, to tell the server (8.1: half a millisecond).
_UNNAMED: Final[dict[str, None]] = (
    {"driver_info": None}
    if "driver_info" in signature(AbstractConnection.__init__).parameters
    else {"lib_name": None, "lib_version": None}  # redis-py before 7.2
)
_PAUSE_S: Final = 0.02
_SHORT_BYTES: Final = 2**18  # longer ones would hold up those behind them on the line


class Servers(Protocol):
    """The servers of a store, each asked by the keys it holds."""

    async def ask(
        self, key: bytes, commands: Sequence[Command], *, shared: bool = False, confirmed: bool = False
    ) -> list[Reply]:
        """Send commands to the server that holds `key`, in one write on one connection; one reply for each.

        If `confirmed`, one reply more: see `Connections.ask`.
        """
        ...

    async def all(self) -> "list[Connections]":
        """Every server that takes writes."""
        ...

    async def close(self) -> None:
        """Let go of all connections."""
        ...


class Connections:
    """Up to `max_connections` connections to one server, each lent to one caller at a time; more callers wait, in order.

    And one `MultiplexedConnection` for short commands: sharing it costs a third of the CPU time of a loan.

    Commands whose connection breaks are sent once more on a fresh one, since a server that was restarted leaves a pool
    of dead ones behind: so they must be such that doing them twice is doing them once. If `patient`, they are sent until
    `timeout_s` is over, for a server that was there and is being started again.
    """

    def __init__(
        self,
        make: Callable[[], AbstractConnection],
        where: str,
        options: StoreOptions,
        *,
        patient: bool = False,
    ) -> None:
        self.where = where
        self._make = make
        self._timeout_s = options.timeout_s
        self._free = asyncio.Semaphore(options.max_connections)
        self._idle: list[AbstractConnection] = []
        self._line = MultiplexedConnection(make, options.timeout_s)
        self._patient = patient
        self._has_met = False
        self._closed = False

    def __repr__(self) -> str:
        return f"<Connections to {self.where}, {len(self._idle)} idle>"

    async def ask(self, commands: Sequence[Command], *, shared: bool = False, confirmed: bool = False) -> list[Reply]:
        """Send commands in one write on one connection; one reply for each. A refusal is a reply too.

        `shared`: on the line, unless they are long; they must not block. `confirmed`: a PING follows on the same connection
        once they are answered, and its reply is the last one: an error if the server could not write its append-only file
        (see `multiplexed`). Raises `StoreUnreachable` when no answer came within `timeout_s`, all waiting included.
        """
        packed = [pack_command(command) for command in commands]  # type: ignore[arg-type] # stub says 1-tuple
        with translated_errors(self.where, self._timeout_s):
            if shared and sum(map(len, packed)) <= _SHORT_BYTES:
                return await self._insist(partial(self._line.ask, confirmed=confirmed), packed)
            async with asyncio.timeout(self._timeout_s), self._free:
                return await self._insist(partial(self._exchange, confirmed=confirmed), packed)

    async def _insist(self, ask: Callable[[list[bytes]], Awaitable[list[Reply]]], packed: list[bytes]) -> list[Reply]:
        """Ask once more when the connection breaks; if patient, until the time is over."""
        if self._closed:
            raise StoreUnreachable("the store is closed")
        loop = asyncio.get_running_loop()
        attempt, end = 1, loop.time() + self._timeout_s - 2 * _PAUSE_S
        while True:
            try:
                replies = await ask(packed)
            except RedisConnectionError as error:
                is_awaited = self._patient and self._has_met and loop.time() < end
                if isinstance(error, AuthenticationError) or (attempt > 1 and not is_awaited):
                    raise
            else:
                self._has_met = True
                return replies
            await self._forget_idle()
            if attempt > 1:
                await asyncio.sleep(_PAUSE_S)
            attempt += 1

    @asynccontextmanager
    async def listen(self, channels: Sequence[bytes], quiet_s: float) -> AsyncIterator[AsyncIterator[bytes | None]]:
        """Subscribe, on a connection of its own. Gives messages, and None whenever none came for so long.

        Raises `StoreUnreachable`, on entering or later, when the server is not there, or does not answer when it is asked.
        """
        connection = self._make()
        try:
            with translated_errors(self.where, self._timeout_s):
                async with asyncio.timeout(self._timeout_s):
                    await connection.connect()  # type: ignore[no-untyped-call]
                    await _send(connection, ("SUBSCRIBE", *channels))
                    for _ in channels:
                        checked(await read_reply(connection))
            yield self._messages(connection, quiet_s)
        finally:
            with suppress(RedisError, OSError):
                await connection.disconnect(nowait=True)

    async def _messages(self, connection: AbstractConnection, quiet_s: float) -> AsyncIterator[bytes | None]:
        was_asked = False
        with translated_errors(self.where, quiet_s):
            while True:
                try:
                    async with asyncio.timeout(quiet_s):
                        said = await connection.read_response(disconnect_on_error=False)
                except TimeoutError:
                    if was_asked:
                        raise
                    was_asked = True
                    await _send(connection, ("PING",))
                    yield None
                    continue
                was_asked = False
                if said[0] == b"message":
                    yield said[2]

    async def close(self) -> None:
        """Close the idle connections; those that are lent are closed when they come back."""
        self._closed = True
        await self._line.close()
        await self._forget_idle()

    async def _exchange(self, packed: list[bytes], *, confirmed: bool) -> list[Reply]:
        connection = self._idle.pop() if self._idle else self._make()
        try:
            await connection.connect()  # type: ignore[no-untyped-call]
            await connection.send_packed_command(packed, check_health=False)
            replies = [await read_reply(connection) for _ in packed]
            if confirmed:
                await connection.send_packed_command([CONFIRM], check_health=False)
                replies.append(await read_reply(connection))
        except BaseException:
            # Also when cancelled: answers are still to come on it, which must not become another caller's.
            with suppress(RedisError, OSError):
                await connection.disconnect(nowait=True)
            raise
        self._idle.append(connection)
        if self._closed:
            await self._forget_idle()
        return replies

    async def _forget_idle(self) -> None:
        while self._idle:
            with suppress(RedisError, OSError):
                await self._idle.pop().disconnect()


async def _send(connection: AbstractConnection, command: Command) -> None:
    packed = pack_command(command)  # type: ignore[arg-type] # stub says 1-tuple
    await connection.send_packed_command(packed, check_health=False)


class SingleServer:
    """The one server of a store that is no cluster."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    async def ask(
        self, key: bytes, commands: Sequence[Command], *, shared: bool = False, confirmed: bool = False
    ) -> list[Reply]:
        """Send commands in one write on one connection; one reply for each."""
        return await self._connections.ask(commands, shared=shared, confirmed=confirmed)

    async def all(self) -> list[Connections]:
        """The server."""
        return [self._connections]

    async def close(self) -> None:
        """Let go of all connections."""
        await self._connections.close()


def connections_to(host: str, port: int, address: Address, options: StoreOptions) -> Connections:
    """Connections to a server on the network, with the credentials and the TLS of the address and the options."""
    kwargs = _common_kwargs(address, options) | {"host": host, "port": port}
    kind: type[Connection] = Connection
    if address.tls:
        kind = SSLConnection
        kwargs["ssl_ca_certs"] = options.ca_file and str(options.ca_file)
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return Connections(lambda: kind(**kwargs), where, options)


def connections_to_socket(path: str, address: Address, options: StoreOptions) -> Connections:
    """Connections to a server on a unix socket: one of this machine, whose owner starts it again when it ends."""
    kwargs = _common_kwargs(address, options) | {"path": path}
    return Connections(lambda: UnixDomainSocketConnection(**kwargs), path, options, patient=True)


def _common_kwargs(address: Address, options: StoreOptions) -> dict[str, Any]:
    return {
        "db": address.db,
        "username": options.username or address.username,
        "password": options.password or address.password,
        **_UNNAMED,
        "protocol": 2,  # nothing here needs RESP3, and its HELLO is one more thing that an ACL may forbid
        "socket_timeout": None,  # the timeout of `ask` covers all; redis-py's own start a task for every write
        "socket_connect_timeout": options.timeout_s,
    }
