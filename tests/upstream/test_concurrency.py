"""Work beside the event loop."""

import asyncio
import gc

import pytest

from proxy.upstream.concurrency import LARGE_BYTES, BackgroundTasks, in_thread_if, off_loop


async def test_little_work_is_done_at_once_and_much_in_a_thread():
    """So that a small body costs no change of threads, and a large one blocks no other call."""
    here = asyncio.get_running_loop()

    def runs_here() -> bool:
        try:
            return asyncio.get_running_loop() is here
        except RuntimeError:
            return False

    assert (True, False) == (await off_loop(LARGE_BYTES, runs_here), await off_loop(LARGE_BYTES + 1, runs_here))
    assert (True, False) == (await in_thread_if(3, 3, runs_here), await in_thread_if(4, 3, runs_here))


async def test_a_background_task_outlives_the_garbage_collector_and_is_waited_for():
    """With the tasks that are started meanwhile."""
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


async def test_the_failure_of_a_background_task_reaches_who_awaits_it_and_is_not_logged_again(caplog):
    """It is retrieved once it is done."""
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
