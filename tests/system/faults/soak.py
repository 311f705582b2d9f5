"""Mixed traffic for an hour: memory, file descriptors, keys and metric series must be flat after the warm-up.

`python -m tests.system.faults.soak --seconds 3600` (`make test-faults SOAK=1`) prints a line for each sample.
"""

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import mean

import aiohttp
from tests.system.faults.load import Agents
from tests.system.faults.system import System

WORKERS = 2
AGENTS = 6
TTL_S = 60  # of rollouts: those that nothing deletes expire
CACHE_BYTES = 2 * 2**20  # of each worker: the caches are full before the warm-up ends
SETTINGS = {
    "agents": {"rollout_cache_bytes": CACHE_BYTES},
    "groups": {"idle_s": 30, "start_s": 30, "reward_s": 0},
}
PAGES = (
    "/rollouts?limit=50",
    "/rollouts?status=completed",
    "/groups?limit=20",
    "/metrics",
    "/training?limit=20",
    "/ready",
    "/ui",
)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {}}}}}


@dataclass(frozen=True)
class Sample:
    """What was used at one time: by all processes of the proxy together, and by the store."""

    seconds: float
    calls: int
    resident_mb: float
    descriptors: int
    threads: int
    keys: int
    store_mb: float
    series: int


class Trainer:
    """Opens groups, makes the calls of their rollouts, finishes them with rewards, claims and acknowledges them."""

    def __init__(self, url: str, dice: Random) -> None:
        self._url, self._dice = url, dice
        self.done: Counter[str] = Counter()

    async def run(self) -> None:
        """Train until this is cancelled."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as http:
            number = 0
            while True:
                number += 1
                with suppress(aiohttp.ClientError, OSError, TimeoutError):
                    await self._round(http, number)
                await asyncio.sleep(0.05)

    async def _round(self, http: aiohttp.ClientSession, number: int) -> None:
        group = await self._post(http, "/groups", {"size": 2, "rollout": {"metadata": {"number": number}}})
        for rollout in group["rollouts"]:
            name = rollout["rollout_id"]
            for turn in range(self._dice.randrange(1, 4)):
                await self._call(http, name, f"g{number}.{turn}")
            await self._post(http, f"/rollouts/{name}/finish", {"status": "completed", "reward": self._dice.random()})
        claim = {
            "consumer": "soak",
            "groups": 2,
            "lease_s": 30,
            "format": self._dice.choice(("trl", "sequences", "verl")),
        }
        batch = await self._post(http, "/batches/claim", claim)
        if batch["batch_id"] is not None:
            settled = "release" if self._dice.random() < 0.1 else "ack"
            body = {"delete": True} if settled == "ack" and self._dice.random() < 0.5 else None
            await self._post(http, f"/batches/{batch['batch_id']}/{settled}", body)
            self.done[settled] += 1

    async def _call(self, http: aiohttp.ClientSession, rollout: str, uid: str) -> None:
        """Make a chat call with tools, or one in another dialect."""
        content = f"{uid} whole 0"
        if self._dice.random() < 0.3:
            message = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": content}]}
            await self._post(http, f"/rollouts/{rollout}/v1/messages", message)
        else:
            history = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": "I look."}]
            body = {"model": "m", "messages": [*history, {"role": "user", "content": content}], "tools": [TOOL]}
            await self._post(http, f"/rollouts/{rollout}/v1/chat/completions", body)

    async def _post(self, http: aiohttp.ClientSession, path: str, body: object) -> dict:
        async with http.post(self._url + path, json=body) as response:
            shown = await response.json()
            self.done[f"{path.split('/')[1]} {response.status}"] += 1
            response.raise_for_status()
            return shown


async def read(url: str, dice: Random) -> None:
    """Request pages, lists, exports and metrics until this is cancelled."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http:
        while True:
            with suppress(aiohttp.ClientError, OSError, TimeoutError, IndexError):
                async with http.get(url + dice.choice(PAGES)) as response:
                    await response.read()
                async with http.get(f"{url}/rollouts?limit=5") as response:
                    name = dice.choice((await response.json())["rollouts"])["rollout_id"]
                for part in ("", "/steps", "/tree", "/export?format=sequences"):
                    async with http.get(f"{url}/rollouts/{name}{part}") as response:
                        await response.read()
            await asyncio.sleep(0.25)


