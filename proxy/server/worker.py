"""One worker: a process that serves under a parent that started it.

Holds the worker's end of the pipe. The parent's first line tells the settings, so that no secret stands on a command line;
the next line means: stop; the end of the pipe means that the parent is gone, however it went. Signals stop a worker as the
line does, and as often as they come: who sends them to all processes of a service need not know that the parent tells the
workers too. What ends a worker at once is the end of the pipe after it was told to stop: the parent was told twice.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

import orjson

from proxy.config.settings import Settings
from proxy.server.listener import RunningServer, running
from proxy.server.shutdown import ShutdownSignal, stopping
from proxy.telemetry.logs import set_up
from proxy.telemetry.multiprocess import WorkerSlot

_LONGEST_LINE = 2**26  # tools in sampling rules are JSON too


async def work() -> None:
    """Serve until told to stop. Raises what `running` raises."""
    with stopping() as stop:
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, stop.tell)
        pipe = await _pipe()
        told = orjson.loads(await pipe.readline())
        settings = Settings(**told["settings"])
        set_up(settings.log.level, settings.log.format)
        listening = loop.create_task(_obey(pipe, stop))
        try:
            async with running(settings, crew=WorkerSlot(told["number"], Path(told["folder"]))) as served:
                _tell(served)
                await stop.wait()
        finally:
            listening.cancel()


async def _pipe() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=_LONGEST_LINE)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def _obey(pipe: asyncio.StreamReader, stop: ShutdownSignal) -> None:
    told = await pipe.readline()
    stop.tell()
    if told:
        await pipe.read()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)  # by the kernel's hand: nothing is cleaned up any more


def _tell(served: RunningServer) -> None:
    """Tell the parent that we listen; whatever is printed later goes where errors go."""
    os.write(1, orjson.dumps({"url": served.url, "control_url": served.control_url}) + b"\n")
    os.dup2(2, 1)
