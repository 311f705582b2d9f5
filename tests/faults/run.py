"""One run: load, faults in random order at random moments, and what must hold afterwards.

`python -m tests.faults.run --seconds 300 --seed 1` is the long form; tests/faults/test_faults.py the short one.
"""

import argparse
import asyncio
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from random import Random

from tests.faults.load import Agents
from tests.faults.system import System
from tests.faults.verdict import judge

Fault = Callable[[System, Random, float], Awaitable[None]]


async def kill_proxy(system: System, dice: Random, away_s: float) -> None:
    await system.proxy.end(signal.SIGKILL)


async def stop_proxy(system: System, dice: Random, away_s: float) -> None:
    code = await system.proxy.end(signal.SIGTERM)
    assert code == 0, f"after SIGTERM the proxy ended with {code}"


async def kill_store(system: System, dice: Random, away_s: float) -> None:
    await system.store.end(signal.SIGKILL)
    await asyncio.sleep(dice.random() * away_s)
    await system.store.start()
    await system.store_answers()


async def stop_store(system: System, dice: Random, away_s: float) -> None:
    await system.store.end(signal.SIGTERM)
    await asyncio.sleep(away_s)
    await system.store.start()
    await system.store_answers()


async def freeze_store(system: System, dice: Random, away_s: float) -> None:
    system.store.send(signal.SIGSTOP)
    await asyncio.sleep(away_s)
    system.store.send(signal.SIGCONT)


async def fill_store(system: System, dice: Random, away_s: float) -> None:
    await system.ask_store("CONFIG", "SET", "maxmemory", "1")
    await asyncio.sleep(away_s)
    await system.ask_store("CONFIG", "SET", "maxmemory", "0")


async def kill_engine(system: System, dice: Random, away_s: float) -> None:
    await system.engine.end(signal.SIGKILL)
    await asyncio.sleep(dice.random() * away_s)
    await system.engine.start()


async def freeze_engine(system: System, dice: Random, away_s: float) -> None:
    system.engine.send(signal.SIGSTOP)
    await asyncio.sleep(away_s)
    system.engine.send(signal.SIGCONT)


FAULTS: list[Fault] = [
    kill_proxy, stop_proxy, kill_store, stop_store, freeze_store, fill_store, kill_engine, freeze_engine,
]  # fmt: skip


async def run(
    folder: Path,
    seed: int,
    on_failure: str,
    *,
    away_s: float,
    seconds: float = 0,
    agents: int = 6,
    faults: Sequence[Fault] = FAULTS,
) -> dict[str, int]:
    """A run until every fault happened once and the time is over; what was counted. Raises AssertionError."""
    dice, system, done = Random(seed), System(folder, on_failure), Counter()
    over = time.monotonic() + seconds
    await system.start()
    try:
        load = Agents(system.url, Random(seed + 1), agents)
        while not done or time.monotonic() < over:
            for fault in dice.sample(faults, len(faults)):
                await asyncio.sleep(dice.random() * min(away_s, 0.5))
                await fault(system, dice, away_s)
                done[fault.__name__] += 1
                await system.ready()
        ended = len(load.ended)
        async with asyncio.timeout(20):
            while len(load.ended) < ended + agents:  # it goes on by itself
                await asyncio.sleep(0.02)
        await load.stop()
        await system.ready()
        code = await system.proxy.end(signal.SIGTERM)  # so that steps of clients that left are written
        assert code == 0, f"after SIGTERM the proxy ended with {code}"
        await system.ready()
        logged = set(system.engine_log.read_text().split())
        return await judge(system.store_url, load.ended, logged) | {"calls": load.calls, "faults": done.total()}
    finally:
        await system.stop()


def main() -> None:
    """Runs one after the other, each with a seed of its own, half of them with a journal, until the time is over."""
    options = argparse.ArgumentParser()
    options.add_argument("--seconds", type=float, default=480)
    options.add_argument("--seed", type=int, default=int(time.time()))
    said = options.parse_args()
    over, seed, total = time.monotonic() + said.seconds, said.seed, Counter()
    while time.monotonic() < over:
        on_failure = ("fail", "spool")[seed % 2]
        with tempfile.TemporaryDirectory() as folder:
            away_s = 30 if seed == said.seed + 2 and said.seconds >= 400 else Random(seed).uniform(0.2, 4)
            print(f"seed {seed}, {on_failure}, stores away for {away_s:.1f} s", flush=True)  # noqa: T201
            counted = asyncio.run(run(Path(folder), seed, on_failure, away_s=away_s, seconds=5))
        print("  nothing lost:", counted, flush=True)  # noqa: T201
        total.update(counted)
        total["runs"] += 1
        seed += 1
    print("all runs:", dict(total))  # noqa: T201


if __name__ == "__main__":
    main()
