"""Fills a store with finished rollouts of one step and with groups in the queue: `python -m benchmarks.fill --store URL`.

The records and keys are the product's: each rollout is opened, gets a step, and is finished with the functions that calls and
requests use, at times of the last day. Use a server without persistence: `redis-server --save '' --appendonly no`.
"""

import argparse
import asyncio
import multiprocessing
import os
import random
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import orjson
import uvloop
from prometheus_client import CollectorRegistry

from proxy.clock import SystemClock
from proxy.rollouts.finishing import Finisher
from proxy.rollouts.group import member_fields
from proxy.rollouts.playback import Tapes
from proxy.rollouts.recorder import entry_of
from proxy.rollouts.rollout import DRIFT_FIELD, deadlines_of, first_due_ms, read_rollout, write_fields
from proxy.telemetry.metrics import make_metrics
from proxy.trajectory.codec import encode
from proxy.trajectory.step import Choice, EngineFacts, Span, Step, Timing
from storage import StoreOptions, open_store
from storage.redis.store import Store

CONCURRENCY = 64  # writers of a process, whose commands share writes to the server
MEMBERS = 2  # rollouts of a group
DAY_MS = 86_400_000
POLICIES = ("default", "critic", "judge")
STATUSES = ("completed",) * 16 + ("truncated", "truncated", "failed", "aborted")
NO_DRIFT = {DRIFT_FIELD: orjson.dumps({"kinds": {}, "steps": 1})}
ENGINE = EngineFacts("engine", "vllm", "0.32.0", "http://engine:8000")


@dataclass(frozen=True, slots=True)
class Share:
    """What one process writes: the rollouts and groups with these numbers."""

    url: str
    prefix: str
    rollouts: range
    groups: range = range(0)

    def parts(self, count: int) -> "list[Share]":
        """Return this share in parts."""
        return [
            replace(self, rollouts=self.rollouts[first::count], groups=self.groups[first::count])
            for first in range(count)
        ]


class _NoDrift:
    """In place of the reporter that would read each finished rollout again: a single step has no drift."""

    def settle(self, _rollout_id: str) -> None: ...

    def complete(self, _rollout: object) -> None: ...


