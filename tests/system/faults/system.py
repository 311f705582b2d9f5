"""The processes under test: the engine, a Valkey, and the proxy."""

import asyncio
import resource
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import aiohttp
import orjson
from tests.system.faults.address import StableAddress

from storage.embedded.server import bundled_server

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


class Part:
    """A process that is restarted on the same port, with the same files. `root`: the source tree, if it is another one."""

    def __init__(self, name: str, words: list[str], folder: Path, root: Path | None = None) -> None:
        self.name, self.words, self.folder, self.root = name, words, folder, root or ROOT
        self.process: asyncio.subprocess.Process | None = None

    async def start(self, *more_words: str) -> None:
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.words,
                *more_words,
                cwd=self.root,
                stdout=log,
                stderr=log,
                restore_signals=False,  # SIGXFSZ stays ignored, as in Python: a write beyond the limit fails
            )

    async def end(self, how: signal.Signals) -> int:
        """Send a signal, wait for the process to end, and return its exit code."""
        with suppress(ProcessLookupError):
            self.process.send_signal(how)
        return await asyncio.wait_for(self.process.wait(), 30)

    def send(self, how: signal.Signals) -> None:
        self.process.send_signal(how)

    def let_files_grow_to(self, size: int | None) -> None:
        """Limit the size of the process's files, as a full disk does. None removes the limit."""
        _, hard = resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (hard if size is None else size, hard))


def valkey(folder: Path, name: str, port: int) -> Part:
    """Return a server that syncs each write before it acknowledges it."""
    (folder / name).mkdir()
    settings = {
        "port": str(port), "bind": "127.0.0.1", "dir": str(folder / name), "appendonly": "yes",
        "appendfsync": "always", "save": "", "maxmemory-policy": "noeviction", "aof-load-truncated": "yes",
        "repl-diskless-sync-delay": "0",
    }  # fmt: skip
    return Part(
        name,
        [str(bundled_server()), *(part for pair in settings.items() for part in (f"--{pair[0]}", pair[1]))],
        folder,
    )


class WithStore:
    """A system with a store that is restarted; its address does not change unless a replica takes over."""

    store: Part
    store_port: int

    async def ask_store(self, *words: str) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.store_port)
        writer.write((" ".join(words) + "\r\n").encode())
        reply = await asyncio.wait_for(reader.read(2**16), 50)
        writer.close()
        return reply

    async def store_says(self, *words: str) -> None:
        """Wait until the store's INFO contains this text."""
        async with asyncio.timeout(30):
            info = b""
            while not all(word.encode() in info for word in words):
                await asyncio.sleep(0.02)
                info = await self.ask_store("INFO")

    async def store_answers(self) -> None:
        async with asyncio.timeout(30):
            while True:
                with suppress(OSError):
                    if await self.ask_store("PING") == b"+PONG\r\n":
                        return
                await asyncio.sleep(0.02)


