"""The supervisor of workers, which starts, restarts and stops several processes on one port, and the worker's side of it.

The supervisor listens, and hands each connection over to a worker (see `handover`). It starts the server of an embedded store.
A worker that exits is restarted: at once, and after increasing delays when it keeps exiting.

The first line on a worker's standard input contains the settings, so that no secret is on a command line. The next line stops
the worker, and so does the end of the pipe, when the supervisor is gone. SIGTERM and SIGINT stop a worker too, and repeated
ones do nothing more: service managers signal all processes. The end of the pipe after a stop line kills the worker: the
supervisor received a second signal.
"""

import asyncio
import os
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import orjson

from proxy.config.addresses import split_listen
from proxy.config.settings import Settings
from proxy.server.handover import Acceptor
from proxy.server.listener import RunningServer, listen_at, running
from proxy.server.shutdown import ShutdownSignal, stopping
from proxy.telemetry.logs import LOG, set_up
from proxy.telemetry.metrics import DECLARED
from proxy.telemetry.multiprocess import Family, WorkerSlot, encoded, respond_at
from storage import start_shared

# The worker gets our sys.path, so that it does not import modules from the working directory.
_PROGRAM: Final = r"import sys; sys.path[:] = sys.argv.pop().split('\n'); from tokentape.__main__ import main; main()"
_MAX_LINE_BYTES: Final = 2**26  # settings may contain JSON Schemas of tools
_MAX_DELAY_S: Final = 5.0
_STABLE_S: Final = 30.0  # a worker that ran this long is restarted at once


@asynccontextmanager
async def working(settings: Settings) -> AsyncIterator[RunningServer]:
    """Run the workers; at the end, stop them and wait for them.

    Raises:
        OSError: The workers cannot start, or one did not stop cleanly.
        ValueError: The configuration is invalid.
        StorageError: The embedded store cannot start.
    """
    async with AsyncExitStack() as stack:
        listen, acceptor = _accept(stack, settings.listen)
        changes: dict[str, Any] = {"listen": listen}
        acceptors = [acceptor]
        if settings.control.listen is not None:
            listen, acceptor = _accept(stack, settings.control.listen)
            acceptors.append(acceptor)
            changes["control"] = settings.control.model_copy(update={"listen": listen})
        server = await start_shared(settings.store.url, settings.store.options())
        if server is not None:
            stack.push_async_callback(server.stop)
            changes["store"] = settings.store.model_copy(update={"url": f"unix:{server.socket}"})
        prefix = f"tokentape-{os.getpid()}-"
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)))
        stack.callback((await respond_at(folder / "supervisor.sock", partial(_metrics, acceptors[0]))).close)
        workers = Workers(settings.model_copy(update=changes), folder, acceptors)
        try:
            yield await workers.start()
        finally:
            failed = await workers.stop()
    if failed:
        raise OSError(f"A worker did not stop cleanly (exit code {failed}); see the log")


def _metrics(acceptor: Acceptor) -> bytes:
    """Return what the workers' metrics lack: the connections that none of them has yet."""
    name = "waiting_connections"
    full = f"tokentape_{name}"
    return encoded([Family(full, "gauge", DECLARED[name].text, {(full, ()): acceptor.waiting})])


