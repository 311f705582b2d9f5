"""Runs each server in its own process: `python -m benchmarks.servers KIND [ARGUMENTS]` prints its port and serves.

Bare is the baseline: a minimal aiohttp reverse proxy that forwards bytes and parses and stores nothing.
"""

import asyncio
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import types
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import uvloop
from aiohttp import web

from benchmarks.turns import TurnsEngine
from benchmarks.upstream import CutEngine, listen

ENGINE = web.AppKey("engine", str)
SESSION = web.AppKey("session", aiohttp.ClientSession)


async def pass_on(request: web.Request) -> web.StreamResponse:
    """Forward one call."""
    body = await request.read()
    url = request.app[ENGINE] + request.path
    async with request.app[SESSION].post(url, data=body, headers={"Content-Type": "application/json"}) as answer:
        response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]})
        await response.prepare(request)
        async for read in answer.content.iter_any():
            await response.write(read)
        await response.write_eof()
        return response


async def session_of(app: web.Application) -> AsyncIterator[None]:
    """Provide one client session without limits."""
    connector = aiohttp.TCPConnector(limit=0)
    app[SESSION] = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
    yield
    await app[SESSION].close()


def make_bare(engine: str) -> web.Application:
    """Return the application."""
    app = web.Application(client_max_size=2**26)
    app[ENGINE] = engine
    app.cleanup_ctx.append(session_of)
    app.router.add_route("POST", "/{path:.*}", pass_on)
    return app


_HERE = Path(__file__).parent.parent
_INSTALLED = re.compile(r".*/(site-packages|lib/python3\.\d+)/")
_LAGS = 3
_SAMPLED_S = 0.001  # between samples; the kernel's clock tick if that is longer
_QUIET = {**os.environ, "TOKENTAPE_LOG__LEVEL": "warning"}
_PROCESS_CLOCK = 2  # CPUCLOCK_SCHED of Linux: with the complement of a process id, the clock of its CPU time


@dataclass(frozen=True)
class Server:
    """A running server process."""

    port: int
    pid: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def resident_bytes(self) -> int:
        """Return its resident memory."""
        with open(f"/proc/{self.pid}/statm") as statm:  # noqa: PTH123
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def processor_s(self) -> tuple[float, float]:
        """Return the CPU time of its processes, and of the store that it started."""
        used = {True: 0.0, False: 0.0}
        for pid, name in family(self.pid):
            used["valkey" in name] += time.clock_gettime((~pid << 3) | _PROCESS_CLOCK)
        return used[False], used[True]

    def forget_peak(self) -> None:
        """Reset the peak of its resident memory (proc(5), clear_refs)."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        """Return the peak of its resident memory."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def family(pid: int) -> Iterator[tuple[int, str]]:
    """Yield the id and name of a process and of its descendants."""
    children: dict[int, list[tuple[int, str]]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended
            number, _, rest = path.read_text().partition(" (")
            name, _, fields = rest.rpartition(") ")
            children.setdefault(int(fields.split()[1]), []).append((int(number), name))
    found = [(pid, "")]
    for parent, _ in found:
        found += children.get(parent, [])
    yield from found


@contextmanager
def started(kind: str, *arguments: str, checkout: Path | None = None) -> Iterator[Server]:
    """Run a server inside the context, from another checkout if it is given."""
    command = [sys.executable, "-m", "benchmarks.servers", kind, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(checkout or _HERE)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=checkout or _HERE, env=environment)
    try:
        assert process.stdout is not None
        yield Server(int(process.stdout.readline()), process.pid)
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()


@contextmanager
def serving(engine: str, folder: str, workers: int) -> Iterator[Server]:
    """Run `serve --workers N` inside the context, without log lines per call."""
    port = free_port()
    command = [sys.executable, "-m", "proxy", "serve", "--engine", engine, "--listen", f"127.0.0.1:{port}"]
    command += ["--store", f"embedded:{folder}/store", "--workers", str(workers)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=_QUIET)
    try:
        _await_ready(process, port)
        yield Server(port, process.pid)
    finally:
        process.terminate()
        process.wait(30)


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _await_ready(process: "subprocess.Popen[bytes]", port: int) -> None:
    """Wait until `/ready` is 200. Raises RuntimeError after a minute."""
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=1):
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"serve was not ready on port {port} within a minute")


