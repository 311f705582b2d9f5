"""One run: load, faults in random order at random times, and the assertions afterwards.

`python -m tests.system.faults.run --seconds 300 --seed 1` is the long form; tests/system/faults/test_faults.py the
short one.
"""

import argparse
import asyncio
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from random import Random

from tests.system.faults.load import Agents
from tests.system.faults.system import System
from tests.system.faults.verdict import judge

Fault = Callable[[System, Random, float], Awaitable[None]]


async def kill_proxy(system: System, dice: Random, away_s: float) -> None:
    await system.proxy.end(signal.SIGKILL)


async def kill_worker(system: System, dice: Random, away_s: float) -> None:
    """Kill one of the processes that share the port; another one replaces it."""
    pids = await system.all_workers()
    lost = dice.choice(pids)
    os.kill(lost, signal.SIGKILL)
    async with asyncio.timeout(30):
        while lost in await system.all_workers():
            await asyncio.sleep(0.02)


async def stop_proxy(system: System, dice: Random, away_s: float) -> None:
    code = await system.proxy.end(signal.SIGTERM)
    assert code == 0, f"after SIGTERM the proxy ended with {code}"


async def kill_store(system: System, dice: Random, away_s: float) -> None:
    await system.store.end(signal.SIGKILL)
    await asyncio.sleep(dice.random() * away_s)
    await system.store.start()
    await system.store_answers()


async def start_without_store(system: System, dice: Random, away_s: float) -> None:
    """Kill both and start the proxy first: it waits for the store, and continues without a restart."""
    await system.store.end(signal.SIGKILL)
    await system.proxy.end(signal.SIGKILL)
    await system.is_alive()
    started = system.proxy.process.pid
    await asyncio.sleep(dice.random() * away_s)
    await system.store.start()
    await system.ready()
    assert system.proxy.process.pid == started, "the proxy ended while it waited for its store"


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


async def fill_disk(system: System, dice: Random, away_s: float) -> None:
    """Fill the disk within an entry of the store's file; with every write synced, the server exits rather than lose
    one.
    """
    system.store.let_files_grow_to(_longest_file(system) + dice.randrange(4000))
    await asyncio.wait_for(system.store.process.wait(), 30)
    await asyncio.sleep(dice.random() * away_s)
    await system.store.start()
    await system.store_answers()


async def fill_disk_of_a_patient_store(system: System, dice: Random, away_s: float) -> None:
    """Fill the disk of a store that does not sync writes: it refuses them (MISCONF) until there is room."""
    await system.ask_store("CONFIG", "SET", "appendfsync", "no")
    system.store.let_files_grow_to(_longest_file(system) + dice.randrange(4000))
    await system.store_says("aof_last_write_status:err")
    await asyncio.sleep(away_s)
    system.store.let_files_grow_to(None)
    await system.store_says("aof_last_write_status:ok")
    await system.ask_store("CONFIG", "SET", "appendfsync", "always")


async def fill_journal(system: System, dice: Random, away_s: float) -> None:
    """Fill the journal's disk while the store is stopped: no client sees the end of a call that fits in neither."""
    size = system.spool.stat().st_size + dice.randrange(20_000) if system.spool.exists() else 0
    system.proxy.let_files_grow_to(size)
    await stop_store(system, dice, away_s)
    system.proxy.let_files_grow_to(None)


async def fail_over(system: System, dice: Random, away_s: float) -> None:
    """Kill or freeze the primary; its replica takes over, and the old primary returns as a replica."""
    await system.followed()
    system.store.send(dice.choice((signal.SIGKILL, signal.SIGSTOP)))
    await asyncio.sleep(dice.random() * away_s)
    await system.promote()
    await asyncio.sleep(dice.random() * away_s)
    await system.replica.end(signal.SIGKILL)
    await system.follow()


def _longest_file(system: System) -> int:
    return max(path.stat().st_size for path in (system.folder / "store").rglob("*") if path.is_file())


FAULTS: list[Fault] = [
    kill_proxy, stop_proxy, start_without_store, kill_store, stop_store, freeze_store, fill_store, fill_disk,
    fill_disk_of_a_patient_store, kill_engine, freeze_engine,
]  # fmt: skip
FAULTS_OF_A_JOURNAL = [*FAULTS, fill_journal]
FAULTS_OF_WORKERS: list[Fault] = [
    kill_worker, kill_worker, kill_proxy, stop_proxy, kill_store, stop_store, freeze_store, kill_engine,
]  # fmt: skip
FAULTS_OF_REPLICAS: list[Fault] = [fail_over, fail_over, kill_proxy, kill_store, freeze_store, kill_engine]


KINDS = [
    ("fail", FAULTS), ("spool", FAULTS_OF_A_JOURNAL), ("fail", FAULTS_OF_REPLICAS), ("spool", FAULTS_OF_A_JOURNAL),
    ("fail", FAULTS_OF_WORKERS), ("spool", FAULTS_OF_REPLICAS), ("spool", FAULTS_OF_WORKERS),
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
    """Run until every fault happened once and the time is over; return the counts.

    Raises:
        AssertionError: a step is lost, doubled, damaged or wrong.
    """
    dice, done = Random(seed), Counter()
    workers = 2 if kill_worker in faults else 1
    system = System(folder, on_failure, replicated=fail_over in faults, workers=workers)
    over = time.monotonic() + seconds
    try:
        await system.start()
        load = Agents(system.url, Random(seed + 1), agents)
        while not done or time.monotonic() < over:
            for fault in dice.sample(faults, len(faults)):
                await asyncio.sleep(dice.random() * min(away_s, 0.5))
                await fault(system, dice, away_s)
                done[fault.__name__] += 1
                await system.ready()
        ended = len(load.ended)
        async with asyncio.timeout(60):
            while len(load.ended) < ended + agents:  # calls continue without help
                await asyncio.sleep(0.02)
        await load.stop()
        await system.ready()
        code = await system.proxy.end(signal.SIGTERM)  # so that steps of abandoned calls are written
        assert code == 0, f"after SIGTERM the proxy ended with {code}"
        await system.ready()
        logged = set(system.engine_log.read_text().split())
        return await judge(system.store_url, load.ended, logged) | {"calls": load.calls, "faults": done.total()}
    finally:
        await system.stop()


def main() -> None:
    """Run with one seed after another, half of the runs with a journal, until the time is over."""
    options = argparse.ArgumentParser()
    options.add_argument("--seconds", type=float, default=480)
    options.add_argument("--seed", type=int, default=int(time.time()))
    arguments = options.parse_args()
    over, seed, total = time.monotonic() + arguments.seconds, arguments.seed, Counter()
    while time.monotonic() < over:
        on_failure, faults = KINDS[seed % len(KINDS)]
        with tempfile.TemporaryDirectory() as folder:
            away_s = Random(seed).uniform(0.2, 4)
            if seed == arguments.seed + 2 and arguments.seconds >= 400:
                away_s, faults = 30, [stop_store]
            print(f"seed {seed}, {on_failure}, {len(faults)} faults, store outages of up to {away_s:.1f} s", flush=True)  # noqa: T201
            counted = asyncio.run(run(Path(folder), seed, on_failure, away_s=away_s, seconds=5, faults=faults))
        print("  nothing lost:", counted, flush=True)  # noqa: T201
        total.update(counted)
        total["runs"] += 1
        seed += 1
    print("all runs:", dict(total))  # noqa: T201


if __name__ == "__main__":
    main()
