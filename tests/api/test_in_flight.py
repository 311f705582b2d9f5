"""Calls in flight: their memory, clients that do not read, surplus rollouts, and starts at the same time."""

import asyncio
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from urllib.parse import urlsplit

import orjson
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from tests.support.fakes import proxying, settings_for
from tests.support.policies import policies_of
from tests.support.recorded import load
from tests.support.stored import stored_steps, wait_for_steps

from proxy.api.in_flight import ByteReservation, InFlightBytes, StartPacing, SurplusCalls
from proxy.errors import EngineResponseTooLarge, Overloaded
from proxy.rollouts.policy import Policy
from proxy.rollouts.rollout import write_fields
from proxy.server.listener import running
from proxy.telemetry.metrics import make_metrics

WHOLE, STREAM = load("chat_ids_lp"), load("chat_ids_lp_stream")
CHAT = "/rollouts/r1/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"' + b"x" * 60_000 + b'"},"token_ids":[1]}]}\n\n'


@pytest.fixture
def endless(engine):
    """An engine that streams without end, and the sizes of what it sent."""
    sent = []

    async def respond(request: web.Request, body: dict) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        while True:
            await response.write(EVENT)
            sent.append(len(EVENT))

    engine.respond = respond
    return sent


async def send_without_reading(url: str, *, receive_bytes: int = 4096) -> socket.socket:
    """Send a streamed call and read nothing of its response."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.setblocking(False)
    address = urlsplit(url)
    await asyncio.get_running_loop().sock_connect(client, (address.hostname, address.port))
    body = orjson.dumps(BODY | {"stream": True})
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    await asyncio.get_running_loop().sock_sendall(client, head.encode() + body)
    return client


async def wait_for_standstill(sent: list) -> int:
    """Wait until nothing more is sent; return the number of bytes."""
    before = -1
    while before != len(sent) or not sent:
        before = len(sent)
        for _ in range(20):  # of the loop, which may be slow
            await asyncio.sleep(0.01)
    return sum(sent)


async def test_over_the_memory_limit_new_calls_are_429_and_calls_in_flight_continue(store, engine, http):
    """The response has Retry-After and the dialect's shape; once memory is free, calls are accepted again."""
    hold = asyncio.Event()
    engine.streams([STREAM.response], then="end", after=hold)
    settings = settings_for(engine.url, agents={"max_bytes_in_flight": 1000})
    async with running(settings, store) as served:
        async with http.post(served.url + CHAT, json=BODY | {"stream": True}) as first:
            await first.content.readany()
            async with http.post(served.url + CHAT, json=BODY) as second:
                error = await second.json()
            hold.set()
            text = await first.read()
        engine.plays(WHOLE)
        async with http.post(served.url + CHAT, json=BODY) as third:
            pass

    assert [first.status, second.status, third.status] == [200, 429, 200]
    assert (error["error"]["code"], second.headers["Retry-After"]) == ("overloaded", "1")
    assert text.endswith(b"data: [DONE]\n\n")
    assert len(await stored_steps(store, "r1")) == 2


async def test_a_call_above_the_memory_limit_is_accepted_if_it_is_the_only_one(store, engine, http):
    engine.plays(WHOLE)
    async with (
        running(settings_for(engine.url, agents={"max_bytes_in_flight": 1}), store) as served,
        http.post(served.url + CHAT, json=BODY) as response,
    ):
        pass

    assert response.status == 200


async def test_a_step_of_a_disconnected_client_counts_until_it_is_stored(store, engine, http):
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

    assert [second.status, third.status] == [429, 200]


async def test_a_client_that_does_not_read_applies_back_pressure_to_the_engine(store, engine, endless):
    """The proxy buffers a limited number of bytes."""
    async with proxying(engine.url, store) as served:
        client = await send_without_reading(served.url)
        sent = await wait_for_standstill(endless)
        client.close()

    assert sent < 16 * 2**20


