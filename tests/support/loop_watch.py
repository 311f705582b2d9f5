"""Measurements of a running proxy: CPU time of each event loop callback, and peak memory.

`watched_callbacks` measures the event loop of the calling thread. `watched_proxy` runs a proxy in a separate process,
so that the work and the memory of the test's client and engine are not counted.

CPU time is `time.thread_time`: it does not depend on how busy the machine is. uvloop has no hook for callbacks, so the
measured loop is asyncio's own.
"""

import asyncio
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from proxy.config.settings import load
from proxy.server.listener import running

_START_TIMEOUT_S = 50
_ROOT = Path(__file__).parent.parent.parent


@dataclass(slots=True)
class CallbackWatch:
    """The longest callback since the last `reset`: its CPU time in seconds, and what it ran."""

    longest_s: float = 0.0
    longest: str = ""

    def reset(self) -> None:
        """Start a new measurement."""
        self.longest_s, self.longest = 0.0, ""


@contextmanager
def watched_callbacks() -> Iterator[CallbackWatch]:
    """Measure each callback that the event loop of this thread runs."""
    watch, thread, run = CallbackWatch(), threading.get_ident(), asyncio.events.Handle._run

    def measured(handle: asyncio.Handle) -> None:
        if threading.get_ident() != thread:
            run(handle)
            return
        callback = handle._callback  # None once the handle is cancelled
        before = time.thread_time()
        run(handle)
        spent = time.thread_time() - before
        if spent > watch.longest_s:
            watch.longest_s, watch.longest = spent, _name(callback)

    asyncio.events.Handle._run = measured
    try:
        yield watch
    finally:
        asyncio.events.Handle._run = run


def _name(callback: Any) -> str:
    """The coroutine of a task's step, or the callback itself."""
    owner = getattr(callback, "__self__", None)
    if not isinstance(owner, asyncio.Task):
        return repr(callback)
    coroutine, names = owner.get_coro(), []
    while coroutine is not None and hasattr(coroutine, "cr_await"):
        names.append(coroutine.__qualname__)
        coroutine = coroutine.cr_await
    return " > ".join(names) or repr(owner)


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of a proxy since the last `reset`: the longest callback (CPU seconds, its name), peak and current
    memory.
    """

    longest_s: float
    longest: str
    peak_bytes: int
    bytes_now: int


class WatchedProxy:
    """A proxy in a separate process. `grown_bytes` compares the peak with the memory at the last `reset`."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self._process = process
        self.url = url
        self.base_bytes = 0

    @property
    def pid(self) -> int:
        """The process id of the proxy."""
        return self._process.pid

    async def reset(self) -> None:
        """Start a new measurement: the memory in use now is the base."""
        await asyncio.to_thread(self._request, b"reset")
        self.base_bytes = (await self.measured()).bytes_now

    async def measured(self) -> Measured:
        """Return what was measured since the last `reset`."""
        return Measured(**orjson.loads(await asyncio.to_thread(self._request, b"read")))

    async def grown_bytes(self) -> int:
        """Return how far the memory rose at most since the last `reset`."""
        return (await self.measured()).peak_bytes - self.base_bytes

    def _request(self, command: bytes) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(command + b"\n")
        self._process.stdin.flush()
        response = self._process.stdout.readline()
        assert response, f"the proxy's process ended ({self._process.poll()})"
        return response


@asynccontextmanager
async def watched_proxy(engine_url: str, store_url: str, **settings: Any) -> AsyncIterator[WatchedProxy]:
    """Run a proxy in front of this engine in a separate process, and measure it.

    `store_url` is as `store.url` (`unix:` sockets too); `settings` are sections of the configuration, `store` included.
    """
    configuration = {
        **settings,
        "listen": "127.0.0.1:0",
        "store": {"url": store_url, **settings.get("store", {})},
        "engines": {"endpoints": [{"url": engine_url, "name": "fake"}], **settings.get("engines", {})},
    }
    process = await asyncio.to_thread(
        subprocess.Popen,
        [sys.executable, "-u", __file__, orjson.dumps(configuration).decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{_ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            url = await asyncio.to_thread(process.stdout.readline)
        assert url, f"the proxy did not start ({process.poll()})"
        proxy = WatchedProxy(process, url.decode().strip())
        await proxy.reset()
        yield proxy
    finally:
        process.stdin.close()  # EOF on standard input stops the process
        try:
            await asyncio.to_thread(process.wait, 20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


async def _serve(settings: dict[str, Any]) -> None:
    """Run the proxy until standard input ends; answer `reset` and `read` on standard output."""
    with watched_callbacks() as watch:
        async with running(load(**settings)) as served:
            sys.stdout.write(served.url + "\n")
            while command := await asyncio.to_thread(sys.stdin.buffer.readline):
                if command == b"reset\n":
                    _forget_peak()
                    watch.reset()
                    sys.stdout.write("{}\n")
                    continue
                report = {"longest_s": watch.longest_s, "longest": watch.longest, **_memory()}
                sys.stdout.buffer.write(orjson.dumps(report) + b"\n")
                sys.stdout.buffer.flush()


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _memory() -> dict[str, int]:
    """Return the resident memory of this process: peak and current."""
    status = Path("/proc/self/status").read_text()
    peak, now = (int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) * 1024 for name in ("VmHWM", "VmRSS"))
    return {"peak_bytes": peak, "bytes_now": now}


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(orjson.loads(sys.argv[1])))
