"""Work in threads and background tasks."""

import asyncio
import gc

import pytest

from proxy.upstream.concurrency import LARGE_BYTES, BackgroundTasks, in_thread_if, off_loop


async def test_small_work_runs_on_the_event_loop_and_large_work_in_a_thread():
    here = asyncio.get_running_loop()

    def runs_here() -> bool:
        try:
            return asyncio.get_running_loop() is here
        except RuntimeError:
            return False

    assert (True, False) == (await off_loop(LARGE_BYTES, runs_here), await off_loop(LARGE_BYTES + 1, runs_here))
    assert (True, False) == (await in_thread_if(3, 3, runs_here), await in_thread_if(4, 3, runs_here))


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
