"""Connections: waiting, breaking, securing."""

import asyncio
import socket
from contextlib import suppress

import pytest

from storage import StoreOptions
from storage.errors import StorageError, StoreUnreachable
from storage.options import Address
from storage.redis.connections import connections_to

both_ways = pytest.mark.parametrize("shared", [False, True], ids=["lent", "shared"])


@pytest.fixture
async def connect():
    """Makes connections that are closed with the test."""
    made = []

    def connect(server, **options):
        address = Address("single", tls=getattr(server, "tls", False))
        made.append(connections_to("127.0.0.1", server.port, address, StoreOptions(**options)))
        return made[-1]

    yield connect
    for connections in made:
        await connections.close()


@pytest.fixture
async def serve():
    """Starts a server that writes `words` to whoever says something; nothing, if there are none."""
    servers, writers = [], []

    async def serve(words=b""):
        async def answer(reader, writer):
            writers.append(writer)
            await reader.readline()
            writer.write(words)

        servers.append(await asyncio.start_server(answer, "127.0.0.1", 0))
        servers[-1].port = servers[-1].sockets[0].getsockname()[1]
        return servers[-1]

    yield serve
    for writer in writers:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
    for server in servers:
        server.close()
        await server.wait_closed()


@both_ways
async def test_replies_come_in_order_and_refusals_among_them(connect, redis_server, shared):
    """Commands of one call share a connection and a write; each has its reply, a refusal too."""
    connections = connect(redis_server)

    replies = await connections.ask([("ECHO", "a"), ("NONSENSE",), ("ECHO", b"\x00\xff"), ("ECHO", 7)], shared=shared)

    assert [b"a", b"\x00\xff", b"7"] == [replies[0], *replies[2:]]
    assert "unknown command" in str(replies[1])


async def test_callers_wait_for_a_free_connection(connect, redis_server):
    """More callers than connections wait rather than fail, and no more connections are made than allowed."""
    connections = connect(redis_server, max_connections=2)

    answers = await asyncio.gather(*(connections.ask([("CLIENT", "ID"), ("ECHO", i)]) for i in range(50)))

    assert [b"%d" % i for i in range(50)] == [echo for _, echo in answers]
    assert len({connection for connection, _ in answers}) <= 2


async def test_a_cancelled_call_leaves_no_reply_to_the_next(connect, redis_server, until):
    """When a caller is cancelled, its answer never becomes another caller's."""
    connections = connect(redis_server, max_connections=1)
    waiting = asyncio.ensure_future(connections.ask([("BLPOP", "nothing", 5), ("ECHO", "stale")]))
    other = connect(redis_server)

    async def is_blocked():
        return b"blocked_clients:1" in (await other.ask([("INFO", "clients")]))[0]

    await until(is_blocked)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting

    assert [b"fresh"] == await connections.ask([("ECHO", "fresh")])


@both_ways
async def test_connections_that_the_server_closed_are_replaced(connect, redis_server, shared):
    """After a server let go of all its connections, the next call goes through."""
    connections = connect(redis_server)
    await asyncio.gather(*(connections.ask([("PING",)], shared=shared) for _ in range(5)))
    with redis_server.client as client:
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    answers = await asyncio.gather(*(connections.ask([("ECHO", i)], shared=shared) for i in range(10)))

    assert [[b"%d" % i] for i in range(10)] == answers


@both_ways
async def test_a_silent_server_is_away_in_time(connect, serve, shared):
    """A server that takes a connection and never answers makes a call fail when the timeout is over."""
    server = await serve()
    connections = connect(server, timeout_s=0.1)

    with pytest.raises(StoreUnreachable, match=r"127.0.0.1:\d+ did not answer within 0.1 s"):
        await connections.ask([("PING",)], shared=shared)


async def test_waiting_for_a_connection_ends_in_time(connect, serve):
    """The timeout covers the wait for a free connection too."""
    server = await serve()
    connections = connect(server, timeout_s=0.1, max_connections=1)

    answers = await asyncio.gather(*(connections.ask([("PING",)]) for _ in range(5)), return_exceptions=True)

    assert [StoreUnreachable] * 5 == [type(answer) for answer in answers]


async def test_no_server_is_away_at_once(opened):
    """A refused connection is not waited for."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))

        async with asyncio.timeout(50):
            with pytest.raises(StoreUnreachable, match="cannot be reached"):
                await opened(f"redis://127.0.0.1:{taken.getsockname()[1]}", timeout_s=600)


@both_ways
async def test_something_else_at_the_port_is_said(connect, serve, shared):
    """A server that speaks another protocol is an error that stays."""
    server = await serve(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with pytest.raises(StorageError, match="does not speak the Redis protocol"):
        await connect(server).ask([("PING",)], shared=shared)


@both_ways
async def test_closed_connections_are_not_used_again(connect, redis_server, shared):
    """After `close` every call fails, and no connection stays open."""
    connections = connect(redis_server)
    await connections.ask([("PING",)], shared=shared)
    await connections.close()

    with pytest.raises(StoreUnreachable, match="closed"):
        await connections.ask([("PING",)], shared=shared)


async def test_tls_and_acl(start_redis, certificate, opened):
    """rediss:// talks TLS to a server that the authority of `ca_file` vouches for, as the user given."""
    cert, key = map(str, certificate)
    server = start_redis(
        "--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", cert, "--tls-auth-clients", "no",
        "--requirepass", "root", password="root", tls=True,
    )  # fmt: skip
    with server.client as client:
        client.execute_command("ACL", "SETUSER", "tape", "on", ">pass/word", "~tt:*", "+@all", "-@dangerous", "+info")

    store = await opened(server.url, username="tape", password="pass/word", ca_file=certificate[0])
    by_url = await opened(f"rediss://tape:pass%2Fword@{server.where}", ca_file=certificate[0])

    await store.open("r", {}, now_ms=1)
    assert ("r",) == (await by_url.list()).names
    with pytest.raises(StoreUnreachable, match=r"(?i)certificate"):
        await opened(server.url, username="tape", password="pass/word")
    with pytest.raises(StorageError, match="does not let us in"):
        await opened(server.url, username="tape", password="wrong", ca_file=certificate[0])
    with pytest.raises(StorageError, match="does not let us in"):
        await opened(server.url, ca_file=certificate[0])
    other = await opened(server.url, username="tape", password="pass/word", ca_file=certificate[0], prefix="no")
    with pytest.raises(StorageError, match="may not do what TokenTape needs"):
        await other.open("r", {}, now_ms=1)
