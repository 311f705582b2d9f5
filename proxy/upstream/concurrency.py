"""Blocking work in threads, and background tasks."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, Final, ParamSpec, Self, TypeVar

from proxy.errors import ProxyError
from proxy.telemetry.logs import LOG
from storage.errors import StorageError

P = ParamSpec("P")
T = TypeVar("T")

LARGE_BYTES: Final = 2**16  # of JSON: parsing and validating it takes a few milliseconds, at most 30
PLAIN_BYTES: Final = 2**18  # parsing, writing, hashing or compressing them, without Python code, takes milliseconds
LONG_IDS: Final = 2**15  # token ids: comparing, converting or hashing them takes about a millisecond


async def off_loop(size: int, limit: int, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Run `work` in a thread if `size` is above `limit`, so that it does not block the event loop; else run it at once."""
    return work(*args, **named) if size <= limit else await in_thread(work, *args, **named)


async def in_thread(work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Run `work` in a thread. A cancelled caller waits for its end: nothing else may use what it works on meanwhile."""
    working = asyncio.get_running_loop().create_task(asyncio.to_thread(work, *args, **named))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        while not working.done():  # it may be cancelled again
            with suppress(asyncio.CancelledError):
                await asyncio.wait([working])
        raise


async def run_all(works: Iterable[Callable[[], Awaitable[T]]], *, at_once: int) -> list[T]:
    """Run `at_once` of these works at the same time, and return the results of all in their order.

    The first failure cancels the others, and is raised once they have ended.
    """
    results: dict[int, T] = {}
    remaining = iter(enumerate(works))

    async def run() -> None:
        for number, work in remaining:  # one iterator for all tasks
            results[number] = await work()

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(run())
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    return [results[number] for number in range(len(results))]


class BackgroundTasks:
    """References to tasks that nothing awaits: the event loop has weak references only, so they could be garbage-collected."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Run a coroutine as a task, and keep a reference to it until it is done."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def cancel(self) -> None:
        """Cancel every task."""
        for task in self._tasks:
            task.cancel()

    async def wait(self) -> None:
        """Wait until every task is done, including tasks that are started while waiting."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _done(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()  # retrieved, or asyncio logs it again
        if error is not None and not isinstance(error, ProxyError | StorageError):  # a defect, which nobody may await
            LOG.error("Background task failed", exc_info=error)


class BackgroundWork:
    """Work in one task, from `start` until `close`; classes define it in `_run`."""

    _task: "asyncio.Task[None] | None" = None

    def start(self) -> Self:
        """Start the work."""
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(self._ended)
        return self

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            LOG.error("%s has ended by an unexpected error", type(self).__name__, exc_info=error)

    async def close(self) -> None:
        """Stop the work."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        raise NotImplementedError
