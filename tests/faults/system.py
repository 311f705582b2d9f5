"""The parts under test, each a real process: the engine, a Valkey, the proxy; and their ends, one like the other."""

import asyncio
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import aiohttp

from storage.embedded import bundled_server

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


class Part:
    """A process that is started again on the same port, with the same files."""

    def __init__(self, name: str, words: list[str], folder: Path, **environment: str) -> None:
        self.name, self.words, self.folder, self.environment = name, words, folder, environment
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self.words, cwd=ROOT, stdout=log, stderr=log, env={**os.environ, **self.environment}
            )

    async def end(self, how: signal.Signals) -> int:
        """Send a signal and wait for the end; the exit code."""
        with suppress(ProcessLookupError):
            self.process.send_signal(how)
        return await asyncio.wait_for(self.process.wait(), 30)

    def send(self, how: signal.Signals) -> None:
        self.process.send_signal(how)


class System:
    """Engine, store and proxy in a folder. `keeping` starts the proxy again whenever it has ended, as a supervisor would."""

    def __init__(self, folder: Path, on_failure: str) -> None:
        ports = self.ports = [free_port() for _ in range(3)]
        self.url, self.store_url = f"http://127.0.0.1:{ports[0]}", f"redis://127.0.0.1:{ports[1]}"
        self.engine_log = folder / "engine.txt"
        (folder / "store").mkdir()
        valkey = {
            "port": str(ports[1]), "bind": "127.0.0.1", "dir": str(folder / "store"), "appendonly": "yes",
            "appendfsync": "always", "save": "", "maxmemory-policy": "noeviction", "aof-load-truncated": "yes",
        }  # fmt: skip
        words = [part for name, value in valkey.items() for part in (f"--{name}", value)]
        self.store = Part("store", [str(bundled_server()), *words], folder)
        self.engine = Part(
            "engine", [sys.executable, str(HERE / "engine.py"), str(ports[2]), str(self.engine_log)], folder
        )
        settings = folder / "proxy.yaml"
        settings.write_text(
            f"listen: 127.0.0.1:{ports[0]}\ndrain_s: 5\nlog: {{level: warning}}\n"
            f"engines: {{endpoints: [{{url: 'http://127.0.0.1:{ports[2]}', kind: vllm}}], read_timeout_s: 0.5}}\n"
            f"store: {{url: '{self.store_url}', timeout_s: 2, on_failure: {on_failure}, spool_path: '{folder}/spool'}}\n"
        )
        self.proxy = Part("proxy", [sys.executable, "-m", "proxy", "serve", "--config", str(settings)], folder)
        self._keeper: asyncio.Task | None = None

    async def start(self) -> None:
        await asyncio.gather(self.store.start(), self.engine.start())
        await self.store_answers()
        self._keeper = asyncio.create_task(self._keep())
        await self.ready()

    async def stop(self) -> None:
        self._keeper.cancel()
        for part in (self.proxy, self.store, self.engine):
            with suppress(ProcessLookupError):
                part.process.kill()
            await part.process.wait()

    async def _keep(self) -> None:
        while True:
            await self.proxy.start()
            await self.proxy.process.wait()
            await asyncio.sleep(0.05)

    async def ask_store(self, *words: str) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.ports[1])
        writer.write((" ".join(words) + "\r\n").encode())
        reply = await asyncio.wait_for(reader.readline(), 5)
        writer.close()
        return reply

    async def store_answers(self) -> None:
        async with asyncio.timeout(30):
            while True:
                with suppress(OSError):
                    if await self.ask_store("PING") == b"+PONG\r\n":
                        return
                await asyncio.sleep(0.02)

    async def ready(self) -> None:
        """Return once the proxy is ready and no step waits in its journal, by itself and within half a minute."""
        async with asyncio.timeout(30), aiohttp.ClientSession() as http:
            while True:
                with suppress(aiohttp.ClientError, OSError):
                    async with http.get(self.url + "/ready") as answer:
                        told = await answer.json()
                        if answer.status == 200 and told["store"] == "ok" and not told.get("spooled"):
                            return
                await asyncio.sleep(0.02)