class Writer:
    """Writes rollouts and groups to a store."""

    def __init__(self, store: Store, seed: int) -> None:
        self._store = store
        self._chance = random.Random(seed)
        self._clock = SystemClock()
        self._finisher = Finisher(store, self._clock, make_metrics(CollectorRegistry()), _NoDrift(), Tapes(store))
        self._names = 0

    async def rollout(self, number: int) -> None:
        """Store a rollout that its first call opened, at a random time of the last day."""
        opened_ms = self._clock.now_ms() - self._chance.randrange(DAY_MS)
        name = f"rollout-{number:07}"
        stored = await self._store.open(name, {}, now_ms=opened_ms)
        await self._append(name, stored.incarnation, opened_ms, self._chance.choice(POLICIES))
        finished_ms = opened_ms + self._chance.randrange(2_000, 600_000)
        status = self._chance.choice(STATUSES)
        reward = round(self._chance.random(), 3) if status == "completed" else None
        values = {"status": status, "finished_ms": finished_ms, "reward": reward}
        await self._store.update_if(name, write_fields(values) | NO_DRIFT, expect={"status": None}, now_ms=finished_ms)

    async def group(self, number: int) -> None:
        """Store a complete group, as `POST /groups` opens it and the finishes of its rollouts complete it."""
        store, now_ms, name = self._store, self._clock.now_ms(), f"group-{number:06}"
        members = list(islice((it for it in self._ids(number) if store.same_slot(name, it)), MEMBERS))
        opening = {"group_id": name, "size": MEMBERS, "rollout": {}}
        deadlines = deadlines_of({}, idle_s=3600, start_s=1800)
        fields = write_fields({"size": MEMBERS, "members": members})
        fields["opened_with"] = orjson.dumps(opening, option=orjson.OPT_SORT_KEYS)
        terms, timer_ms = member_fields(opening, deadlines), first_due_ms(deadlines, now_ms)
        await store.open_group(name, fields, dict.fromkeys(members, terms), now_ms=now_ms, timer_ms=timer_ms)
        for member in members:
            stored = await store.get(member)
            await self._append(member, stored.incarnation, now_ms, POLICIES[0])
            rollout = read_rollout(await store.get(member))
            await self._finisher.finish(rollout, "completed", reward=round(self._chance.random(), 3))
            await store.update_if(member, NO_DRIFT, expect={DRIFT_FIELD: None}, now_ms=self._clock.now_ms())

    def _ids(self, number: int) -> Iterator[str]:
        """Return names of rollouts; those in the slot of the group can be its members."""
        while True:
            self._names += 1
            yield f"member-{number:06}-{self._names:x}"

    async def _append(self, name: str, incarnation: str, time_ms: int, policy: str) -> None:
        step = self._step(name, time_ms / 1000, policy)
        await self._store.append(entry_of(step, incarnation, encode(step)), now_ms=time_ms + 1500)

    def _step(self, name: str, time_s: float, policy: str) -> Step:
        """Return an exact step with 24 prompt tokens and 24 completion tokens."""
        chance = self._chance
        prompt = array("i", (chance.getrandbits(16) for _ in range(24)))
        ids = array("i", (chance.getrandbits(16) for _ in range(24)))
        words = " ".join(f"w{token % 1000}" for token in ids)
        version = str(chance.randrange(100))
        request = {
            "model": policy,
            "messages": [{"role": "user", "content": f"Solve task {chance.randrange(10_000)}."}],
        }
        message = {"role": "assistant", "content": words}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 24, "completion_tokens": 24, "total_tokens": 48}
        return Step(
            step_id=f"step-{name}",
            rollout_id=name,
            dialect="chat",
            endpoint="/v1/chat/completions",
            engine=ENGINE,
            model_asked=policy,
            model_served=policy,
            request=request,
            sent={"set": {"return_token_ids": True, "logprobs": True}, "unset": []},
            response={"id": "c", "object": "chat.completion", "created": 1, "model": policy, "choices": [choice]},
            prompts=(prompt,),
            choices=(Choice(0, ids, array("f", [-0.25] * 24), "stop", None, 0, (Span(0, 24, version),)),),
            usage=usage,
            sampling={"temperature": 1.0},
            timing=Timing(time_s, time_s, time_s + 0.5, time_s + 1.4, time_s + 1.5),
            status="complete",
            policy=policy,
            policy_version=version,
        )


async def fill(share: Share) -> None:
    """Write one share."""
    store = await open_store(share.url, StoreOptions(prefix=share.prefix))
    writer = Writer(store, share.rollouts.start)
    rollouts, groups = iter(share.rollouts), iter(share.groups)

    async def write() -> None:
        for number in rollouts:
            await writer.rollout(number)
        for number in groups:
            await writer.group(number)

    await asyncio.gather(*(write() for _ in range(CONCURRENCY)))
    await store.close()


def _run(share: Share) -> None:
    uvloop.run(fill(share))


def fill_all(share: Share, processes: int | None = None) -> float:
    """Fill a store with several processes; return the seconds."""
    count = processes or os.cpu_count() or 1
    started = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        pool.map(_run, share.parts(count))
    return time.monotonic() - started


def main() -> None:
    """Fill the store that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fill", description=__doc__)
    parser.add_argument("--store", required=True, metavar="URL", help="redis://…, redis+cluster://… or unix:PATH")
    parser.add_argument("--prefix", default="tt", help="of all keys (default: %(default)s)")
    parser.add_argument("--rollouts", type=int, default=1_000_000, help="(default: %(default)s)")
    parser.add_argument(
        "--groups", type=int, default=0, help="in the queue, of two rollouts each (default: %(default)s)"
    )
    parser.add_argument("--processes", type=int, help="that write (default: one for each CPU)")
    options = parser.parse_args()
    share = Share(options.store, options.prefix, range(options.rollouts), range(options.groups))
    elapsed = fill_all(share, options.processes)
    written = options.rollouts + MEMBERS * options.groups
    print(f"{written:,} rollouts, {options.groups:,} groups in {elapsed:.0f} s ({written / elapsed:,.0f} rollouts/s)")


if __name__ == "__main__":
    main()
