"""How much memory calls hold, and the clients that read nothing."""

import asyncio
import socket
from types import SimpleNamespace
from urllib.parse import urlsplit

import orjson
import pytest
from aiohttp import web
from fakes import proxying, settings_for
from prometheus_client import CollectorRegistry
from recorded import load
from stored import stored_steps, wait_for_steps

from proxy.api.memory_limit import InFlightBytes
from proxy.errors import Overloaded
from proxy.server.listener import running
from proxy.telemetry.metrics import make_metrics

WHOLE, STREAM = load("chat_ids_lp"), load("chat_ids_lp_stream")
CHAT = "/rollouts/r1/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"' + b"x" * 60_000 + b'"},"token_ids":[1]}]}\n\n'


@pytest.fixture
def endless(engine):
    """The engine streams for ever, and counts what it could send."""
    sent = []

    async def respond(request: web.Request, body: dict) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        while True:
            await response.write(EVENT)
            sent.append(len(EVENT))

    engine.respond = respond
    return sent


async def reading_nothing(url: str) -> socket.socket:
    """A client that asks for a stream and leaves it in its socket."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    address = urlsplit(url)
    await asyncio.get_running_loop().sock_connect(client, (address.hostname, address.port))
    body = orjson.dumps(BODY | {"stream": True})
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    await asyncio.get_running_loop().sock_sendall(client, head.encode() + body)
    return client


async def no_more_of(sent: list) -> int:
    """How much was sent, once it does not become more."""
    before = -1
    while before != len(sent) or not sent:
        before = len(sent)
        await asyncio.sleep(0.2)
    return sum(sent)


async def test_over_the_bound_new_calls_are_refused_and_those_in_flight_go_on(store, engine, http):
    """429 with Retry-After, in the dialect's shape; when there is room again, calls are taken."""
    hold = asyncio.Event()
    engine.streams([STREAM.response], then="end", after=hold)
    settings = settings_for(engine.url, agents={"max_bytes_in_flight": 1000})
    async with running(settings, store) as served:
        async with http.post(served.url + CHAT, json=BODY | {"stream": True}) as first:
            await first.content.readany()
            async with http.post(served.url + CHAT, json=BODY) as second:
                told = await second.json()
            hold.set()
            whole = await first.read()
        engine.plays(WHOLE)
        async with http.post(served.url + CHAT, json=BODY) as third:
            pass

    assert [200, 429, 200] == [first.status, second.status, third.status]
    assert ("overloaded", "1") == (told["error"]["code"], second.headers["Retry-After"])
    assert whole.endswith(b"data: [DONE]\n\n")
    assert 2 == len(await stored_steps(store, "r1"))


async def test_a_call_over_the_bound_alone_is_taken(store, engine, http):
    """A bound that nobody could pass would be a defect."""
    engine.plays(WHOLE)
    async with (
        running(settings_for(engine.url, agents={"max_bytes_in_flight": 1}), store) as served,
        http.post(served.url + CHAT, json=BODY) as response,
    ):
        pass

    assert 200 == response.status


async def test_what_left_clients_leave_behind_counts_until_it_is_stored(store, engine, http):
    """Steps that wait for a slow store take room too."""
    store.waiting["append"], store.reached["append"] = asyncio.Event(), asyncio.Event()
    engine.streams([STREAM.response[:2000]], then="hang")
    async with running(settings_for(engine.url, agents={"max_bytes_in_flight": 1500}), store) as served:
        async with http.post(served.url + CHAT, json=BODY | {"stream": True}) as first:
            await first.content.readany()
            first.close()
        await store.reached["append"].wait()
        async with http.post(served.url + CHAT, json=BODY) as second:
            pass
        store.waiting["append"].set()
        await wait_for_steps(store, "r1")
        engine.plays(WHOLE)
        async with http.post(served.url + CHAT, json=BODY) as third:
            pass

    assert [429, 200] == [second.status, third.status]


async def test_a_client_that_does_not_read_stops_its_engine(store, engine, endless):
    """Back-pressure: what lies between them is bounded, however long the engine would go on."""
    async with proxying(engine.url, store) as served:
        client = await reading_nothing(served.url)
        sent = await no_more_of(endless)
        client.close()

    assert sent < 16 * 2**20


async def test_a_stalled_client_is_cut_and_its_step_is_kept(store, engine, endless, http):
    """After `agents.client_stall_timeout_s` without a byte read, the engine is let go, and what came is a partial step."""
    async with running(settings_for(engine.url, agents={"client_stall_timeout_s": 0.2}), store) as served:
        client = await reading_nothing(served.url)
        (step,) = await wait_for_steps(store, "r1")
        await asyncio.wait_for(engine.aborted.wait(), 50)
        async with http.get(served.url + "/metrics") as response:
            metrics = await response.text()
        client.close()

    assert ("partial", False) == (step.status, step.delivered)
    assert "tokentape_stalled_clients_total 1.0" in metrics


async def test_a_slow_client_is_not_cut(store, engine, http):
    """Whoever reads now and then gets all of it."""
    response = STREAM.response.replace(b"data: [DONE]\n\n", EVENT * 60 + b"data: [DONE]\n\n")
    engine.streams([response], then="end")
    async with running(settings_for(engine.url, agents={"client_stall_timeout_s": 2}), store) as served:
        client = await reading_nothing(served.url)
        got = b""
        while b"data: [DONE]\n\n" not in got[-100:]:
            read = await asyncio.get_running_loop().sock_recv(client, 2**17)
            assert read
            got += read
            await asyncio.sleep(len(read) / 1_500_000)  # all of it takes longer than a client may stall
        client.close()

    assert ["complete"] == [step.status for step in await stored_steps(store, "r1")]


async def test_a_new_call_does_not_look_at_thousands(pressured):
    """Of many calls in flight the bytes are counted ten times a second, not with each new one."""
    looks = []

    class Held:
        @property
        def body_bytes(self):
            looks.append(1)
            return 10

    pressured.calls |= {Held() for _ in range(1000)}
    for _ in range(1000):
        reserved = pressured.reserve()
        reserved.grow(1)
        reserved.release()

    assert len(looks) < 20_000
    assert 10_000 == pressured.total_bytes()


async def test_a_request_holds_what_it_reserved_until_it_releases_it(pressured):
    """It grows before its bytes are there; alone it may grow over the limit, beside another one it may not."""
    first, second = pressured.reserve(), pressured.reserve()
    first.grow(600_000)
    first.grow(600_000)
    with pytest.raises(Overloaded, match="1200000 bytes"):
        second.grow(1)
    first.grow(-900_000)
    second.grow(700_000)
    with pytest.raises(Overloaded):
        first.grow(1)
    held = pressured.total_bytes()
    first.release()
    second.release()
    second.release()

    assert (1_000_000, 0) == (held, pressured.total_bytes())


async def test_the_oldest_call_tells_how_long_it_has_been(pressured):
    """None in flight, none old."""

    class Held:
        body_bytes = 0

        def __init__(self, started):
            self.started = started

    idle = pressured.oldest_s(now=100.0)
    pressured.calls |= {Held(70.0), Held(90.0)}

    assert (0.0, 30.0) == (idle, pressured.oldest_s(now=100.0))


@pytest.fixture
async def pressured():
    """A pressure of its own."""
    made = InFlightBytes(10**6, 60, make_metrics(CollectorRegistry()), SimpleNamespace(detached_bytes=0))
    yield made
    made.calls.clear()
    await made.close()
