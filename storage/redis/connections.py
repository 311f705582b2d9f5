"""The connection pool of one server.

redis-py opens connections and parses replies. Its clients are not used: they take two to three times the CPU time of this pool
for each call, fail instead of waiting when all connections are in use, and cannot send a WAIT on the connection of its write
in a cluster.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from inspect import signature
from typing import Any, Final, Protocol

from hiredis import pack_command
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.exceptions import AuthenticationError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError

from storage.errors import StoreUnreachable
from storage.options import Address, StoreOptions
from storage.redis.multiplexed import PING, MultiplexedConnection, Reply, read_reply
from storage.redis.replies import checked, translate_errors
from storage.redis.scripts import Command

# By default, redis-py reads its own version from disk for each connection, to send it to the server (8.1: 0.5 ms).
_NO_CLIENT_INFO: Final[dict[str, None]] = (
    {"driver_info": None}
    if "driver_info" in signature(AbstractConnection.__init__).parameters
    else {"lib_name": None, "lib_version": None}  # redis-py before 7.2
)
_RETRY_INTERVAL_S: Final = 0.02
MANY_ARGUMENTS: Final = 2**13  # whose packing takes a millisecond
_MAX_SHARED_BYTES: Final = 2**18  # longer commands would delay those after them on the shared connection


@dataclass(frozen=True, slots=True)
class Barrier:
    """The commands that follow a write.

    `commands` (none or one) are sent in the same round trip as the write and must return at least `required` confirmations.
    `confirmed`: a PING in another round trip shows that the server wrote its append-only file (see `multiplexed`).
    """

    commands: tuple[Command, ...] = ()
    required: int = 0
    confirmed: bool = False

    def check(self, replies: Sequence[Reply]) -> None:
        """Raise `StoreUnreachable` if there are too few confirmations. The write may be stored nevertheless."""
        for reply in replies:
            answer = checked(reply)
            if answer == b"PONG":
                continue
            # WAIT returns a number of replicas; WAITAOF the number of local disks (0 or 1) and of disks of replicas.
            count, unit = (answer[0], "disks") if isinstance(answer, list) else (answer, "replicas")
            if count < self.required:
                raise StoreUnreachable(
                    f"the write reached {count} of {self.required} {unit} before the timeout; retry: it may be stored already, "
                    "and is not stored twice"
                )


class Servers(Protocol):
    """The servers of a store, each with a part of the keys."""

    async def execute(
        self, key: bytes, commands: Sequence[Command], *, shared: bool = False, confirmed: bool = False
    ) -> list[Reply]:
        """Send commands to the server that has `key`, in one write on one connection; return one reply for each.

        If `confirmed`, the reply of a PING is added: see `Connections.execute`.
        """
        ...

    async def all(self) -> "list[Connections]":
        """Return all servers that accept writes."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