async def test_a_stalled_client_is_disconnected_and_its_step_is_recorded_as_partial(store, engine, endless, http):
    """The client read no byte for `agents.client_stall_timeout_s`; the request to the engine is aborted."""
    async with running(settings_for(engine.url, agents={"client_stall_timeout_s": 0.2}), store) as served:
        client = await send_without_reading(served.url)
        (step,) = await wait_for_steps(store, "r1")
        await asyncio.wait_for(engine.aborted.wait(), 50)
        async with http.get(served.url + "/metrics") as response:
            metrics = await response.text()
        client.close()

    assert (step.status, step.delivered) == ("partial", False)
    assert "tokentape_stalled_clients_total 1.0" in metrics


async def test_a_slow_client_gets_the_complete_stream(store, engine, http):
    response = STREAM.response.replace(b"data: [DONE]\n\n", EVENT * 200 + b"data: [DONE]\n\n")
    engine.streams([response], then="end")
    async with running(settings_for(engine.url, agents={"client_stall_timeout_s": 1}), store) as served:
        client = await send_without_reading(
            served.url, receive_bytes=2**18
        )  # few reads, so that load hardly slows them
        received = b""
        while b"data: [DONE]\n\n" not in received[-100:]:
            read = await asyncio.get_running_loop().sock_recv(client, 2**17)
            assert read
            received += read
            await asyncio.sleep(len(read) / 4_000_000)  # the whole stream takes longer than the stall timeout
        client.close()

    assert [step.status for step in await stored_steps(store, "r1")] == ["complete"]


@dataclass(eq=False)
class Held:
    """A call in flight."""

    body_bytes: int
    response_bytes: int = 0
    parsed_bytes: int = 0


READS = st.tuples(
    st.integers(0, 3), st.integers(1, 2**17), st.sampled_from(["stream", "cumulative", "whole"])
)  # of a call: items of a list, and the kind of response


@given(st.lists(st.integers(0, 10**5), min_size=4, max_size=4), st.lists(READS, max_size=20))
async def test_the_bytes_in_flight_belong_to_the_calls_in_flight(memory_limit, sizes, reads):
    """Calls count the bytes of requests and responses, and the memory for parsing responses; none are left at the end."""
    calls = [Held(size) for size in sizes]
    for call in calls:
        memory_limit.add(call)
    for index, items, kind in reads:
        with suppress(EngineResponseTooLarge):
            memory_limit.receive(
                calls[index], b"1," * items, 2**20, is_cumulative=kind == "cumulative", is_withheld=kind == "whole"
            )
            if kind == "whole":
                memory_limit.reserve(calls[index], 56 * items, 2**20)

        assert memory_limit.total_bytes() == sum(call.body_bytes + call.parsed_bytes for call in calls)
    for call in calls:
        memory_limit.remove(call)

    assert memory_limit.total_bytes() == 0


async def test_a_reservation_above_the_limit_requires_that_no_other_exists(memory_limit):
    """Memory is reserved before it is used, until it is released."""
    first, second = ByteReservation(memory_limit), ByteReservation(memory_limit)
    first.grow(600_000)
    first.grow(600_000)
    with pytest.raises(Overloaded, match="1200000 bytes"):
        second.grow(1)
    first.grow(-900_000)
    second.grow(700_000)
    with pytest.raises(Overloaded):
        first.grow(1)
    held = memory_limit.total_bytes()
    first.release()
    second.release()
    second.release()

    assert (held, memory_limit.total_bytes()) == (1_000_000, 0)


async def test_the_age_of_the_oldest_call_is_0_without_calls(memory_limit):
    class Held:
        body_bytes = 0

        def __init__(self, started):
            self.started = started

    idle = memory_limit.oldest_s(now=100.0)
    memory_limit.calls |= {Held(70.0), Held(90.0)}

    assert (idle, memory_limit.oldest_s(now=100.0)) == (0.0, 30.0)


@pytest.fixture
async def memory_limit():
    """A memory limit of 1 MB."""
    limit = InFlightBytes(10**6, 60, make_metrics(CollectorRegistry()), SimpleNamespace(detached_bytes=0))
    yield limit
    limit.calls.clear()
    await limit.close()