class System(WithStore):
    """Engine, store and proxy in a folder. `keeping` restarts the proxy whenever it has ended, as a supervisor does.

    `replicated`: the store has a replica, every write waits for it, and the proxy reaches the current primary at a
    stable address. `workers`: this many processes of the proxy share its port. `sections`: other settings.
    """

    def __init__(
        self, folder: Path, on_failure: str, *, replicated: bool = False, workers: int = 1, **sections: dict
    ) -> None:
        self.workers, self._sections = workers, sections
        self.folder, ports = folder, [free_port() for _ in range(4)]
        self.url, self.spool = f"http://127.0.0.1:{ports[0]}", folder / "spool"
        self.engine_log = folder / "engine.txt"
        self.store, self.store_port = valkey(folder, "store", ports[1]), ports[1]
        self.replica, self.replica_port = (valkey(folder, "replica", ports[3]), ports[3]) if replicated else (None, 0)
        self.address = StableAddress(ports[1]) if replicated else None
        self.engine = Part(
            "engine", [sys.executable, str(HERE / "engine.py"), str(ports[2]), str(self.engine_log)], folder
        )
        self.engine_url, self._on_failure = f"http://127.0.0.1:{ports[2]}", on_failure
        self.store_url = f"redis://127.0.0.1:{ports[1]}"
        self._listen = f"127.0.0.1:{ports[0]}"
        self.proxy = Part("proxy", [sys.executable, "-m", "proxy", "serve", "--config", f"{folder}/proxy.yaml"], folder)
        self._keeper: asyncio.Task | None = None

    async def start(self) -> None:
        await asyncio.gather(self.store.start(), self.engine.start())
        await self.store_answers()
        durability = "acknowledged"
        if self.replica is not None:
            await self.follow()
            self.store_url, durability = f"redis://127.0.0.1:{await self.address.listen()}", "replicated"
        engine = {"url": self.engine_url, "kind": "vllm"}
        store = {
            "url": self.store_url, "timeout_s": 2, "durability": durability, "on_failure": self._on_failure,
            "spool_path": str(self.spool),
        }  # fmt: skip
        settings = {
            "listen": self._listen, "workers": self.workers, "drain_timeout_s": 5, "log": {"level": "warning"},
            "ready_requires_engine": True, "engines": {"endpoints": [engine], "read_timeout_s": 0.5},
            **self._sections, "store": {**store, **self._sections.get("store", {})},
        }  # fmt: skip
        (self.folder / "proxy.yaml").write_bytes(orjson.dumps(settings))  # JSON is YAML
        self._keeper = asyncio.create_task(self._keep())
        await self.ready()

    async def stop(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
        if self.address is not None:
            await self.address.close()
        for part in (self.proxy, self.store, self.replica, self.engine):
            if part is None or part.process is None:
                continue
            with suppress(ProcessLookupError):
                part.process.kill()
            await part.process.wait()

    async def _keep(self) -> None:
        while True:
            await self.proxy.start()
            await self.proxy.process.wait()
            await asyncio.sleep(0.05)

    async def follow(self) -> None:
        """Start the replica again, of the current store."""
        await self.replica.start("--replicaof", f"127.0.0.1 {self.store_port}")
        await self.followed()

    async def followed(self) -> None:
        """Wait until the replica has all writes of the store: a promotion before that would lose some."""
        await self.store_says("connected_slaves:1", "state=online")

    async def promote(self) -> None:
        """Make the replica the store and direct the address to it; the old store becomes a stopped replica."""
        self.store, self.replica = self.replica, self.store
        self.store_port, self.replica_port = self.replica_port, self.store_port
        assert await self.ask_store("REPLICAOF", "NO", "ONE") == b"+OK\r\n"
        self.address.lead_to(self.store_port)

    async def is_alive(self) -> None:
        """Wait until the proxy answers, ready or not."""
        async with asyncio.timeout(30), aiohttp.ClientSession() as http:
            while True:
                with suppress(aiohttp.ClientError, OSError):
                    async with http.get(self.url + "/health"):
                        return
                await asyncio.sleep(0.02)

    async def ready(self) -> None:
        """Wait until the proxy is ready and its journal is empty; that takes at most half a minute."""
        status: object = "nothing"
        try:
            async with asyncio.timeout(30), aiohttp.ClientSession() as http:
                while True:
                    with suppress(aiohttp.ClientError, OSError):
                        async with http.get(self.url + "/ready") as response:
                            status = await response.json()
                            is_ready = response.status == 200 and status["store"] == "ok"
                        if is_ready and not await self._spooled(http):
                            return
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"not ready after half a minute: {status}") from None

    async def _spooled(self, http: aiohttp.ClientSession) -> float:
        """Return the number of steps in the journals of all workers."""
        async with http.get(self.url + "/metrics") as response:
            metrics = dict(line.rsplit(" ", 1) for line in (await response.text()).splitlines() if line[0] != "#")
        return float(metrics["tokentape_journal_steps"])

    def worker_pids(self) -> list[int]:
        """Return the live child processes of the proxy's main process."""
        of_threads = Path(f"/proc/{self.proxy.process.pid}/task").glob("*/children")
        return [int(pid) for children in of_threads for pid in children.read_text().split()]

    async def all_workers(self) -> list[int]:
        """Return the PIDs of all workers, once they have started."""
        async with asyncio.timeout(30):
            while len(pids := self.worker_pids()) < self.workers:
                await asyncio.sleep(0.02)
        return pids
