"""Work in threads, background tasks, and the start of calls that arrive at the same time."""

import asyncio
import gc
import threading
from contextlib import suppress
from itertools import pairwise

import orjson
import pytest
from fakes import proxying
from recorded import load

from proxy.upstream.concurrency import BackgroundTasks, StartPacing, off_loop, run_all

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


async def test_small_work_runs_on_the_event_loop_and_large_work_in_a_thread():
    here = asyncio.get_running_loop()

    def runs_here() -> bool:
        try:
            return asyncio.get_running_loop() is here
        except RuntimeError:
            return False

    assert (True, False) == (await off_loop(3, 3, runs_here), await off_loop(4, 3, runs_here))


async def test_a_cancelled_caller_waits_for_the_thread():
    """Which may still use the body of the call."""
    started, may_end, ended = asyncio.Event(), threading.Event(), []
    loop = asyncio.get_running_loop()

    def work() -> None:
        loop.call_soon_threadsafe(started.set)
        may_end.wait()
        ended.append(True)

    working = asyncio.create_task(off_loop(1, 0, work))
    await started.wait()
    working.cancel()
    loop.call_later(0, may_end.set)
    with pytest.raises(asyncio.CancelledError):
        await working

    assert [True] == ended


async def test_some_works_run_at_the_same_time_and_their_results_are_in_order():
    """Each work is made when a task is free for it. There may be none."""
    together, made, running = asyncio.Barrier(3), [], []

    def work(number):
        made.append(number)

        async def run():
            running.append(number)
            await together.wait()
            running.remove(number)
            assert len(made) - number <= 6
            return number

        return run

    assert list(range(9)) == await run_all(map(work, range(9)), at_once=3)
    assert [] == running
    assert [] == await run_all([], at_once=3)


async def test_a_failed_work_cancels_the_others_and_is_raised():
    """After they have ended."""
    started, ended = asyncio.Event(), []

    async def wait():
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def fail():
        await started.wait()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await run_all([wait, fail, wait], at_once=2)

    assert [True] == ended


async def test_wait_awaits_background_tasks_and_the_tasks_that_they_start():
    """Garbage collection does not remove them."""
    tasks, done, go = BackgroundTasks(), [], asyncio.Event()

    async def second() -> None:
        done.append("second")

    async def first() -> None:
        await go.wait()
        tasks.start(second())
        done.append("first")

    tasks.start(first())
    gc.collect()
    asyncio.get_running_loop().call_soon(go.set)
    await tasks.wait()

    assert ["first", "second"] == done
    assert 0 == len(tasks)


async def test_the_exception_of_a_background_task_is_raised_on_await_and_not_logged(caplog):
    tasks = BackgroundTasks()

    async def fails() -> None:
        raise ValueError("wrong")

    task = tasks.start(fails())
    await tasks.wait()

    with pytest.raises(ValueError, match="wrong"):
        await task
    del task
    gc.collect()
    assert [] == caplog.records


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
    assert 4 == counts[0]
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

    assert ["first", "second"] == order
    late.close()


async def test_a_cancelled_call_takes_no_turn():
    order, tasks = await started(StartPacing(2), 6)
    for task in tasks[2:4]:
        task.cancel()
    await asyncio.wait(tasks)

    assert [0, 1, 4, 5] == order


async def test_later_calls_start_at_once_after_a_burst():
    pacing = StartPacing(2)
    _, tasks = await started(pacing, 5)
    await asyncio.gather(*tasks)
    for _ in range(3):
        await asyncio.sleep(0)
    order, tasks = await started(pacing, 2)

    assert [0, 1] == order
    await asyncio.gather(*tasks)


async def test_other_requests_are_answered_while_calls_wait_for_their_turn(store, engine, http, monkeypatch):
    """The calls are sent to the engine once they may start."""
    engine.plays(load("chat_ids_lp"))
    may_start = asyncio.Event()
    monkeypatch.setattr(StartPacing, "turn", lambda _: may_start.wait())
    async with proxying(engine.url, store) as served:
        call = asyncio.create_task(http.post(f"{served.url}/rollouts/r1/v1/chat/completions", data=orjson.dumps(BODY)))
        async with http.get(f"{served.url}/health") as response:
            assert 200 == response.status
        assert not call.done()
        assert not engine.requests
        may_start.set()
        async with await call as response:
            assert 200 == response.status
    assert 1 == len(engine.requests)