async def test_calls_that_engines_have_completed_are_not_stopped(memory_limit):
    """Their number is returned. Calls of other policies are not stopped."""
    stopped = []

    @dataclass(eq=False)
    class Call:
        step: object | None
        policy: Policy
        body_bytes: int = 0

        def stop(self, reason: str) -> None:
            stopped.append((self, reason))

    planner, judge = policies_of({"planner": {"models": ["p"]}}).named("planner"), policies_of().default
    first, completed, second = Call(None, planner), Call(object(), planner), Call(None, planner)
    memory_limit.calls |= {first, completed, second, Call(None, judge), Call(object(), judge)}

    assert memory_limit.stop_sampled("planner", "reason") == 1
    assert {(first, "reason"), (second, "reason")} == set(stopped)


async def test_calls_of_a_policy_and_of_its_held_endpoints_are_interrupted_unless_they_are_completed_or_wait(
    memory_limit,
):
    """Those that do not leave their engines are counted, and those that engines have completed."""
    interrupted = []

    @dataclass(eq=False)
    class Call:
        label: str
        step: object | None = None
        policy: Policy = field(default_factory=lambda: policies_of().default)
        leaves: bool = False
        is_waiting: bool = False
        body_bytes: int = 0

        @property
        def endpoint(self):
            return SimpleNamespace(label=self.label)

        def interrupt(self, reason: str, *, is_last: bool) -> None:
            interrupted.append((self, reason, is_last))
            self.is_waiting = self.leaves

    there, leaves, waits = Call("a"), Call("a", leaves=True), Call("a", is_waiting=True)
    completed, elsewhere = Call("a", step=object()), Call("b")
    judge = policies_of({"judge": {"models": ["j"]}}).named("judge")
    memory_limit.calls |= {there, leaves, waits, completed, elsewhere, Call("a", policy=judge)}
    for call in memory_limit.calls:
        call.policy.pause.mode = "wait"

    assert memory_limit.interrupt_sampled("default", "reason", {"a"}, is_last=False) == (1, 1)
    assert {(there, "reason", False), (leaves, "reason", False)} == set(interrupted)
    interrupted.clear()
    assert memory_limit.interrupt_sampled("default", "reason", None, is_last=True) == (2, 1)
    assert {(there, "reason", True), (elsewhere, "reason", True)} == set(interrupted)


async def test_many_calls_are_interrupted_over_several_iterations_of_the_event_loop(memory_limit):
    """Between them it serves others; all are counted at once."""
    interrupted = set()

    policy = policies_of().default
    policy.pause.mode = "wait"

    class Call:
        endpoint, step, is_waiting = SimpleNamespace(label="a"), None, False

        def interrupt(self, reason: str, *, is_last: bool) -> None:
            interrupted.add(self)

    Call.policy = policy
    memory_limit.calls |= {Call() for _ in range(50)}
    counts = memory_limit.interrupt_sampled("default", "reason", None, is_last=False)
    sizes = [len(interrupted)]
    while len(interrupted) < 50:
        await asyncio.sleep(0)
        sizes.append(len(interrupted))
    memory_limit.calls.clear()

    assert (counts, sizes) == ((50, 0), [16, 32, 48, 50])


@pytest.mark.parametrize("is_held", [True, False])
async def test_calls_that_went_on_before_their_turn_are_not_interrupted(memory_limit, is_held):
    """At another endpoint, or because the pause is over."""
    policy, interrupted = policies_of().default, []

    class Call:
        step, is_waiting = None, False

        def __init__(self) -> None:
            self.policy, self.endpoint = policy, SimpleNamespace(label="a")

        def interrupt(self, reason: str, *, is_last: bool) -> None:
            interrupted.append(self)

    memory_limit.calls |= {Call() for _ in range(50)}
    policy.pause.held, policy.pause.mode = frozenset("a" if is_held else ""), None if is_held else "wait"
    memory_limit.interrupt_sampled("default", "reason", {"a"} if is_held else None, is_last=False)
    if is_held:
        for call in memory_limit.calls:
            call.endpoint.label = "b"
    else:
        policy.pause.mode = None
    for _ in range(9):
        await asyncio.sleep(0)
    memory_limit.calls.clear()

    assert len(interrupted) == 16


class Call:
    """A call in flight."""

    def __init__(self, over_sampled) -> None:
        self.over_sampled = over_sampled
        self.stopped: list[str] = []

    def stop(self, reason: str) -> None:
        self.stopped.append(reason)


@pytest.fixture
def metrics():
    return make_metrics(CollectorRegistry())


