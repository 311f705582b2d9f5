"""Measures what processes and trainers cost Redis together: heartbeats, and claims. It needs a redis-server.

`python -m benchmarks.coordination` prints a table: the share of a Redis core that heartbeats take (`--processes`, all in this
process, with their own connections and `--policies`), and the time of Redis for the commands of a claim by the number of leased
groups (`--leased`). The time of a script includes what the kernel gives to others: measure on an idle machine.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable

import redis
from rich.console import Console

from benchmarks.capacity import redis_server
from benchmarks.servers import allow_many_sockets
from proxy.rollouts.policy import Heartbeats, Pause
from proxy.trajectory.step import DEFAULT_POLICY
from storage import StoreOptions, open_store
from storage.redis.store import Store

_SECONDS = 5.0
_AT_ONCE = 64
_CLAIMS = 50
_LEASE = {"lease_ms": 86_400_000, "now_ms": 1}


async def measure_heartbeats(
    client: redis.Redis, url: str, count: int, policies: list[str], show: Callable[..., None]
) -> None:
    """Let processes send heartbeats while idle, paused and draining."""
    stores, pauses, heartbeats = [], [], []
    for number in range(count):
        stores.append(await open_store(url, StoreOptions()))
        heartbeats.append(Heartbeats(stores[-1].announcements, f"process-{number}"))
        pauses += [Pause(heartbeats[-1], policy=name, max_waiting=1, timeout_s=60) for name in policies]
        await heartbeats[-1].beat()
        heartbeats[-1].start()
    await _share(client, f"{count} processes, idle", show)
    for pause in pauses:
        pause.in_flight = 1
    await asyncio.sleep(1.5)
    began = time.monotonic()
    assert await pauses[0].drained("wait", drain_s=0) == (count, False)
    show("a pause of a policy is known to all", f"{time.monotonic() - began:.2f} s")
    await _share(client, f"{count} processes, paused with calls in flight", show)

    async def end_calls() -> None:
        for pause in pauses:
            pause.in_flight = 0
            await asyncio.sleep(0.9 * _SECONDS / len(pauses))

    ending = asyncio.create_task(end_calls())
    await _share(client, f"{count} processes, draining", show)
    await ending
    for process, store in zip(heartbeats, stores, strict=True):
        await process.close()
        await store.close()


async def _share(client: redis.Redis, what: str, show: Callable[..., None]) -> None:
    before, began, beats = _cpu_s(client), time.monotonic(), _evals(client)[0]
    await asyncio.sleep(_SECONDS)
    seconds = time.monotonic() - began
    share, rate = (_cpu_s(client) - before) / seconds, (_evals(client)[0] - beats) / seconds
    show(what, f"{100 * share:.1f} % of a core, {rate:.0f} heartbeats/s")


async def measure_claims(client: redis.Redis, store: Store, leased: int, show: Callable[..., None]) -> None:
    """Lease groups, and measure the commands of further claims."""
    missing = leased - (await store.queue.counts()).claimed
    await _each(range(missing), lambda number: _leased(store, f"leased-{leased}-{number}"))
    names = [f"free-{leased}-{number}" for number in range(_CLAIMS)]
    await _each(names, lambda name: _enqueued(store, name))
    await store.queue.read(limit=1000)
    took = []
    before = _evals(client)[1]
    for _ in range(_CLAIMS):
        (queued, *_) = (await store.queue.read(limit=1)).groups
        took.append(_evals(client)[1] - before)
        await store.queue.claim(queued, f"h {queued.group}", {}, **_LEASE)
        took.append(_evals(client)[1] - before - took[-1])
        before = _evals(client)[1]
    show(f"{leased} leased groups: read, counts included", f"{sorted(took[::2])[_CLAIMS // 2]} µs")
    show(f"{leased} leased groups: lease and note it", f"{sorted(took[1::2])[_CLAIMS // 2]} µs")
    client.delete(*store.layout.groups.buckets[0].queue_index())
    began = _cpu_s(client)
    await store.queue.counts()  # finds no index, and makes it from the streams
    show(f"{leased} leased groups: make the index again", f"{1000 * (_cpu_s(client) - began):.0f} ms of CPU time")


async def _each(items: Iterable, work: Callable[..., Awaitable[object]]) -> None:
    left = iter(items)

    async def worker() -> None:
        for item in left:
            await work(item)

    await asyncio.gather(*(worker() for _ in range(_AT_ONCE)))


async def _enqueued(store: Store, name: str) -> None:
    await store.groups.open(name, {}, now_ms=1)
    await store.queue.enqueue(name, {"default": b'{"oldest":"7","rewarded":true}'}, {}, expect={}, now_ms=1)


async def _leased(store: Store, name: str) -> None:
    await _enqueued(store, name)
    for queued in (await store.queue.read(limit=_AT_ONCE)).groups:
        if await store.queue.claim(queued, f"h {queued.group}", {}, **_LEASE):
            return


def _cpu_s(client: redis.Redis) -> float:
    info = client.info("cpu")
    return info["used_cpu_user"] + info["used_cpu_sys"]


def _evals(client: redis.Redis) -> tuple[int, int]:
    """Return how many scripts the server has run, and for how many µs."""
    stats = [
        client.info("commandstats").get(f"cmdstat_{name}", {"calls": 0, "usec": 0}) for name in ("evalsha", "eval")
    ]
    return sum(stat["calls"] for stat in stats), sum(stat["usec"] for stat in stats)


async def measure(processes: int, policies: int, leased: list[int]) -> None:
    """Print all figures."""
    console = Console(width=140)

    def show(what: str, figure: str) -> None:
        console.print(f"{what:75} {figure}")

    with tempfile.TemporaryDirectory() as folder, redis_server(folder) as client:
        url = f"redis://127.0.0.1:{client.connection_pool.connection_kwargs['port']}"
        names = [DEFAULT_POLICY, *(f"policy-{number}" for number in range(1, policies))]
        await measure_heartbeats(client, url, processes, names, show)
        store = await open_store(url, StoreOptions())
        for count in leased:
            await measure_claims(client, store, count, show)
        await store.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coordination", description=__doc__)
    parser.add_argument("--processes", type=int, default=1000)
    parser.add_argument("--policies", type=int, default=1)
    parser.add_argument("--leased", type=int, nargs="*", default=[10, 3_000, 50_000])
    options = parser.parse_args()
    allow_many_sockets()
    asyncio.run(measure(options.processes, options.policies, options.leased))