class Connections:
    """A pool of up to `max_connections` connections to one server, and one `MultiplexedConnection` for short commands.

    A pooled connection is used by one caller at a time; further callers wait in order. A command on the multiplexed connection
    takes a third of the CPU time.

    If a connection breaks, its commands are sent once more on a new one, as all pooled connections break when a server
    restarts. So all commands must be idempotent. If `patient`, commands are sent until `timeout_s` has passed, for a server
    that has responded before and is restarting.
    """

    def __init__(
        self,
        make: Callable[[], AbstractConnection],
        address: str,
        options: StoreOptions,
        *,
        patient: bool = False,
    ) -> None:
        self.address = address
        self._make = make
        self._timeout_s = options.timeout_s
        self._free = asyncio.Semaphore(options.max_connections)
        self._idle: list[AbstractConnection] = []
        self._multiplexed = MultiplexedConnection(make, options.timeout_s)
        self._translated = translate_errors(address, options.timeout_s)
        self._patient = patient
        self._has_responded = False
        self._closed = False

    def __repr__(self) -> str:
        return f"<Connections to {self.address}, {len(self._idle)} idle>"

    async def execute(
        self, commands: Sequence[Command], *, shared: bool = False, confirmed: bool = False
    ) -> list[Reply]:
        """Send commands in one write on one connection; return one reply for each, including error replies.

        `shared`: use the multiplexed connection, unless the commands are long; they must not block. `confirmed`: after the
        replies, send a PING on the same connection and add its reply, which is an error if the server could not write its
        append-only file (see `multiplexed`). Raises `StoreUnreachable` if there is no reply within `timeout_s`, including the
        time to get a connection.
        """
        is_long = sum(map(len, commands)) > MANY_ARGUMENTS
        packed = await asyncio.to_thread(_packed, commands) if is_long else _packed(commands)
        with self._translated:
            if shared and sum(map(len, packed)) <= _MAX_SHARED_BYTES:
                return await self._retry(self._multiplexed.execute, packed, confirmed=confirmed)
            async with asyncio.timeout(self._timeout_s), self._free:
                return await self._retry(self._exchange, packed, confirmed=confirmed)

    async def _retry(
        self, execute: Callable[..., Awaitable[list[Reply]]], packed: list[bytes], *, confirmed: bool
    ) -> list[Reply]:
        """Execute commands once more if the connection breaks; if patient, until the timeout."""
        if self._closed:
            raise StoreUnreachable("the store is closed")
        loop = asyncio.get_running_loop()
        attempt, end = 1, loop.time() + self._timeout_s - 2 * _RETRY_INTERVAL_S
        while True:
            try:
                replies = await execute(packed, confirmed=confirmed)
            except RedisConnectionError as error:
                is_restarting = self._patient and self._has_responded and loop.time() < end
                if isinstance(error, AuthenticationError) or (attempt > 1 and not is_restarting):
                    raise
            else:
                self._has_responded = True
                return replies
            await self._close_idle()
            if attempt > 1:
                await asyncio.sleep(_RETRY_INTERVAL_S)
            attempt += 1

    @asynccontextmanager
    async def subscribe(
        self, channels: Sequence[bytes], idle_timeout_s: float
    ) -> AsyncIterator[AsyncIterator[bytes | None]]:
        """Subscribe on a dedicated connection. Iterates over messages, with None whenever none was received for this long.

        Raises `StoreUnreachable`, on entering or later, if the server cannot be reached or does not respond to a PING.
        """
        connection = self._make()
        try:
            with translate_errors(self.address, self._timeout_s):
                async with asyncio.timeout(self._timeout_s):
                    await connection.connect()  # type: ignore[no-untyped-call]
                    await _send(connection, ("SUBSCRIBE", *channels))
                    for _ in channels:
                        checked(await read_reply(connection))
            yield self._messages(connection, idle_timeout_s)
        finally:
            with suppress(RedisError, OSError):
                await connection.disconnect(nowait=True)

    async def _messages(self, connection: AbstractConnection, idle_timeout_s: float) -> AsyncIterator[bytes | None]:
        was_pinged = False
        with translate_errors(self.address, idle_timeout_s):
            while True:
                try:
                    async with asyncio.timeout(idle_timeout_s):
                        message = await connection.read_response(disconnect_on_error=False)
                except TimeoutError:
                    if was_pinged:
                        raise
                    was_pinged = True
                    await _send(connection, ("PING",))
                    yield None
                    continue
                was_pinged = False
                if message[0] == b"message":
                    yield message[2]

    async def close(self) -> None:
        """Close the idle connections; those in use are closed when their callers have their replies."""
        self._closed = True
        await self._multiplexed.close()
        await self._close_idle()

    async def _exchange(self, packed: list[bytes], *, confirmed: bool) -> list[Reply]:
        connection = self._idle.pop() if self._idle else self._make()
        try:
            await connection.connect()  # type: ignore[no-untyped-call]
            await connection.send_packed_command(packed, check_health=False)
            replies = [await read_reply(connection) for _ in packed]
            if confirmed:
                await connection.send_packed_command([PING], check_health=False)
                replies.append(await read_reply(connection))
        except BaseException:
            # Also when cancelled: another caller must not get the replies that are still to be received.
            with suppress(RedisError, OSError):
                await connection.disconnect(nowait=True)
            raise
        self._idle.append(connection)
        if self._closed:
            await self._close_idle()
        return replies

    async def _close_idle(self) -> None:
        while self._idle:
            with suppress(RedisError, OSError):
                await self._idle.pop().disconnect()


def _packed(commands: Sequence[Command]) -> list[bytes]:
    return [pack_command(command) for command in commands]  # type: ignore[arg-type] # the stub requires a 1-tuple


async def _send(connection: AbstractConnection, command: Command) -> None:
    (packed,) = _packed([command])
    await connection.send_packed_command(packed, check_health=False)


class SingleServer:
    """The server of a store that is not a cluster."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def execute(
        self, key: bytes, commands: Sequence[Command], *, shared: bool = False, confirmed: bool = False
    ) -> Coroutine[Any, Any, list[Reply]]:
        """Send commands in one write on one connection; return one reply for each."""
        return self._connections.execute(commands, shared=shared, confirmed=confirmed)

    async def all(self) -> list[Connections]:
        """Return the server."""
        return [self._connections]

    async def close(self) -> None:
        """Close all connections."""
        await self._connections.close()


def connections_to(host: str, port: int, address: Address, options: StoreOptions) -> Connections:
    """Return a pool for a server on the network, with the credentials and TLS of the address and the options."""
    kwargs = _common_kwargs(address, options) | {"host": host, "port": port}
    kind: type[Connection] = Connection
    if address.tls:
        kind = SSLConnection
        kwargs["ssl_ca_certs"] = options.ca_file and str(options.ca_file)
    server_address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return Connections(lambda: kind(**kwargs), server_address, options)


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
