"""A soak of the training loop: agents that die, faults of every process, trainers that check what they train; until all ends.

`python -m tests.system.faults.training.run --seed 1` is the long form; tests/system/faults/test_training.py the short one.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from tests.system.faults.run import freeze_store, kill_store
from tests.system.faults.training.agents import Agents
from tests.system.faults.training.plan import group_plan
from tests.system.faults.training.system import Kept, TrainingSystem
from tests.system.faults.training.verdict import judge, open_things

Fault = Callable[[TrainingSystem, Random, float], Awaitable[None]]
PLAYED_WITHIN_S = 7.0  # for each group, on a busy machine
ENDS_WITHIN_S = 180.0  # after the last group was played: deadlines, leases, and the last batches


def kill(kind: str) -> Fault:
    """Return the fault that kills a process of this kind."""

    async def kill_one(system: TrainingSystem, dice: Random, away_s: float) -> None:
        found: Sequence[Kept] = getattr(system, kind)
        dice.choice(found).kill()

    kill_one.__name__ = f"kill {kind}"
    return kill_one


async def stop_proxy(system: TrainingSystem, dice: Random, away_s: float) -> None:
    dice.choice(system.proxies).terminate()


FAULTS: list[Fault] = [
    *[kill("trainers")] * 5, *[kill("proxies")] * 3, kill("engines"), stop_proxy, kill_store, kill_store, freeze_store,
]  # fmt: skip


async def inject(system: TrainingSystem, dice: Random, pause_s: float, done: Counter[str]) -> None:
    """Inject all faults in random order, again and again. After most of them the replicas recover before the next one."""
    while True:
        for fault in dice.sample(FAULTS, len(FAULTS)):
            await asyncio.sleep(pause_s * (0.5 + dice.random()))
            await fault(system, dice, 1.0)
            done[fault.__name__] += 1
            if dice.random() < 0.8:
                await system.all_ready()


async def run(
    folder: Path, seed: int, *, groups: int, at_once: int, replicas: int = 3, pause_s: float = 1.5, idle_s: float = 6
) -> dict[str, Any]:
    """Play all groups, and wait until all are trained or dropped; return the counts.

    `at_once` groups are played at the same time, a fault is injected about every `pause_s`, and a rollout with a dead agent
    ends after `idle_s` to 1.5 times that.

    Raises:
        AssertionError: a row is wrong, something is trained twice or lost, or something does not end.
        ExceptionGroup: an agent met an error that no fault causes, a trainer found a wrong row, or a process ended by itself.
    """
    dice, faults, limit = Random(seed), Counter(), asyncio.Semaphore(at_once)
    system = TrainingSystem(folder, seed, replicas=replicas, on_failure=("fail", "spool")[seed % 2])
    began = time.monotonic()

    async def play(number: int) -> None:
        async with limit:
            await agents.play(group_plan(seed, number, idle_s))

    async with system.running(), Agents(system.urls) as agents:
        injecting = asyncio.create_task(inject(system, dice, pause_s, faults))
        try:
            async with asyncio.timeout(ENDS_WITHIN_S + groups * PLAYED_WITHIN_S), asyncio.TaskGroup() as playing:
                for number in range(groups):
                    playing.create_task(play(number))
        except TimeoutError:
            await system.all_ready()
            raise AssertionError(
                "\n".join(["agents do not end:", *await open_things(system.urls[0], groups)])
            ) from None
        finally:
            injecting.cancel()
        await asyncio.wait([injecting])
        assert injecting.cancelled(), injecting.exception()
        played_s = time.monotonic() - began
        await system.all_ready()
        await ended(system, groups)
        counts = await judge(system, agents.attempts, groups)
    return counts | {
        "agents": dict(agents.counts), "faults": dict(faults), "played_s": round(played_s),
        "seconds": round(time.monotonic() - began),
    }  # fmt: skip


async def ended(system: TrainingSystem, groups: int) -> None:
    """Wait until every group has ended for every policy. Raises AssertionError with what is open."""
    deadline = time.monotonic() + ENDS_WITHIN_S
    while found := await open_things(system.urls[0], groups):
        assert time.monotonic() < deadline, "\n".join([f"open after {ENDS_WITHIN_S:g} s:", *found])
        await asyncio.sleep(0.5)


def leaves(failure: BaseException) -> list[BaseException]:
    """Return the exceptions of a group, and of the groups in it."""
    if isinstance(failure, BaseExceptionGroup):
        return [leaf for inner in failure.exceptions for leaf in leaves(inner)]
    return [failure]


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--seed", type=int, default=int(time.time()))
    options.add_argument("--groups", type=int, default=200)
    options.add_argument("--at-once", type=int, default=10)
    options.add_argument("--folder", type=Path, help="an empty folder for logs and journals, which is kept")
    arguments = options.parse_args()
    print(f"training loop, seed {arguments.seed}, {arguments.groups} groups of 8", flush=True)  # noqa: T201
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        try:
            counts = asyncio.run(run(folder, arguments.seed, groups=arguments.groups, at_once=arguments.at_once))
        except* AssertionError as failures:
            sys.exit("\n".join(map(str, leaves(failures))))
    for name, value in counts.items():
        print(f"  {name}: {value}")  # noqa: T201


if __name__ == "__main__":
    main()
