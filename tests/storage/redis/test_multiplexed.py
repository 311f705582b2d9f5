"""The line: one connection that many share, and nobody gets another's answer."""

import asyncio
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage import StoreOptions
from storage.errors import StoreUnreachable
from storage.options import Address
from storage.redis.connections import connections_to


@pytest.fixture
async def connect():
    """Makes connections that are closed with the test."""
    made = []

    def connect(port, **options):
        made.append(connections_to("127.0.0.1", port, Address("single"), StoreOptions(**options)))
        return made[-1]

    yield connect
    for connections in made:
        await connections.close()


async def test_all_share_one_connection(connect, redis_server):
    """However many ask at once, there is one connection, and each gets its own answer."""
    connections = connect(redis_server.port)

    asks = (connections.ask([("CLIENT", "ID"), ("ECHO", i)], shared=True) for i in range(1000))
    answers = await asyncio.gather(*asks)

    assert [b"%d" % i for i in range(1000)] == [echo for _, echo in answers]
    assert 1 == len({connection for connection, _ in answers})


async def test_what_is_long_does_not_hold_up_the_line(connect, redis_server):
    """Commands of more than 256 kB go on a connection of their own."""
    connections = connect(redis_server.port)

    short, long = [
        await connections.ask([("CLIENT", "ID"), ("ECHO", b"x" * size)], shared=True) for size in (10, 2**18)
    ]

    assert short[0] != long[0]


async def test_whoever_leaves_takes_no_answer_along(connect, redis_server):
    """Callers are cancelled at any moment; those behind them still get their own answers."""
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
            asking = connections.ask([("ECHO", number)] * (1 + number % 3), shared=True)
            tasks.append(asyncio.ensure_future(asking))
            for _ in range(turns):
                await asyncio.sleep(0)
            if turns:
                tasks[number // 2].cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        for number, answer in enumerate(answers):
            assert isinstance(answer, asyncio.CancelledError) or [b"%d" % number] * (1 + number % 3) == answer


@pytest.fixture
async def stub():
    """A server that answers its first `answered` commands with PONG, and then writes `last`; None: hangs up."""
    servers, writers = [], []

    async def stub(answered, last=b""):
        async def answer(reader, writer):
            writers.append(writer)
            left = answered
            while left and (size := await reader.readline()):
                words = [(await reader.readline(), await reader.readline())[1] for _ in range(int(size[1:]))]
                is_asked = words[0] == b"PING\r\n"  # redis-py says a few things of its own first
                left -= is_asked
                writer.write(b"+PONG\r\n" if is_asked else b"+OK\r\n")
            if last is None:
                writer.close()
            else:
                writer.write(last)

        servers.append(await asyncio.start_server(answer, "127.0.0.1", 0))
        return servers[-1].sockets[0].getsockname()[1]

    yield stub
    for writer in writers:
        writer.close()
    for server in servers:
        server.close()


async def test_when_the_line_falls_silent_it_is_given_up(connect, stub):
    """Who waited for all of the time is told so; who asked at its end asks again on a new connection."""
    connections = connect(await stub(answered=1), timeout_s=0.4)
    assert [b"PONG"] == await connections.ask([("PING",)], shared=True)

    first = asyncio.ensure_future(connections.ask([("PING",)], shared=True))
    while connections._line._talk._silent < 3:  # of four looks
        await asyncio.sleep(0.001)
    second = asyncio.ensure_future(connections.ask([("PING",)], shared=True))

    with pytest.raises(StoreUnreachable, match=r"did not answer within 0.4 s"):
        await first
    assert [b"PONG"] == await second


async def test_while_we_stand_still_nobody_else_is_silent(connect, redis_server):
    """An event loop that is busy for longer than the timeout does not make the store one that is away."""
    connections = connect(redis_server.port, timeout_s=0.5)
    await connections.ask([("PING",)], shared=True)

    asking = asyncio.ensure_future(connections.ask([("PING",)], shared=True))
    await asyncio.sleep(0)
    time.sleep(1.5)  # noqa: ASYNC251 - the very thing

    assert [b"PONG"] == await asking


async def test_when_the_server_hangs_up_all_ask_once_more(connect, stub):
    """One connection answers two and goes; the third is answered on the next."""
    connections = connect(await stub(answered=2, last=None))

    answers = await asyncio.gather(*(connections.ask([("PING",)], shared=True) for _ in range(3)))

    assert [[b"PONG"]] * 3 == answers


@pytest.mark.parametrize("shared", [True, False])
async def test_a_reply_without_its_confirmation_is_none(connect, stub, shared):
    """Where the connection breaks before the confirmation, both are repeated on the next one."""
    with pytest.raises(StoreUnreachable, match="cannot be reached"):
        await connect(await stub(answered=1, last=None)).ask([("PING",)], shared=shared, confirmed=True)

    answered = await connect(await stub(answered=2, last=None)).ask([("PING",)], shared=shared, confirmed=True)
    assert [b"PONG", b"PONG"] == answered


async def test_callers_of_one_turn_share_a_confirmation(connect, start):
    """What many send in one turn of the event loop is confirmed by few PINGs, and each caller has its own reply."""
    server = start()
    connections = connect(server.port)
    with server.client as client:
        before = client.info("commandstats").get("cmdstat_ping", {"calls": 0})["calls"]

        asks = (connections.ask([("ECHO", i)], shared=True, confirmed=True) for i in range(1000))
        answers = await asyncio.gather(*asks)

        assert [[b"%d" % i, b"PONG"] for i in range(1000)] == answers
        assert client.info("commandstats")["cmdstat_ping"]["calls"] - before < 500


async def test_a_caller_that_leaves_before_its_confirmation_delays_nobody(connect, start):
    """Others whose replies came in the same turn get theirs."""
    connections = connect(start().port)
    asking = [asyncio.ensure_future(connections.ask([("ECHO", i)], shared=True, confirmed=True)) for i in range(3)]
    while not connections._line._talk or not connections._line._talk._unconfirmed:
        await asyncio.sleep(0)
    asking[1].cancel()

    first, second, third = await asyncio.gather(*asking, return_exceptions=True)

    assert [[b"0", b"PONG"], [b"2", b"PONG"]] == [first, third]
    assert isinstance(second, asyncio.CancelledError)


async def test_what_nobody_asked_for_breaks_the_line(connect, stub):
    """An answer too many would become another caller's: the connection is given up, and the next call has a new one."""
    port = await stub(answered=1, last=b"+STALE\r\n")
    connections = connect(port)
    assert [b"PONG"] == await connections.ask([("PING",)], shared=True)

    assert [b"PONG"] == await connections.ask([("PING",)], shared=True)
