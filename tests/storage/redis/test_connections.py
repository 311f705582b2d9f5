"""Connections to a server: the shared one, on which many callers get their own replies; the pool; TLS and ACLs."""

import asyncio
import socket
import time
from contextlib import suppress
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage import StoreOptions
from storage.errors import StorageError, StoreUnreachable
from storage.opening import connections_to
from storage.options import Address

POOLED_AND_SHARED = pytest.mark.parametrize("shared", [False, True], ids=["pooled", "shared"])


@pytest.fixture
async def connect():
    """Return a function that creates connection pools and closes them after the test."""
    made = []

    def connect(server, **options):
        address = Address("single", tls=getattr(server, "tls", False))
        port = server if isinstance(server, int) else server.port
        made.append(connections_to("127.0.0.1", port, address, StoreOptions(**options)))
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
        b"", [("ECHO", "a"), ("NONSENSE",), ("ECHO", b"\x00\xff"), ("ECHO", 7)], shared=shared
    )

    assert [replies[0], *replies[2:]] == [b"a", b"\x00\xff", b"7"]
    assert "unknown command" in str(replies[1])


async def test_callers_wait_for_a_free_connection(connect, redis_server):
    """If there are more callers than connections, callers wait, and no further connection is opened."""
    connections = connect(redis_server, max_connections=2)

    responses = await asyncio.gather(*(connections.execute(b"", [("CLIENT", "ID"), ("ECHO", i)]) for i in range(50)))

    assert [b"%d" % i for i in range(50)] == [echo for _, echo in responses]
    assert len({connection for connection, _ in responses}) <= 2


async def test_the_reply_to_a_cancelled_call_is_not_used_for_the_next(connect, redis_server, until):
    """Another caller never gets the reply to a cancelled call."""
    connections = connect(redis_server, max_connections=1)
    waiting = asyncio.ensure_future(connections.execute(b"", [("BLPOP", "nothing", 5), ("ECHO", "stale")]))
    other = connect(redis_server)

    async def is_blocked():
        return b"blocked_clients:1" in (await other.execute(b"", [("INFO", "clients")]))[0]

    await until(is_blocked)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting

    assert await connections.execute(b"", [("ECHO", "fresh")]) == [b"fresh"]


@POOLED_AND_SHARED
async def test_connections_that_the_server_closed_are_replaced(connect, redis_server, shared):
    """After the server has closed all connections, the next call succeeds."""
    connections = connect(redis_server)
    await asyncio.gather(*(connections.execute(b"", [("PING",)], shared=shared) for _ in range(5)))
    with redis_server.client as client:
        client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    responses = await asyncio.gather(*(connections.execute(b"", [("ECHO", i)], shared=shared) for i in range(10)))

    assert [[b"%d" % i] for i in range(10)] == responses


@POOLED_AND_SHARED
async def test_a_server_without_replies_is_unreachable_after_the_timeout(serve, connect, shared):
    """A server that accepts a connection and never replies makes a call fail after the timeout."""
    server = await serve()
    connections = connect(server, timeout_s=0.1)

    with pytest.raises(StoreUnreachable, match=r"127.0.0.1:\d+ did not respond within 0.1 s"):
        await connections.execute(b"", [("PING",)], shared=shared)


async def test_the_timeout_includes_the_wait_for_a_connection(serve, connect):
    """Callers that wait for a free connection fail after the timeout as well."""
    server = await serve()
    connections = connect(server, timeout_s=0.1, max_connections=1)

    responses = await asyncio.gather(*(connections.execute(b"", [("PING",)]) for _ in range(5)), return_exceptions=True)

    assert [type(response) for response in responses] == [StoreUnreachable] * 5


