"""A worker process, started and stopped by the supervisor through a pipe.

The first line on standard input contains the settings, so that no secret is on a command line; the next line stops the worker,
and so does the end of the pipe, when the supervisor is gone. SIGTERM and SIGINT stop a worker too, and repeated ones do nothing
more: service managers signal all processes. The end of the pipe after a stop line kills the worker: the supervisor received a
second signal.
"""

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import orjson

from proxy.config.settings import Settings
from proxy.server.listener import RunningServer, running
from proxy.server.shutdown import ShutdownSignal, stopping
from proxy.telemetry.logs import set_up
from proxy.telemetry.multiprocess import WorkerSlot

_MAX_LINE_BYTES = 2**26  # settings may contain JSON Schemas of tools


async def work() -> None:
    """Serve until a stop is requested. Raises what `running` raises."""
    with stopping() as stop:
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, stop.request)
        pipe = await _pipe()
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


async def _pipe() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


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
