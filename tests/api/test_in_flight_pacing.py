"""The start of calls that arrive at the same time."""

import asyncio
from contextlib import suppress
from itertools import pairwise

import orjson
from tests.support.fakes import proxying
from tests.support.recorded import load

from proxy.api.in_flight import StartPacing

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


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
