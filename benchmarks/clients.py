"""Compares clients of a cluster (docs/decisions/145): `python -m benchmarks.clients --store redis+cluster://HOST:PORT`.

Each makes the same calls of a script with eight keys, 16 at a time, for `--seconds`. The table has the CPU time of this process
for a call, the failed calls and the longest one. To compare faults, run one `--client` at a time, and meanwhile kill or freeze
a primary, or move a slot. valkey-glide is compared if it is installed.
"""

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from urllib.parse import urlsplit

import uvloop
from redis.asyncio.cluster import RedisCluster
from rich.console import Console
from rich.table import Table

from storage import StoreOptions, open_store

AT_ONCE = 16
SLOTS = 256
TIMEOUT_S = 10
SCRIPT = "for _, key in ipairs(KEYS) do redis.call('HINCRBY', key, 'calls', 1) end return #KEYS"
Call = Callable[[Sequence[str]], Awaitable[object]]


async def ours(url: str) -> tuple[Call, Callable[[], Awaitable[object]]]:
    """Return the call of our client, and what closes it."""
    store = await open_store(url, StoreOptions(prefix="clients", timeout_s=TIMEOUT_S))
    servers = store._servers  # noqa: SLF001 - the client itself

    async def call(keys: Sequence[str]) -> None:
        (reply,) = await servers.execute(keys[0].encode(), [("EVAL", SCRIPT, len(keys), *keys)], shared=True)
        if isinstance(reply, Exception):
            raise reply

    return call, store.close


async def redis_py(url: str) -> tuple[Call, Callable[[], Awaitable[object]]]:
    """Return the same of redis-py."""
    address = urlsplit(url.split(",", maxsplit=1)[0])
    client = RedisCluster(host=address.hostname or "", port=address.port or 6379, socket_timeout=TIMEOUT_S)
    return lambda keys: client.eval(SCRIPT, len(keys), *keys), client.aclose


async def glide(url: str) -> tuple[Call, Callable[[], Awaitable[object]]]:
    """Return the same of valkey-glide."""
    from glide import GlideClusterClient, GlideClusterClientConfiguration, NodeAddress

    address = urlsplit(url.split(",", maxsplit=1)[0])
    nodes = [NodeAddress(address.hostname or "", address.port or 6379)]
    client = await GlideClusterClient.create(GlideClusterClientConfiguration(nodes, request_timeout=1000 * TIMEOUT_S))
    return lambda keys: client.custom_command(["EVAL", SCRIPT, str(len(keys)), *keys]), client.close


CLIENTS = {"ours": ours, "redis-py": redis_py, "valkey-glide": glide}


async def measure(call: Call, seconds: float) -> list[str]:
    """Return what the calls of these seconds cost."""
    numbers, taken, failures = count(), list[float](), list[Exception]()
    end, began_cpu = time.monotonic() + seconds, time.process_time()

    async def make_calls() -> None:
        while (began := time.monotonic()) < end:
            tag = next(numbers) % SLOTS
            try:
                await call([f"clients:{{{tag}}}:{number}" for number in range(8)])
            except Exception as failure:  # noqa: BLE001 - each client has its own
                failures.append(failure)
            taken.append(time.monotonic() - began)

    await asyncio.gather(*(make_calls() for _ in range(AT_ONCE)))
    cpu_us = 1e6 * (time.process_time() - began_cpu) / len(taken)
    if failures:
        print(repr(failures[0]))
    return [f"{len(taken):,}", f"{cpu_us:.0f}", f"{len(failures)}", f"{max(taken):.2f}"]


async def main(url: str, names: Sequence[str], seconds: float) -> None:
    """Measure the clients and print a table."""
    table = Table("client", "calls", "CPU, µs", "failed", "longest, s")
    for name in names:
        try:
            call, close = await CLIENTS[name](url)
        except ImportError:
            continue
        table.add_row(name, *await measure(call, seconds))
        await close()
    Console(width=140).print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clients", description=__doc__)
    parser.add_argument("--store", required=True, metavar="URL", help="redis+cluster://…, which nothing else uses")
    parser.add_argument("--client", nargs="+", choices=CLIENTS, default=[*CLIENTS], help="(default: all)")
    parser.add_argument("--seconds", type=float, default=10)
    options = parser.parse_args()
    uvloop.run(main(options.store, options.client, options.seconds))