@pytest.fixture
async def open_rollout(store):
    """Return a function that opens a rollout with these fields, and returns a call of it in flight."""

    async def opened(name, **fields):
        stored = await store.open(name, write_fields(fields), now_ms=1)
        return Call((name, stored.incarnation))

    return opened


async def test_only_calls_of_surplus_rollouts_are_stopped(store, open_rollout, metrics):
    surplus = await open_rollout("surplus", status="aborted", reason="surplus")
    others = [
        await open_rollout("open"),
        await open_rollout("late", status="aborted", reason="deadline"),
        await open_rollout("done", status="completed"),
    ]
    of_no_group = Call(None)
    of_before = Call(("surplus", "an earlier incarnation"))
    await SurplusCalls(store, {surplus, *others, of_no_group, of_before}, metrics).stop_surplus()

    assert surplus.stopped == ["its group is complete without it"]
    assert [call.stopped for call in others] == [[], [], []]


async def test_thousands_of_calls_are_looked_at(store, open_rollout, metrics):
    calls = {await open_rollout(f"r{n}", status="aborted", reason="surplus") for n in range(200)}
    await SurplusCalls(store, calls, metrics).stop_surplus()

    assert all(call.stopped for call in calls)


async def started(pacing: StartPacing, calls: int) -> tuple[list[int], list[asyncio.Task]]:
    """Start calls at once; return their numbers in the order of their starts, which grows, and their tasks."""
    order: list[int] = []

    async def call(number: int) -> None:
        await pacing.turn()
        order.append(number)

    tasks = [asyncio.create_task(call(number)) for number in range(calls)]
    await asyncio.sleep(0)
    return order, tasks


async def test_calls_that_arrive_together_start_in_order_a_few_per_iteration_of_the_event_loop():
    order, tasks = await started(StartPacing(4), 10)
    counts = [len(order)]
    while len(order) < 10:
        await asyncio.sleep(0)
        counts.append(len(order))
    await asyncio.gather(*tasks)

    assert [*range(10)] == order
    assert counts[0] == 4
    assert all(later - earlier <= 4 for earlier, later in pairwise(counts))


async def test_a_call_that_arrives_while_others_wait_starts_after_them():
    """In the iteration in which they start, and before they do."""
    pacing, order, loop = StartPacing(1), [], asyncio.get_running_loop()
    late = pacing.turn()

    async def call(name: str) -> None:
        await pacing.turn()
        order.append(name)

    def arrive() -> None:
        with suppress(StopIteration):  # which the end of a coroutine raises
            late.send(None)
            return
        order.append("late")

    calls = [asyncio.create_task(call("first"))]
    loop.call_soon(loop.call_soon, arrive)
    calls.append(asyncio.create_task(call("second")))
    await asyncio.gather(*calls)

    assert order == ["first", "second"]
    late.close()


async def test_a_cancelled_call_takes_no_turn():
    order, tasks = await started(StartPacing(2), 6)
    for task in tasks[2:4]:
        task.cancel()
    await asyncio.wait(tasks)

    assert order == [0, 1, 4, 5]


async def test_later_calls_start_at_once_after_a_burst():
    pacing = StartPacing(2)
    _, tasks = await started(pacing, 5)
    await asyncio.gather(*tasks)
    for _ in range(3):
        await asyncio.sleep(0)
    order, tasks = await started(pacing, 2)

    assert order == [0, 1]
    await asyncio.gather(*tasks)


async def test_other_requests_are_answered_while_calls_wait_for_their_turn(store, engine, http, monkeypatch):
    """The calls are sent to the engine once they may start."""
    engine.plays(load("chat_ids_lp"))
    may_start = asyncio.Event()
    monkeypatch.setattr(StartPacing, "turn", lambda _: may_start.wait())
    async with proxying(engine.url, store) as served:
        call = asyncio.create_task(http.post(f"{served.url}/rollouts/r1/v1/chat/completions", data=orjson.dumps(BODY)))
        async with http.get(f"{served.url}/health") as response:
            assert response.status == 200
        assert not call.done()
        assert not engine.requests
        may_start.set()
        async with await call as response:
            assert response.status == 200
    assert len(engine.requests) == 1
