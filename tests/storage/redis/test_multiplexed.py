"""The multiplexed connection: many callers, each with its own replies."""

import asyncio
import time
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage import StoreOptions
from storage.errors import StoreUnreachable
from storage.options import Address
from storage.redis.connections import connections_to


@pytest.fixture
async def connect():
    """Return a function that creates connection pools and closes them after the test."""
    made = []

    def connect(port, **options):
        made.append(connections_to("127.0.0.1", port, Address("single"), StoreOptions(**options)))
        return made[-1]

    yield connect
    for connections in made:
        await connections.close()


async def test_all_callers_share_one_connection(connect, redis_server):
    """Many concurrent callers use one connection, and each gets its own replies."""
    connections = connect(redis_server.port)

    calls = (connections.execute([("CLIENT", "ID"), ("ECHO", i)], shared=True) for i in range(1000))
    responses = await asyncio.gather(*calls)

    assert [b"%d" % i for i in range(1000)] == [echo for _, echo in responses]
    assert 1 == len({connection for connection, _ in responses})


async def test_commands_of_one_iteration_are_sent_in_one_write(connect, redis_server):
    """A write takes more time than a command."""
    connections = connect(redis_server.port)
    await connections.execute([("PING",)], shared=True)
    transport = Mock(wraps=connections._multiplexed._session._transport)
    connections._multiplexed._session._transport = transport

    await asyncio.gather(*(connections.execute([("ECHO", i), ("PING",)], shared=True) for i in range(10)))

    assert 1 == transport.write.call_count


async def test_long_commands_use_another_connection(connect, redis_server):
    """Commands of more than 256 KiB use a pooled connection."""
    connections = connect(redis_server.port)

    short, long = [
        await connections.execute([("CLIENT", "ID"), ("ECHO", b"x" * size)], shared=True) for size in (10, 2**18)
    ]

    assert short[0] != long[0]


async def test_cancelled_callers_do_not_shift_replies(connect, redis_server):
    """Callers are cancelled at any time; callers after them get their own replies."""
    connections = connect(redis_server.port)

    @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.lists(st.integers(0, 3), min_size=1, max_size=30))
    def draw(plan):
        plans.append(plan)

    plans = []
    draw()
    for plan in plans:
        tasks = []
        for number, turns in enumerate(plan):
            call = connections.execute([("ECHO", number)] * (1 + number % 3), shared=True)
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


async def test_a_connection_without_replies_is_closed_after_the_timeout(connect, stub):
    """Callers that waited for the whole timeout get an error; a caller at its end is retried on a new connection."""
    connections = connect(await stub(answered=1), timeout_s=0.4)
    assert [b"PONG"] == await connections.execute([("PING",)], shared=True)

    first = asyncio.ensure_future(connections.execute([("PING",)], shared=True))
    while connections._multiplexed._session._checks_without_reply < 3:  # of four checks
        await asyncio.sleep(0.001)
    second = asyncio.ensure_future(connections.execute([("PING",)], shared=True))

    with pytest.raises(StoreUnreachable, match=r"did not respond within 0.4 s"):
        await first
    assert [b"PONG"] == await second


async def test_a_blocked_event_loop_is_not_a_timeout(connect, redis_server):
    """A blocked event loop cannot read replies, so it does not make the store unreachable."""
    connections = connect(redis_server.port, timeout_s=0.5)
    await connections.execute([("PING",)], shared=True)

    call = asyncio.ensure_future(connections.execute([("PING",)], shared=True))
    await asyncio.sleep(0)
    time.sleep(1.5)  # noqa: ASYNC251 - blocks the event loop on purpose

    assert [b"PONG"] == await call


async def test_commands_are_retried_after_a_disconnect(connect, stub):
    """The server replies to two callers and disconnects; the third is retried on a new connection."""
    connections = connect(await stub(answered=2, last=None))

    responses = await asyncio.gather(*(connections.execute([("PING",)], shared=True) for _ in range(3)))

    assert [[b"PONG"]] * 3 == responses


@pytest.mark.parametrize("shared", [True, False])
async def test_a_write_is_retried_if_its_confirmation_is_lost(connect, stub, shared):
    """If the connection breaks before the confirmation, both commands are repeated on a new one."""
    with pytest.raises(StoreUnreachable, match="cannot be reached"):
        await connect(await stub(answered=1, last=None)).execute([("PING",)], shared=shared, confirmed=True)

    answered = await connect(await stub(answered=2, last=None)).execute([("PING",)], shared=shared, confirmed=True)
    assert [b"PONG", b"PONG"] == answered


async def test_callers_of_one_iteration_share_a_confirmation(connect, start):
    """Commands of one iteration of the event loop are confirmed by few PINGs, and each caller gets its own replies."""
    server = start()
    connections = connect(server.port)
    with server.client as client:
        before = client.info("commandstats").get("cmdstat_ping", {"calls": 0})["calls"]

        calls = (connections.execute([("ECHO", i)], shared=True, confirmed=True) for i in range(1000))
        responses = await asyncio.gather(*calls)

        assert [[b"%d" % i, b"PONG"] for i in range(1000)] == responses
        assert client.info("commandstats")["cmdstat_ping"]["calls"] - before < 500


async def test_a_caller_cancelled_before_its_confirmation_does_not_affect_others(connect, start):
    """The other callers of the same iteration get their replies."""
    connections = connect(start().port)
    calls = [asyncio.ensure_future(connections.execute([("ECHO", i)], shared=True, confirmed=True)) for i in range(3)]
    while not (session := connections._multiplexed._session) or sum(len(each.callers) for each in session._pending) < 3:
        await asyncio.sleep(0)
    while len(session._pending) > 1:  # until one PING is sent for all three
        await asyncio.sleep(0)
    calls[1].cancel()

    first, second, third = await asyncio.gather(*calls, return_exceptions=True)

    assert [[b"0", b"PONG"], [b"2", b"PONG"]] == [first, third]
    assert isinstance(second, asyncio.CancelledError)


async def test_a_reply_without_a_command_closes_the_connection(connect, stub):
    """No other caller gets it: the connection is closed, and the next call uses a new one."""
    port = await stub(answered=1, last=b"+STALE\r\n")
    connections = connect(port)
    assert [b"PONG"] == await connections.execute([("PING",)], shared=True)

    assert [b"PONG"] == await connections.execute([("PING",)], shared=True)


async def test_an_error_that_is_sent_before_the_first_command_is_the_reason(connect):
    """Valkey refuses further clients with an error and disconnects; the error of the call contains it."""

    async def refuse(reader, writer):
        writer.write(b"-ERR max number of clients reached\r\n")
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server:
        with pytest.raises(StoreUnreachable, match="max number of clients reached"):
            await connect(server.sockets[0].getsockname()[1]).execute([("PING",)], shared=True)
