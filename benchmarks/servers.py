"""Each server in a process of its own: `python -m benchmarks.servers KIND [ENGINE] [STORE]` prints its port and runs."""

import asyncio
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvloop
from aiohttp import web

from benchmarks.bare import make_bare
from benchmarks.upstream import listen


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
    from proxy.config import load
    from proxy.server import running, until_stopped

    settings = load(listen="127.0.0.1:0", engines={"endpoints": [{"url": engine}]}, store={"url": store})
    async with running(settings) as served:
        print(served.url.rpartition(":")[2], flush=True)
        await until_stopped()


async def _upstream() -> None:
    server, port = await listen()
    print(port, flush=True)
    await server.serve_forever()


KINDS = {"bare": _bare, "tokentape": _tokentape, "upstream": _upstream}

if __name__ == "__main__":
    allow_many_sockets()
    uvloop.run(KINDS[sys.argv[1]](*sys.argv[2:]))
