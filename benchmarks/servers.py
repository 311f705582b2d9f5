"""Each server in a process of its own: `python -m benchmarks.servers KIND [ENGINE] [STORE]` prints its port and runs."""

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
from benchmarks.upstream import listen

_PLAIN = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}  # help that is not cut or coloured
_QUIET = _PLAIN | {"TOKENTAPE_LOG__LEVEL": "warning"}


@dataclass(frozen=True)
class Server:
    """A running server."""

    port: int
    pid: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def resident_bytes(self) -> int:
        """How much memory of its own it holds."""
        with open(f"/proc/{self.pid}/statm") as statm:  # noqa: PTH123
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def processor_s(self) -> float:
        """How long processors worked for it so far, in its own code and in the kernel's."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def forget_peak(self) -> None:
        """From now on the peak is counted anew (proc(5), clear_refs)."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        """The most memory that it ever held."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


@contextmanager
def started(kind: str, *arguments: str) -> Iterator[Server]:
    """A server, until the end of the block; ended by its own pid."""
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
    """Whether `serve` can run several processes on one port."""
    asked = [sys.executable, "-m", "proxy", "serve", "--help"]
    return "--workers" in subprocess.run(asked, capture_output=True, text=True, check=True, env=_PLAIN).stdout


@contextmanager
def serving(engine: str, folder: str, workers: int) -> Iterator[Server]:
    """`serve --workers N`, without a line in the log for each call, until the end of the block."""
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
    """Wait until it says that it is ready. Raises RuntimeError if it does not within a minute."""
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=1):
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"serve was not ready on port {port} within a minute")


def allow_many_sockets() -> None:
    """As many open files as the machine lets us have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _bare(engine: str) -> None:
    runner = web.AppRunner(make_bare(engine), access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=8192).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


class _WithoutPandas:
    """As tokentape[arrow] is installed: pyarrow loads pandas (50 MB) wherever it is, and here the tests bring it."""

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)


async def _tokentape(engine: str, store: str) -> None:
    sys.meta_path.insert(0, _WithoutPandas())
    from proxy.config.settings import load
    from proxy.server.listener import running
    from proxy.server.shutdown import stopped_by_signals

    settings = load(listen="127.0.0.1:0", engines={"endpoints": [{"url": engine}]}, store={"url": store})
    with stopped_by_signals() as stop:
        async with running(settings) as served:
            print(served.url.rpartition(":")[2], flush=True)
            await stop.wait()


async def _upstream() -> None:
    server, port = await listen()
    print(port, flush=True)
    await server.serve_forever()


KINDS = {"bare": _bare, "tokentape": _tokentape, "upstream": _upstream}

if __name__ == "__main__":
    allow_many_sockets()
    uvloop.run(KINDS[sys.argv[1]](*sys.argv[2:]))
