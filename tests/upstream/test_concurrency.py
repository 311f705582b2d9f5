"""Work in threads, and background tasks."""

import asyncio
import gc
import threading

import pytest

from proxy.errors import EngineError
from proxy.upstream.concurrency import BackgroundTasks, BackgroundWork, off_loop, run_all
from storage.errors import StorageError

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


async def test_small_work_runs_on_the_event_loop_and_large_work_in_a_thread():
    here = asyncio.get_running_loop()

    def runs_here() -> bool:
        try:
            return asyncio.get_running_loop() is here
        except RuntimeError:
            return False

    assert (await off_loop(3, 3, runs_here), await off_loop(4, 3, runs_here)) == (True, False)


@pytest.mark.parametrize("times", [1, 2])
async def test_a_cancelled_caller_waits_for_the_thread(times):
    """Which may still use the body of the call; also if it is cancelled again meanwhile."""
    started, may_end, ended = asyncio.Event(), threading.Event(), []
    loop = asyncio.get_running_loop()

    def work() -> None:
        loop.call_soon_threadsafe(started.set)
        may_end.wait()
        ended.append(True)

    working = asyncio.create_task(off_loop(1, 0, work))
    await started.wait()
    for _ in range(times):
        working.cancel()
        await asyncio.sleep(0)
    loop.call_later(0, may_end.set)
    with pytest.raises(asyncio.CancelledError):
        await working

    assert ended == [True]


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

    assert await run_all(map(work, range(9)), at_once=3) == list(range(9))
    assert running == []
    assert await run_all([], at_once=3) == []


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

    assert ended == [True]


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

    assert done == ["first", "second"]
    assert len(tasks) == 0


@pytest.mark.parametrize(
    ("error", "logged"),
    [(EngineError("wrong"), []), (StorageError("wrong"), []), (ValueError("wrong"), ["Background task failed"])],
)
async def test_a_defect_in_a_background_task_is_logged(caplog, error, logged):
    """Nobody may await it. It is raised for those who do, as are errors of engines and the store, which are not logged."""
    tasks = BackgroundTasks()

    async def fails() -> None:
        raise error

    task = tasks.start(fails())
    await tasks.wait()

    with pytest.raises(type(error), match="wrong"):
        await task
    del task
    gc.collect()
    assert logged == [record.getMessage() for record in caplog.records]


async def test_background_work_that_ends_by_an_error_is_logged_at_once(caplog):
    class Sweep(BackgroundWork):
        async def _run(self) -> None:
            raise ValueError("wrong")

    sweep = Sweep().start()
    await asyncio.wait([sweep._task])
    await sweep.close()

    assert [record.getMessage() for record in caplog.records] == ["Sweep has ended by an unexpected error"]
