"""Runs each server in its own process: `python -m benchmarks.servers KIND [ARGUMENTS]` prints its port and serves."""

import asyncio
import os
import resource
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop
from aiohttp import web

from benchmarks.bare import make_bare
from benchmarks.two_turns import TwoTurnEngine
from benchmarks.upstream import Engine, listen

_PLAIN = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}  # help without truncation or color
_QUIET = _PLAIN | {"TOKENTAPE_LOG__LEVEL": "warning"}


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

    def processor_s(self) -> float:
        """Return its CPU time, user and system."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def forget_peak(self) -> None:
        """Reset the peak of its resident memory (proc(5), clear_refs)."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        """Return the peak of its resident memory."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


@contextmanager
def started(kind: str, *arguments: str) -> Iterator[Server]:
    """Run a server inside the context."""
    command = [sys.executable, "-m", "benchmarks.servers", kind, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield Server(int(process.stdout.readline()), process.pid)
    finally:
        process.terminate()
        process.wait(20)
        process.stdout.close()


def knows_workers() -> bool:
    """Return whether `serve` has the option --workers."""
    command = [sys.executable, "-m", "proxy", "serve", "--help"]
    return "--workers" in subprocess.run(command, capture_output=True, text=True, check=True, env=_PLAIN).stdout


@contextmanager
def serving(engine: str, folder: str, workers: int) -> Iterator[Server]:
    """Run `serve --workers N` inside the context, without log lines per call."""
    port = _free_port()
    command = [sys.executable, "-m", "proxy", "serve", "--engine", engine, "--listen", f"127.0.0.1:{port}"]
    command += ["--store", f"embedded:{folder}/store", "--workers", str(workers)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=_QUIET)
    try:
        _await_ready(process, port)
        yield Server(port, process.pid)
    finally:
        process.terminate()
        process.wait(30)


def _free_port() -> int:
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


class _WithoutPandas:
    """Hides pandas, as in an installation with the extra `arrow`: pyarrow loads pandas (50 MB) if it is installed."""

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)


async def _tokentape(engine: str, store: str, mode: str = "faithful", cache_bytes: str = str(2**28)) -> None:
    sys.meta_path.insert(0, _WithoutPandas())
    from proxy.config.settings import load
    from proxy.server.listener import running
    from proxy.server.shutdown import stopped_by_signals

    settings = load(
        listen="127.0.0.1:0",
        engines={"endpoints": [{"url": engine}]},
        store={"url": store},
        continuation={"mode": mode, "cache_bytes": int(cache_bytes)},
    )
    with stopped_by_signals() as stop:
        async with running(settings) as served:
            print(served.url.rpartition(":")[2], flush=True)
            await stop.wait()


async def _upstream(engine: type[Engine] = Engine) -> None:
    server, port = await listen(engine)
    print(port, flush=True)
    await server.serve_forever()


async def _two_turns() -> None:
    await _upstream(TwoTurnEngine)


KINDS = {"bare": _bare, "tokentape": _tokentape, "upstream": _upstream, "two-turns": _two_turns}

if __name__ == "__main__":
    allow_many_sockets()
    uvloop.run(KINDS[sys.argv[1]](*sys.argv[2:]))
