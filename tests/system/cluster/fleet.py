"""Three proxies behind HAProxy in front of one engine, agents that call them, and what became of their calls."""

import asyncio
import itertools
import logging
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import aiohttp
from redis.crc import key_slot
from tests.system.cluster.nodes import free_port
from tests.system.deploy.environment import program
from tests.system.faults.engine import sampled
from tests.system.faults.system import HERE as FAULTS
from tests.system.faults.system import ROOT, Part

from proxy.trajectory.blocks import BlockReader
from proxy.trajectory.codec import decode
from storage import StoreOptions, open_store
from storage.redis.store import Store

LOG = logging.getLogger("cluster")  # the figures of docs/scaling.md
STORE_TIMEOUT_S = 5
_CALL_TIMEOUT_S = 30
_ROLLOUTS = 200  # of an agent: they are spread over all shards
_RELEASE = "c62368e5"  # 0.1.0, see CHANGELOG.md

HAPROXY = """\
defaults
    mode http
    balance roundrobin
    option http-server-close
    option abortonclose
    retries 3
    retry-on conn-failure
    option redispatch 1
    timeout connect 3s
    timeout check 5s
    timeout queue 10s
    timeout client 60s
    timeout server 60s
    default-server check inter 200ms fall 1 rise 1
frontend api
    bind 127.0.0.1:{port}
    default_backend replicas
backend replicas
    option httpchk GET /ready
    http-check expect ! string '"status":"stopping"'
{servers}
"""


class Fleet:
    """Proxies behind HAProxy. `proxies` are processes that are stopped and started one by one."""

    def __init__(
        self, folder: Path, store_url: str, *, durability: str = "replicated", source: Path | None = None
    ) -> None:
        self.folder, self.store_url, count = folder, store_url, 3
        self._ports = [free_port() for _ in range(count)]
        self.port, engine_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.urls = [f"http://127.0.0.1:{port}" for port in self._ports]
        self.engine_log = folder / "engine.txt"
        engine = [sys.executable, str(FAULTS / "engine.py"), str(engine_port), str(self.engine_log)]
        self.engine = Part("engine", engine, folder)
        self.durability = durability
        self.engine_url = f"http://127.0.0.1:{engine_port}"
        self.proxies = [self.proxy(number, source) for number in range(count)]
        self._balancer = Part("haproxy", [program("haproxy"), "-db", "-f", str(folder / "haproxy.cfg")], folder)

    def proxy(self, number: int, source: Path | None = None) -> Part:
        """Return a proxy of this source tree, or of another one."""
        config = self.folder / f"proxy-{number}.yaml"
        config.write_text(
            f"listen: 127.0.0.1:{self._ports[number]}\nlog: {{level: warning}}\nshutdown_delay_s: 1\n"
            f"engines: {{endpoints: [{{url: '{self.engine_url}', kind: vllm}}]}}\n"
            f"store: {{url: '{self.store_url}', timeout_s: {STORE_TIMEOUT_S}, durability: {self.durability}}}\n"
        )
        words = [sys.executable, "-m", "proxy", "serve", "--config", str(config)]
        return Part(f"proxy-{number}", words, self.folder, source)

    async def start(self) -> None:
        await self.engine.start()
        servers = "\n".join(f"    server p{number} 127.0.0.1:{port}" for number, port in enumerate(self._ports))
        text = HAPROXY.format(port=self.port, servers=servers)
        (self.folder / "haproxy.cfg").write_text(text)
        await asyncio.gather(*(proxy.start() for proxy in self.proxies))
        await asyncio.gather(*map(self.ready, self.urls))
        await self._balancer.start()
        await self.ready(self.url)

    async def ready(self, url: str) -> None:
        """Wait until a proxy is ready, with its store."""
        async with asyncio.timeout(60), aiohttp.ClientSession() as http:
            while True:
                with suppress(aiohttp.ClientError, OSError):
                    async with http.get(url + "/ready") as response:
                        shown = await response.json()
                    assert "store" in shown, f"{url} is not a proxy: {shown}"
                    if response.status == 200 and shown["store"] == "ok":
                        return
                await asyncio.sleep(0.05)

    async def restart(self, number: int, source: Path | None = None) -> None:
        """Stop a proxy as a rolling upgrade does, and start it again, perhaps from another source tree."""
        code = await self.proxies[number].end(signal.SIGTERM)
        assert code == 0, f"after SIGTERM the proxy ended with {code}"
        self.proxies[number] = self.proxy(number, source)
        await self.proxies[number].start()
        await self.ready(self.urls[number])

    async def slots(self, rollouts: Sequence[str]) -> dict[str, int]:
        """Return the slot of each rollout."""
        store = await open_store(self.store_url)
        try:
            return {name: key_slot(store.layout.rollout(name).rollout) for name in rollouts}
        finally:
            await store.close()

    async def key_beside(self, rollout: str) -> str:
        """Return a key in the slot of a rollout that no rollout has."""
        store = await open_store(self.store_url)
        try:
            return store.layout.bucket(rollout).prefix + "other"
        finally:
            await store.close()

    async def names_in_slot(self, slot: int, count: int) -> list[str]:
        """Return names of rollouts in a slot."""
        store = await open_store(self.store_url)
        try:
            found = (
                name
                for name in map("s{}".format, itertools.count())
                if key_slot(store.layout.rollout(name).rollout) == slot
            )
            return list(itertools.islice(found, count))
        finally:
            await store.close()

    async def stop(self) -> None:
        """Stop the proxies, so that steps of abandoned calls are written, and all else."""
        for part in (*self.proxies, self._balancer, self.engine):
            if part.process is not None and part.process.returncode is None:
                await part.end(signal.SIGTERM if part in self.proxies else signal.SIGKILL)


