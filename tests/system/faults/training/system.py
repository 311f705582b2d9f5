"""The processes of the soak: engines by model, replicas of the proxy, their store, and the trainers, which are restarted."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import orjson
from tests.system.faults.system import Part, WithStore, free_port, valkey
from tests.system.faults.training.plan import FIRST_VERSION, POLICIES, TRAINED
from tests.system.faults.training.trainer import CLAIMS

from tokentape import AsyncClient, ClientError

ENGINES = ("planner", "planner", "solver", "judge")
_HERE = "tests.system.faults.training"


class Kept:
    """A process that is started again whenever a fault ends it. It is a failure if it ends by itself."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self._expected: set[int] = set()

    async def run(self) -> None:
        """Keep the process until the task is cancelled. Raises AssertionError if the process ends by itself."""
        while True:
            self._expected = set()
            await self.part.start()
            code = await self.part.process.wait()
            assert code in self._expected, f"{self.part.name} ended with {code} by itself:\n{self.end_of_log()}"

    def kill(self) -> None:
        self._expected.add(-signal.SIGKILL)
        self._send(signal.SIGKILL)

    def terminate(self) -> None:
        """End the process in order; its exit code has to be 0, unless it has not started yet."""
        self._expected |= {0, -signal.SIGTERM}
        self._send(signal.SIGTERM)

    def _send(self, how: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self.part.send(how)

    def end_of_log(self) -> str:
        return (self.part.folder / f"{self.part.name}.log").read_text(errors="replace")[-4000:]


class TrainingSystem(WithStore):
    """All processes in a folder. `engines`, `proxies` and `trainers` are the ones that faults end."""

    def __init__(self, folder: Path, seed: int, *, replicas: int, on_failure: str) -> None:
        self.folder, self.has_journals = folder, on_failure == "spool"
        self.store_port = free_port()
        self.store = valkey(folder, "store", self.store_port)
        self._engine_ports, ports = [free_port() for _ in ENGINES], [free_port() for _ in range(replicas)]
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]
        self.engines = [self._engine(number, port) for number, port in enumerate(self._engine_ports)]
        self.proxies = [self._proxy(number, port, on_failure) for number, port in enumerate(ports)]
        self.trainers = [
            self._python(f"trainer-{policy}-{number}", "trainer", policy, number, folder, seed, *self.urls)
            for policy in TRAINED
            for number in range(len(CLAIMS[policy]))
        ]

    def _python(self, name: str, module: str, *words: object) -> Kept:
        return Kept(Part(name, [sys.executable, "-m", f"{_HERE}.{module}", *map(str, words)], self.folder))

    def _engine(self, number: int, port: int) -> Kept:
        log = self.folder / f"engine-{number}.jsonl"
        log.touch()
        return self._python(f"engine-{number}", "engine", port, POLICIES[ENGINES[number]], log)

    def _proxy(self, number: int, port: int, on_failure: str) -> Kept:
        name, path = f"proxy-{number}", self.folder / f"proxy-{number}.yaml"
        endpoints = [
            {"url": f"http://127.0.0.1:{engine}", "kind": "vllm", "models": [POLICIES[policy]]}
            for engine, policy in zip(self._engine_ports, ENGINES, strict=True)
        ]
        store = {
            "url": f"redis://127.0.0.1:{self.store_port}", "timeout_s": 3, "on_failure": on_failure,
            "spool_path": f"{self.folder}/{name}.spool",
        }  # fmt: skip
        settings = {
            "listen": f"127.0.0.1:{port}", "drain_timeout_s": 2, "log": {"level": "warning"},
            "models": {"gpt-5-*": POLICIES["solver"]},
            "policies": {
                "planner": {"models": ["planner", "planner-*"]}, "solver": {"models": ["solver-*"]},
                "judge": {"models": ["judge"], "train": False},
            },
            "groups": {"reward_s": 6},  # longer than agents take, but those that die between the finish and the reward
            "agents": {"pause_timeout_s": 20}, "engines": {"endpoints": endpoints, "read_timeout_s": 5}, "store": store,
        }  # fmt: skip
        path.write_bytes(orjson.dumps(settings))  # JSON is YAML
        return Kept(Part(name, [sys.executable, "-m", "proxy", "serve", "--config", str(path)], self.folder))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start all processes and keep them. Raises ExceptionGroup if one of them ends by itself."""
        await self.store.start()
        await self.store_answers()
        try:
            async with asyncio.TaskGroup() as keepers:
                tasks = [keepers.create_task(kept.run()) for kept in (*self.engines, *self.proxies)]
                await self.all_ready()
                await self._announce_first_versions()
                tasks += [keepers.create_task(kept.run()) for kept in self.trainers]
                yield
                for task in tasks:
                    task.cancel()
        finally:
            for part in (self.store, *(kept.part for kept in (*self.trainers, *self.proxies, *self.engines))):
                if part.process is not None:
                    with suppress(ProcessLookupError):
                        part.process.kill()
                    await part.process.wait()

    async def _announce_first_versions(self) -> None:
        async with AsyncClient(self.urls[0]) as client:
            for policy in TRAINED:
                await client.put_policy(FIRST_VERSION[policy], policy=policy)

    async def all_ready(self) -> None:
        """Wait until every replica responds, for a minute at most."""
        async with asyncio.timeout(60):
            for url in self.urls:
                await responds(url)


async def responds(url: str) -> None:
    async with AsyncClient(url, attempts=1) as client:
        while True:
            with suppress(ClientError):
                await client.policy()
                return
            await asyncio.sleep(0.05)