def allow_many_sockets() -> None:
    """Raise the limit of open files to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _bare(engine: str) -> None:
    runner = web.AppRunner(make_bare(engine), access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=8192).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


@contextmanager
def sampled(path: str) -> Iterator[None]:
    """Count which function uses CPU time inside the context, for which file of TokenTape, and write it to a file."""
    samples: Counter[tuple[types.CodeType, types.CodeType | None]] = Counter()

    def sample(_signal: int, frame: types.FrameType | None) -> None:
        own = frame
        while own is not None and not _is_own(own.f_code):
            own = own.f_back
        if frame is not None:
            samples[frame.f_code, own and own.f_code] += 1

    signal.signal(signal.SIGPROF, sample)
    signal.setitimer(signal.ITIMER_PROF, _SAMPLED_S, _SAMPLED_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        found = [[_place(code), code.co_qualname, own and _place(own), count] for (code, own), count in samples.items()]
        Path(path).write_text(json.dumps(found))


def _place(code: types.CodeType) -> str:
    """Return the file of a function: relative to the checkout, to site-packages, or to the standard library."""
    return _INSTALLED.sub("", code.co_filename.removeprefix(f"{_HERE}/"))


def _is_own(code: types.CodeType) -> bool:
    return _place(code).startswith(("proxy/", "storage/"))


class _WithoutPandas:
    """Hides pandas, as in an installation with the extra `arrow`: pyarrow loads pandas (50 MB) if it is installed."""

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)


@asynccontextmanager
async def lagging(path: str) -> AsyncIterator[None]:
    """Measure the CPU time that the event loop uses without looking for events, and write the highest ones, in s, to a file.

    It does not depend on what else the machine does. SIGUSR1 begins another phase, each with its own ones.
    """
    phases = [[0.0] * _LAGS]

    async def measure() -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0.0005)
            now = time.thread_time()
            if now - last > min(phases[-1], default=0):
                phases[-1] = sorted([*phases[-1], now - last])[-_LAGS:]
            last = now

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: phases.append([0.0] * _LAGS))
    task = asyncio.create_task(measure())
    try:
        yield
    finally:
        task.cancel()
        Path(path).write_text(json.dumps(phases))


async def _tokentape(
    engine: str, store: str, mode: str = "faithful", cache_bytes: str = "", samples: str = "", lags: str = ""
) -> None:
    sys.meta_path.insert(0, _WithoutPandas())
    from proxy.config.settings import load
    from proxy.server.listener import running
    from proxy.server.shutdown import stopped_by_signals

    settings = load(
        listen="127.0.0.1:0",
        engines={"endpoints": [{"url": engine}]},
        store={"url": store},
        continuation={"mode": mode},
        agents={"rollout_cache_bytes": int(cache_bytes)}
        if cache_bytes
        else {},  # earlier versions have no such setting
    )
    with stopped_by_signals() as stop:
        async with running(settings) as served:
            print(served.url.rpartition(":")[2], flush=True)
            with sampled(samples) if samples else nullcontext():
                async with lagging(lags) if lags else nullcontext():
                    await stop.wait()


async def _upstream(kind: str = "turns") -> None:
    server, port = await listen(CutEngine if kind == "cut" else TurnsEngine)
    print(port, flush=True)
    await server.serve_forever()


KINDS = {"bare": _bare, "tokentape": _tokentape, "upstream": _upstream}

if __name__ == "__main__":
    allow_many_sockets()
    uvloop.run(KINDS[sys.argv[1]](*sys.argv[2:]))