@asynccontextmanager
async def serving(folder: Path, store_url: str, **options: object) -> AsyncIterator[Fleet]:
    """Run three proxies behind HAProxy."""
    fleet = Fleet(folder, store_url, **options)  # type: ignore[arg-type]
    try:
        await fleet.start()
        yield fleet
    finally:
        await fleet.stop()


@dataclass(frozen=True, slots=True)
class Failure:
    """A call that did not end with its whole response. `at`: seconds of the event loop's clock."""

    rollout: str
    began: float
    at: float
    why: str


@dataclass(slots=True)
class Traffic:
    """Agents that call in rollouts of their own until they are stopped; `ended` maps each whole call to its step ID."""

    url: str
    ended: dict[str, str] = field(default_factory=dict)
    ended_at: dict[str, float] = field(default_factory=dict)
    rollouts: dict[str, str] = field(default_factory=dict)  # of each call
    failures: list[Failure] = field(default_factory=list)
    _stopped: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: list["asyncio.Task[None]"] = field(default_factory=list)

    def start(self, count: int, *, seed: int = 1) -> "Traffic":
        self._tasks = [asyncio.create_task(self._agent(number, Random(seed + number))) for number in range(count)]
        return self

    async def stop(self) -> None:
        self._stopped.set()
        await asyncio.gather(*self._tasks)

    async def at_least(self, count: int) -> None:
        """Wait until this many more calls have ended."""
        until = len(self.ended) + count
        async with asyncio.timeout(60):
            while len(self.ended) < until:
                await asyncio.sleep(0.02)

    async def at_least_of(self, rollouts: set[str], count: int) -> None:
        """Wait until this many calls of these rollouts that began after now have ended."""
        now = asyncio.get_running_loop().time()
        async with asyncio.timeout(60):
            while sum(at > now and self.rollouts[uid] in rollouts for uid, at in self.ended_at.items()) < count:
                await asyncio.sleep(0.1)

    async def _agent(self, number: int, dice: Random) -> None:
        turn = 0
        timeout = aiohttp.ClientTimeout(total=_CALL_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            while not self._stopped.is_set():
                turn += 1
                rollout = f"r{number}-{turn % _ROLLOUTS}"
                await self._call(http, rollout, f"u{number}.{turn}", stream=dice.random() < 0.5)

    async def _call(self, http: aiohttp.ClientSession, rollout: str, uid: str, *, stream: bool) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": f"{uid} whole 0"}], "stream": stream}
        began, why = asyncio.get_running_loop().time(), None
        self.rollouts[uid] = rollout
        try:
            async with http.post(f"{self.url}/rollouts/{rollout}/v1/chat/completions", json=body) as response:
                text = await response.read()
                if response.status != 200 or (stream and not text.endswith(b"data: [DONE]\n\n")):
                    why = f"{response.status} {text[-400:].decode(errors='replace')}"
                else:
                    self.ended[uid] = response.headers["X-Step-Id"]
                    self.ended_at[uid] = asyncio.get_running_loop().time()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            why = repr(error)
        if why is not None:
            self.failures.append(Failure(rollout, began, asyncio.get_running_loop().time(), why))
            await asyncio.sleep(0.05)


async def judge(fleet: Fleet, traffic: Traffic, *, may_lose: Callable[[str], bool] = lambda uid: False) -> Counter[str]:
    """Assert that each call that ended is stored once with what the engine sampled; return the counts.

    `may_lose`: whether a call that ended may be missing, because the durability does not promise it.
    """
    seen: dict[str, list[str]] = {}
    store = await open_store(fleet.store_url, StoreOptions(timeout_s=30))
    try:
        async for name in store.names():
            for uid, step in await _steps(store, name):
                seen.setdefault(uid, []).append(step)
    finally:
        await store.close()
    lost = sorted(uid for uid in traffic.ended.keys() - seen.keys())
    twice = [uid for uid, steps in seen.items() if len(steps) > 1]
    others = [uid for uid, step in traffic.ended.items() if uid in seen and step != seen[uid][0]]
    unexpected = [uid for uid in lost if not may_lose(uid)]
    assert not unexpected, f"{len(unexpected)} calls ended, but are not stored: {unexpected[:10]}"
    assert not twice, f"stored twice: {twice[:10]}"
    assert not others, f"their clients got other step IDs: {others[:10]}"
    return Counter(ended=len(traffic.ended), failed=len(traffic.failures), lost=len(lost), stored=len(seen))


async def _steps(store: Store, name: str) -> list[tuple[str, str]]:
    """Return the call and the ID of each step of a rollout; its ids are those that the engine sampled."""
    stored = await store.read_all(name, 100_000)
    assert stored is not None
    reader = BlockReader(stored.blocks)
    steps = [decode(record, reader, index) for index, record in enumerate(stored.records)]
    found = []
    for step in steps:
        uid = step.request["messages"][-1]["content"].split()[0]
        found.append((uid, step.step_id))
        if step.status == "complete":
            ids, logprobs = sampled(uid)
            assert step.choices[0].ids.tolist() == ids, f"{uid}: other ids than the engine sampled"
            assert step.choices[0].logprobs.tolist() == logprobs, f"{uid}: other logprobs"
    return found


def old_release(folder: Path) -> Path:
    """Return a source tree of release 0.1.0, from the repository's history."""
    target = folder / "0.1.0"
    target.mkdir()
    packed = subprocess.run(["git", "archive", _RELEASE], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "--extract", "--directory", str(target)], input=packed, check=True)
    return target
