"""Several processes on one port: started, watched, replaced and stopped.

Holds the parent of the workers. It binds the port, so that it is found free or not at once and stays ours while a worker is
replaced, and answers nothing itself: the kernel gives connections to sockets that listen (SO_REUSEPORT), and its own does
not. It starts the one server of an embedded store. It must not know what a worker answers.

A worker that ends by itself is started again: at once, and after a growing pause when it keeps ending.
"""

import asyncio
import os
import socket
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import orjson

from proxy.config.addresses import split_listen
from proxy.config.settings import Settings
from proxy.server.app import store_options
from proxy.server.listener import RunningServer
from proxy.telemetry.logs import LOG
from storage import start_shared

# The worker imports what we import, wherever it is started: not what lies in the working directory by the same name.
_PROGRAM: Final = r"import sys; sys.path[:] = sys.argv.pop().split('\n'); from proxy.cli.main import main; main()"
_LONGEST_PAUSE_S: Final = 5.0
_STEADY_S: Final = 30.0  # a worker that lived so long is replaced at once


@asynccontextmanager
async def working(settings: Settings) -> AsyncIterator[RunningServer]:
    """The workers, listening; at the end they are told to stop, and waited for.

    Raises OSError, ValueError or StorageError if they cannot start, and OSError when one did not end cleanly.
    """
    if not hasattr(socket, "SO_REUSEPORT"):
        raise ValueError("workers need SO_REUSEPORT, which this system has not: set workers: 1")
    async with AsyncExitStack() as stack:
        changes: dict[str, Any] = {"listen": _hold(stack, settings.listen)}
        if settings.control.listen is not None:
            listen = _hold(stack, settings.control.listen)
            changes["control"] = settings.control.model_copy(update={"listen": listen})
        server = await start_shared(settings.store.url, store_options(settings.store))
        if server is not None:
            stack.push_async_callback(server.stop)
            changes["store"] = settings.store.model_copy(update={"url": f"unix:{server.socket}"})
        prefix = f"tokentape-{os.getpid()}-"
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True))
        workers = Workers(settings.model_copy(update=changes), Path(folder))
        try:
            yield await workers.start()
        finally:
            failed = await workers.stop()
    if failed:
        raise OSError(f"a worker did not stop cleanly ({failed}); the log has its own words")


class Workers:
    """The worker processes. `folder` is private to them. `start` inside the event loop, and then `stop`."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings = settings
        self._folder = folder
        self._processes: dict[int, Process] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        return f"<Workers {[process.pid for process in self._processes.values()]}>"

    async def start(self) -> RunningServer:
        """Return when each of them listens. Raises OSError, and the worker itself has said why."""
        served = await self._launch(0)  # alone: what is wrong with the settings or the store is told once
        await asyncio.gather(*map(self._launch, range(1, self._settings.workers)))
        create_task = asyncio.get_running_loop().create_task  # held in _tasks until stop awaits their end
        self._tasks += [create_task(self._watch(number)) for number in self._processes]
        return served

    async def stop(self) -> int:
        """Tell all of them to stop, and wait until they have; the first exit code that is not 0, if there is one."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in self._processes.values():
            with suppress(OSError, RuntimeError):  # ended by itself, and its pipe with it
                _line(process, "stop")
        return next(filter(None, [await process.wait() for process in self._processes.values()]), 0)

    async def _watch(self, number: int) -> None:
        """Start a worker again whenever it ends."""
        loop = asyncio.get_running_loop()
        pause_s = 0.0
        while True:
            born = loop.time()
            code = await self._processes[number].wait()
            if loop.time() - born > _STEADY_S:
                pause_s = 0.0
            LOG.error("worker %d ended by itself (%s); it is started again in %g s", number, code, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, pause_s * 2 or 0.1)
            with suppress(OSError):  # it ended before it listened, which the next turn sees
                await self._launch(number)

    async def _launch(self, number: int) -> RunningServer:
        """Start a worker and return when it listens. Raises OSError."""
        process = self._processes[number] = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-c", _PROGRAM, "worker", "\n".join(sys.path),
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,  # Ctrl-C in a terminal is for us, who tell them
        )  # fmt: skip
        settings = settings_of_worker(self._settings, number).to_json()
        _line(process, {"number": number, "folder": str(self._folder), "settings": settings})
        assert process.stdout is not None
        answer = await process.stdout.readline()
        if not answer:
            raise OSError(f"worker {number} ended before it listened ({await process.wait()})")
        return RunningServer(**orjson.loads(answer))


def settings_of_worker(settings: Settings, number: int) -> Settings:
    """The settings as one worker has them: a journal is one process's. The first has the one that a lone process has."""
    if number == 0:
        return settings
    path = settings.store.spool_path
    store = settings.store.model_copy(update={"spool_path": path.with_name(f"{path.name}.{number}")})
    return settings.model_copy(update={"store": store})


def refuse_left_journals(settings: Settings) -> None:
    """Raise ValueError if an earlier run with more workers left steps that none of these would store."""
    path = settings.store.spool_path
    for left in sorted(path.parent.glob(f"{path.name}.*")):
        number = left.name.removeprefix(f"{path.name}.")
        if number.isdecimal() and int(number) >= settings.workers and left.stat().st_size:
            raise ValueError(
                f"{left} holds steps that a worker could not store yet: serve with --workers {int(number) + 1} and "
                "on_failure: spool until /ready tells that none is spooled"
            )


def _line(process: Process, told: Any) -> None:
    assert process.stdin is not None
    process.stdin.write(orjson.dumps(told) + b"\n")


def _hold(stack: AsyncExitStack, listen: str) -> str:
    """Bind an address without listening on it, so that it is ours while the stack lives; the address, with its port."""
    host, port = split_listen(listen)
    if port:  # two that both say SO_REUSEPORT share a port, so it is tried without that first
        with _bound(host, port, shared=False):
            pass
    held = stack.enter_context(_bound(host, port, shared=True))
    return f"{f'[{host}]' if ':' in host else host}:{held.getsockname()[1]}"


def _bound(host: str, port: int, *, shared: bool) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
    return bound