class Workers:
    """The worker processes. `folder` is private to them. Call `start` inside the event loop, and `stop` at the end."""

    def __init__(self, settings: Settings, folder: Path, acceptors: Sequence[Acceptor]) -> None:
        self._settings = settings
        self._folder = folder
        self._acceptors = acceptors
        self._processes: dict[int, Process] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> RunningServer:
        """Start the workers; return when all listen.

        Raises OSError, or ValueError if the configuration is invalid; the worker has logged the reason.
        """
        served = await self._launch(0)  # alone: errors of settings or store are logged once
        await asyncio.gather(*map(self._launch, range(1, self._settings.workers)))
        create_task = asyncio.get_running_loop().create_task  # referenced in _tasks until stop awaits them
        self._tasks += [create_task(self._watch(number)) for number in self._processes]
        return served

    async def stop(self) -> int:
        """Stop all workers and wait for them; return the first exit code other than 0, or 0."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for acceptor in self._acceptors:
            acceptor.stop()
        for process in self._processes.values():
            with suppress(OSError, RuntimeError):  # exited already, its pipe is closed
                _send_line(process, "stop")
        return next(filter(None, [await process.wait() for process in self._processes.values()]), 0)

    async def _watch(self, number: int) -> None:
        """Restart a worker whenever it exits."""
        loop = asyncio.get_running_loop()
        delay_s = 0.0
        while True:
            started = loop.time()
            code = await self._processes[number].wait()
            if loop.time() - started > _STABLE_S:
                delay_s = 0.0
            LOG.error("Worker %d exited (%s); restarting in %g s", number, code, delay_s)
            await asyncio.sleep(delay_s)
            delay_s = min(_MAX_DELAY_S, delay_s * 2 or 0.1)
            with suppress(OSError, ValueError):  # it exited before it listened; the loop handles that
                await self._launch(number)

    async def _launch(self, number: int) -> RunningServer:
        """Start a worker; return when it listens. Raises what `start` raises."""
        with ExitStack() as channels:
            descriptors = [channels.enter_context(acceptor.add_worker()).fileno() for acceptor in self._acceptors]
            process = self._processes[number] = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-c", _PROGRAM, "worker", "\n".join(sys.path),
                stdin=PIPE,
                stdout=PIPE,
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C in a terminal is handled by the supervisor
            )  # fmt: skip
        settings = settings_of_worker(self._settings, number).to_json()
        start = {"number": number, "folder": str(self._folder), "settings": settings, "channels": descriptors}
        _send_line(process, start)
        assert process.stdout is not None
        answer = await process.stdout.readline()
        if not answer:
            code = await process.wait()
            error = ValueError if code == os.EX_CONFIG else OSError
            raise error(f"Worker {number} exited before it listened (exit code {code})")
        return RunningServer(**orjson.loads(answer))


def settings_of_worker(settings: Settings, number: int) -> Settings:
    """Return the settings of one worker, with its own journal. The first one has the journal of a single process."""
    if number == 0:
        return settings
    path = settings.store.spool_path
    store = settings.store.model_copy(update={"spool_path": path.with_name(f"{path.name}.{number}")})
    return settings.model_copy(update={"store": store})


def refuse_left_journals(settings: Settings) -> None:
    """Raise ValueError if an earlier run with more workers left journaled steps that no worker would store."""
    path = settings.store.spool_path
    for left in sorted(path.parent.glob(f"{path.name}.*")):
        number = left.name.removeprefix(f"{path.name}.")
        if number.isdecimal() and int(number) >= settings.workers and left.stat().st_size:
            raise ValueError(
                f"Journal {left} has steps that are not in the store yet; start with --workers "
                f"{int(number) + 1} and on_failure: spool until /ready reports spooled: 0"
            )


def _send_line(process: Process, message: Any) -> None:
    assert process.stdin is not None
    process.stdin.write(orjson.dumps(message) + b"\n")


def _accept(stack: AsyncExitStack, listen: str) -> tuple[str, Acceptor]:
    """Listen at an address until the stack closes; return it with its port, and its acceptor. Raises OSError."""
    listening = listen_at(listen)
    host, port = split_listen(listen)[0], listening[0].getsockname()[1]
    acceptor = Acceptor(listening)
    stack.callback(acceptor.close)
    return f"{f'[{host}]' if ':' in host else host}:{port}", acceptor


async def work() -> None:
    """Serve until a stop is requested. Raises what `running` raises."""
    with stopping() as stop:
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, stop.request)
        pipe = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(pipe), sys.stdin)
        start = orjson.loads(await pipe.readline())
        settings = Settings(**start["settings"])
        set_up(settings.log.level, settings.log.format)
        listening = loop.create_task(_watch_pipe(pipe, stop))
        slot = WorkerSlot(start["number"], Path(start["folder"]))
        channels = [socket.socket(fileno=descriptor) for descriptor in start["channels"]]
        try:
            async with running(settings, slot=slot, channels=channels) as served:
                _report(served)
                await stop.wait()
        finally:
            listening.cancel()
            for channel in channels:
                channel.close()


async def _watch_pipe(pipe: asyncio.StreamReader, stop: ShutdownSignal) -> None:
    line = await pipe.readline()
    stop.request()
    if line:
        await pipe.read()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)  # by the kernel's default action, without cleanup


def _report(served: RunningServer) -> None:
    """Report the URLs to the supervisor; later output to stdout goes to stderr."""
    os.write(1, orjson.dumps({"url": served.url, "control_url": served.control_url}) + b"\n")
    os.dup2(2, 1)
