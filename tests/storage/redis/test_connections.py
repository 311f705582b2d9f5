"""Connection pools: waiting, broken connections, TLS and ACLs."""

import asyncio
import socket
from contextlib import suppress

import pytest

from storage import StoreOptions
from storage.errors import StorageError, StoreUnreachable
from storage.options import Address
from storage.redis.connections import connections_to

POOLED_AND_SHARED = pytest.mark.parametrize("shared", [False, True], ids=["pooled", "shared"])


@pytest.fixture
async def connect():
    """Return a function that creates connection pools and closes them after the test."""
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
    """Return a function that starts a server, which replies with `words` to the first line; with nothing by default."""
    servers, writers = [], []

    async def serve(words=b""):
        async def respond(reader, writer):
            writers.append(writer)
            await reader.readline()
            writer.write(words)

        servers.append(await asyncio.start_server(respond, "127.0.0.1", 0))
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


@POOLED_AND_SHARED
async def test_replies_are_in_order_and_include_errors(connect, redis_server, shared):
    """The commands of one call are sent on one connection in one write; an error is a reply, too."""
    connections = connect(redis_server)

    replies = await connections.execute(
        [("ECHO", "a"), ("NONSENSE",), ("ECHO", b"\x00\xff"), ("ECHO", 7)], shared=shared
    )

    assert [b"a", b"\x00\xff", b"7"] == [replies[0], *replies[2:]]
    assert "unknown command" in str(replies[1])


async def test_callers_wait_for_a_free_connection(connect, redis_server):
    """If there are more callers than connections, callers wait, and no further connection is opened."""
    connections = connect(redis_server, max_connections=2)

    responses = await asyncio.gather(*(connections.execute([("CLIENT", "ID"), ("ECHO", i)]) for i in range(50)))

    assert [b"%d" % i for i in range(50)] == [echo for _, echo in responses]
    assert len({connection for connection, _ in responses}) <= 2


async def test_the_reply_to_a_cancelled_call_is_not_used_for_the_next(connect, redis_server, until):
    """Another caller never gets the reply to a cancelled call."""
    connections = connect(redis_server, max_connections=1)
    waiting = asyncio.ensure_future(connections.execute([("BLPOP", "nothing", 5), ("ECHO", "stale")]))
    other = connect(redis_server)

    async def is_blocked():
        return b"blocked_clients:1" in (await other.execute([("INFO", "clients")]))[0]

    await until(is_blocked)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting

    assert [b"fresh"] == await connections.execute([("ECHO", "fresh")])


@POOLED_AND_SHARED
async def test_connections_that_the_server_closed_are_replaced(connect, redis_server, shared):
    """After the server has closed all connections, the next call succeeds."""
    connections = connect(redis_server)
    await asyncio.gather(*(connections.execute([("PING",)], shared=shared) for _ in range(5)))
    with redis_server.client as client:
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    responses = await asyncio.gather(*(connections.execute([("ECHO", i)], shared=shared) for i in range(10)))

    assert [[b"%d" % i] for i in range(10)] == responses


@POOLED_AND_SHARED
async def test_a_server_without_replies_is_unreachable_after_the_timeout(connect, serve, shared):
    """A server that accepts a connection and never replies makes a call fail after the timeout."""
    server = await serve()
    connections = connect(server, timeout_s=0.1)

    with pytest.raises(StoreUnreachable, match=r"127.0.0.1:\d+ did not respond within 0.1 s"):
        await connections.execute([("PING",)], shared=shared)


async def test_the_timeout_includes_the_wait_for_a_connection(connect, serve):
    """Callers that wait for a free connection fail after the timeout as well."""
    server = await serve()
    connections = connect(server, timeout_s=0.1, max_connections=1)

    responses = await asyncio.gather(*(connections.execute([("PING",)]) for _ in range(5)), return_exceptions=True)

    assert [StoreUnreachable] * 5 == [type(response) for response in responses]


async def test_a_refused_connection_is_an_error_at_once(opened):
    """There is no wait until the timeout."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))

        async with asyncio.timeout(50):
            with pytest.raises(StoreUnreachable, match="cannot be reached"):
                await opened(f"redis://127.0.0.1:{taken.getsockname()[1]}", timeout_s=600)


@POOLED_AND_SHARED
async def test_a_server_of_another_protocol_is_an_error(connect, serve, shared):
    """The error cannot be retried."""
    server = await serve(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with pytest.raises(StorageError, match="does not use the Redis protocol"):
        await connect(server).execute([("PING",)], shared=shared)


@POOLED_AND_SHARED
async def test_a_closed_pool_refuses_calls(connect, redis_server, shared):
    """After `close`, every call fails, and no connection is open."""
    connections = connect(redis_server)
    await connections.execute([("PING",)], shared=shared)
    await connections.close()

    with pytest.raises(StoreUnreachable, match="closed"):
        await connections.execute([("PING",)], shared=shared)


async def test_tls_and_acl(start_redis, certificate, opened):
    """rediss:// uses TLS, checks the certificate against `ca_file`, and authenticates the user."""
    cert, key = map(str, certificate)
    server = start_redis(
        "--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", cert, "--tls-auth-clients", "no",
        "--requirepass", "root", password="root", tls=True,
    )  # fmt: skip
    with server.client as client:
        client.execute_command("ACL", "SETUSER", "tape", "on", ">pass/word", "~tt:*", "+@all", "-@dangerous", "+info")

    store = await opened(server.url, username="tape", password="pass/word", ca_file=certificate[0])
    by_url = await opened(f"rediss://tape:pass%2Fword@{server.address}", ca_file=certificate[0])

    await store.open("r", {}, now_ms=1)
    assert ("r",) == (await by_url.list()).names
    with pytest.raises(StoreUnreachable, match=r"(?i)certificate"):
        await opened(server.url, username="tape", password="pass/word")
    with pytest.raises(StorageError, match="refused authentication"):
        await opened(server.url, username="tape", password="wrong", ca_file=certificate[0])
    with pytest.raises(StorageError, match="refused authentication"):
        await opened(server.url, ca_file=certificate[0])
    other = await opened(server.url, username="tape", password="pass/word", ca_file=certificate[0], prefix="no")
    with pytest.raises(StorageError, match="does not have a permission that TokenTape requires"):
        await other.open("r", {}, now_ms=1)