async def sample(system: System, began: float, calls: int) -> Sample:
    """Return what is used now."""
    pids = [system.proxy.process.pid, *await system.all_workers()]
    folders = [Path(f"/proc/{pid}") for pid in pids]
    async with aiohttp.ClientSession() as http, http.get(system.url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    info = dict(line.split(":", 1) for line in (await system.ask_store("INFO")).decode().splitlines() if ":" in line)
    keys = int(info.get("db0", "keys=0,").split(",")[0].removeprefix("keys="))
    return Sample(
        time.monotonic() - began,
        calls,
        sum(_resident_kb(folder) for folder in folders) / 1024,
        sum(len(list((folder / "fd").iterdir())) for folder in folders),
        sum(len(list((folder / "task").iterdir())) for folder in folders),
        keys,
        int(info["used_memory"]) / 2**20,
        sum(not line.startswith("#") for line in lines),
    )


def _resident_kb(folder: Path) -> int:
    return next(
        int(line.split()[1]) for line in (folder / "status").read_text().splitlines() if line.startswith("VmRSS")
    )


LIMITS = {  # growth of the mean from the middle third of the time to the last third: a share, and an amount
    "resident_mb": (0.03, 3), "descriptors": (0.1, 10), "threads": (0, 4), "keys": (0.15, 300), "store_mb": (0.15, 3),
    "series": (0.01, 10),
}  # fmt: skip


def grown(samples: Sequence[Sample]) -> list[str]:
    """Return what grew after the warm-up, the first third of the samples, beyond its limit."""
    third = len(samples) // 3
    middle, last = (
        {name: mean(asdict(one)[name] for one in part) for name in LIMITS}
        for part in (samples[third:-third], samples[-third:])
    )
    return [
        f"{name} grew from {middle[name]:.1f} to {last[name]:.1f}"
        for name, (share, amount) in LIMITS.items()
        if last[name] - middle[name] > share * middle[name] + amount
    ]


async def soak(folder: Path, seed: int, seconds: float, interval_s: float) -> list[Sample]:
    """Run the traffic; return the samples."""
    dice, samples = Random(seed), list[Sample]()
    system = System(folder, "fail", workers=WORKERS, store={"ttl_s": TTL_S}, **SETTINGS)
    try:
        await system.start()
        agents = Agents(system.url, Random(seed + 1), AGENTS, pause_s=0.01)
        trainer = Trainer(system.url, Random(seed + 2))
        others = [asyncio.create_task(each) for each in (trainer.run(), read(system.url, dice))]
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            await asyncio.sleep(interval_s)
            samples.append(await sample(system, began, agents.calls + trainer.done["rollouts 200"]))
            shown = (f"{name} {value:,.1f}".removesuffix(".0") for name, value in asdict(samples[-1]).items())
            print("  ".join(shown), flush=True)  # noqa: T201
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await agents.stop()
        print(f"statuses of calls {dict(agents.statuses)}, of the trainer {dict(trainer.done)}", flush=True)  # noqa: T201
    finally:
        await system.stop()
    return samples


def main() -> None:
    """Run for the time that the command line names; exit with an error if something grew."""
    options = argparse.ArgumentParser()
    options.add_argument("--seconds", type=float, default=3600)
    options.add_argument("--interval", type=float, default=10)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--folder", type=Path, help="for logs, which are kept")
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        chosen = arguments.folder or Path(folder)
        samples = asyncio.run(soak(chosen, arguments.seed, arguments.seconds, arguments.interval))
    if found := grown(samples):
        raise SystemExit("not flat after the warm-up: " + "; ".join(found))
    print(f"flat after the warm-up: {samples[-1]}")  # noqa: T201


if __name__ == "__main__":
    main()