async def test_a_refused_connection_is_an_error_at_once(opened):
    """There is no wait until the timeout."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))

        async with asyncio.timeout(50):
            with pytest.raises(StoreUnreachable, match="cannot be reached"):
                await opened(f"redis://127.0.0.1:{taken.getsockname()[1]}", timeout_s=600)


@POOLED_AND_SHARED
async def test_a_server_of_another_protocol_is_an_error(serve, connect, shared):
    """The error cannot be retried."""
    server = await serve(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with pytest.raises(StorageError, match="does not use the Redis protocol"):
        await connect(server).execute(b"", [("PING",)], shared=shared)


@POOLED_AND_SHARED
async def test_a_closed_pool_refuses_calls(connect, redis_server, shared):
    """After `close`, every call fails, and no connection is open."""
    connections = connect(redis_server)
    await connections.execute(b"", [("PING",)], shared=shared)
    await connections.close()

    with pytest.raises(StoreUnreachable, match="closed"):
        await connections.execute(b"", [("PING",)], shared=shared)


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
    assert (await by_url.list()).names == ("r",)
    with pytest.raises(StoreUnreachable, match=r"(?i)certificate"):
        await opened(server.url, username="tape", password="pass/word")
    with pytest.raises(StorageError, match="refused authentication"):
        await opened(server.url, username="tape", password="wrong", ca_file=certificate[0])
    with pytest.raises(StorageError, match="refused authentication"):
        await opened(server.url, ca_file=certificate[0])
    with pytest.raises(StorageError, match="does not have a permission that TokenTape requires"):
        await opened(server.url, username="tape", password="pass/word", ca_file=certificate[0], prefix="no")


async def test_all_callers_share_one_connection(connect, redis_server):
    """Many concurrent callers use one connection, and each gets its own replies."""
    connections = connect(redis_server)

    calls = (connections.execute(b"", [("CLIENT", "ID"), ("ECHO", i)], shared=True) for i in range(1000))
    responses = await asyncio.gather(*calls)

    assert [b"%d" % i for i in range(1000)] == [echo for _, echo in responses]
    assert len({connection for connection, _ in responses}) == 1


async def test_commands_of_one_iteration_are_sent_in_one_write(connect, redis_server):
    """A write takes more time than a command."""
    connections = connect(redis_server)
    await connections.execute(b"", [("PING",)], shared=True)
    transport = Mock(wraps=connections._session._transport)
    connections._session._transport = transport

    await asyncio.gather(*(connections.execute(b"", [("ECHO", i), ("PING",)], shared=True) for i in range(10)))

    assert transport.write.call_count == 1


async def test_long_commands_use_another_connection(connect, redis_server):
    """Commands of more than 256 KiB use a pooled connection."""
    connections = connect(redis_server)

    short, long = [
        await connections.execute(b"", [("CLIENT", "ID"), ("ECHO", b"x" * size)], shared=True) for size in (10, 2**18)
    ]

    assert short[0] != long[0]


async def test_cancelled_callers_do_not_shift_replies(connect, redis_server):
    """Callers are cancelled at any time; callers after them get their own replies."""
    connections = connect(redis_server)

    @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.lists(st.integers(0, 3), min_size=1, max_size=30))
    def draw(plan):
        plans.append(plan)

    plans = []
    draw()
    for plan in plans:
        tasks = []
        for number, turns in enumerate(plan):
            call = connections.execute(b"", [("ECHO", number)] * (1 + number % 3), shared=True)
            tasks.append(asyncio.ensure_future(call))
            for _ in range(turns):
                await asyncio.sleep(0)
            if turns:
                tasks[number // 2].cancel()
        responses = await asyncio.gather(*tasks, return_exceptions=True)
        for number, response in enumerate(responses):
            assert isinstance(response, asyncio.CancelledError) or [b"%d" % number] * (1 + number % 3) == response


@pytest.fixture
async def stub():
    """Return a function that starts a server, which replies PONG `answered` times and then writes `last`; None: disconnects."""
    servers, writers = [], []

    async def stub(answered, last=b""):
        async def respond(reader, writer):
            writers.append(writer)
            left = answered
            while left and (size := await reader.readline()):
                words = [(await reader.readline(), await reader.readline())[1] for _ in range(int(size[1:]))]
                is_ping = words[0] == b"PING\r\n"  # redis-py sends other commands first
                left -= is_ping
                writer.write(b"+PONG\r\n" if is_ping else b"+OK\r\n")
            if last is None:
                writer.close()
            else:
                writer.write(last)

        servers.append(await asyncio.start_server(respond, "127.0.0.1", 0))
        return servers[-1].sockets[0].getsockname()[1]

    yield stub
    for writer in writers:
        writer.close()
    for server in servers:
        server.close()


async def test_a_connection_without_replies_is_closed_after_the_timeout(stub, connect):
    """Callers that waited for the whole timeout get an error; a caller at its end is retried on a new connection."""
    connections = connect(await stub(answered=1), timeout_s=0.4)
    assert await connections.execute(b"", [("PING",)], shared=True) == [b"PONG"]

    first = asyncio.ensure_future(connections.execute(b"", [("PING",)], shared=True))
    while connections._session._checks_without_reply < 19:  # of twenty checks
        await asyncio.sleep(0.001)
    second = asyncio.ensure_future(connections.execute(b"", [("PING",)], shared=True))

    with pytest.raises(StoreUnreachable, match=r"did not respond within 0.4 s"):
        await first
    assert await second == [b"PONG"]


async def test_a_blocked_event_loop_is_not_a_timeout(connect, redis_server):
    """A blocked event loop cannot read replies, so it does not make the store unreachable."""
    connections = connect(redis_server, timeout_s=0.5)
    await connections.execute(b"", [("PING",)], shared=True)

    call = asyncio.ensure_future(connections.execute(b"", [("PING",)], shared=True))
    await asyncio.sleep(0)
    time.sleep(1.5)  # noqa: ASYNC251 - blocks the event loop on purpose

    assert await call == [b"PONG"]


async def test_commands_are_retried_after_a_disconnect(stub, connect):
    """The server replies to two callers and disconnects; the third is retried on a new connection."""
    connections = connect(await stub(answered=2, last=None))

    responses = await asyncio.gather(*(connections.execute(b"", [("PING",)], shared=True) for _ in range(3)))

    assert responses == [[b"PONG"]] * 3


@pytest.mark.parametrize("shared", [True, False])
async def test_a_write_is_retried_if_its_confirmation_is_lost(stub, connect, shared):
    """If the connection breaks before the confirmation, both commands are repeated on a new one."""
    with pytest.raises(StoreUnreachable, match="cannot be reached"):
        await connect(await stub(answered=1, last=None)).execute(b"", [("PING",)], shared=shared, confirmed=True)

    answered = await connect(await stub(answered=2, last=None)).execute(b"", [("PING",)], shared=shared, confirmed=True)
    assert answered == [b"PONG", b"PONG"]


async def test_callers_of_one_iteration_share_a_confirmation(connect, start):
    """Commands of one iteration of the event loop are confirmed by few PINGs, and each caller gets its own replies."""
    server = start()
    connections = connect(server)
    with server.client as client:
        before = client.info("commandstats").get("cmdstat_ping", {"calls": 0})["calls"]

        calls = (connections.execute(b"", [("ECHO", i)], shared=True, confirmed=True) for i in range(1000))
        responses = await asyncio.gather(*calls)

        assert [[b"%d" % i, b"PONG"] for i in range(1000)] == responses
        assert client.info("commandstats")["cmdstat_ping"]["calls"] - before < 500


async def test_a_caller_cancelled_before_its_confirmation_does_not_affect_others(connect, start):
    """The other callers of the same iteration get their replies."""
    connections = connect(start())
    calls = [
        asyncio.ensure_future(connections.execute(b"", [("ECHO", i)], shared=True, confirmed=True)) for i in range(3)
    ]
    while not (session := connections._session) or sum(len(each.callers) for each in session._pending) < 3:
        await asyncio.sleep(0)
    while len(session._pending) > 1:  # until one PING is sent for all three
        await asyncio.sleep(0)
    calls[1].cancel()

    first, second, third = await asyncio.gather(*calls, return_exceptions=True)

    assert [first, third] == [[b"0", b"PONG"], [b"2", b"PONG"]]
    assert isinstance(second, asyncio.CancelledError)


async def test_a_reply_without_a_command_closes_the_connection(stub, connect):
    """No other caller gets it: the connection is closed, and the next call uses a new one."""
    port = await stub(answered=1, last=b"+STALE\r\n")
    connections = connect(port)
    assert await connections.execute(b"", [("PING",)], shared=True) == [b"PONG"]

    assert await connections.execute(b"", [("PING",)], shared=True) == [b"PONG"]


async def test_an_error_that_is_sent_before_the_first_command_is_the_reason(connect):
    """Valkey refuses further clients with an error and disconnects; the error of the call contains it."""

    async def refuse(reader, writer):
        writer.write(b"-ERR max number of clients reached\r\n")
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server:
        connections = connect(server.sockets[0].getsockname()[1])
        with pytest.raises(StoreUnreachable, match="max number of clients reached"):
            await connections.execute(b"", [("PING",)], shared=True)
        await connections.close()


@POOLED_AND_SHARED
async def test_a_retired_server_ends_the_commands_that_wait_for_it(serve, connect, shared):
    """They need not wait for the timeout: another server has the keys."""
    connections = connect(await serve(), timeout_s=600)
    waiting = [asyncio.create_task(connections.execute(b"", [("PING",)], shared=shared)) for _ in range(3)]
    while not (connections._exchanges or connections._session):
        await asyncio.sleep(0)
    connections.retire()

    async with asyncio.timeout(50):
        failures = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(failure) for failure in failures] == [StoreUnreachable] * 3
