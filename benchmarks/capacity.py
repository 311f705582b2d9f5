"""Measures what a call costs its proxy and its Redis: the figures of docs/scaling.md. It needs a redis-server.

`python -m benchmarks.capacity` prints a table: CPU time of both, bytes to and from Redis, and bytes that Redis keeps. Redis
writes its append-only file every second. CPU times depend little on what else the machine does.
"""

import asyncio
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Final

import redis
from rich.console import Console

from benchmarks import load, results
from benchmarks.servers import Server, free_port, started

_WARM: Final = 2  # rollouts of each client before the measurement
_HEADER: Final = (
    "call", "proxy, µs", "Redis, µs", "calls/s of a proxy", "calls/s of a Redis core", "to Redis, B", "from Redis, B",
    "stored, B",
)  # fmt: skip

# Calls of each kind, the clients that make them, and the rollouts of each client.
KINDS: Final[Mapping[str, tuple[load.Calls, int, int]]] = {
    "1,000 + 200 tokens, first calls of rollouts": (load.chat("whole", 1), 16, 60),
    "1,000 + 200 tokens, unstreamed": (load.chat("whole"), 16, 20),
    "1,000 + 200 tokens, streamed in 200 events": (load.chat("stream"), 16, 8),
    "a turn of a conversation up to 8,000 tokens": (load.conversation(1_000, 700, 10, "append"), 8, 4),
    "a turn of a conversation up to 32,000 tokens": (load.conversation(2_000, 3_000, 10, "append"), 4, 3),
}


@contextmanager
def redis_server(folder: str) -> Iterator[redis.Redis]:
    """Run a redis-server inside the context."""
    binary, port = shutil.which("redis-server"), free_port()
    assert binary, "redis-server is not installed (Debian: apt-get install redis-server)"
    command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", "", "--appendonly", "yes"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    client = redis.Redis(port=port)
    try:
        while True:
            try:
                client.ping()
            except redis.ConnectionError:
                continue
            break
        yield client
    finally:
        client.close()
        process.kill()
        process.wait()


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        client = stack.enter_context(redis_server(folder))
        url = f"redis://127.0.0.1:{client.get_connection_kwargs()['port']}"
        upstream = stack.enter_context(started("upstream"))
        server = stack.enter_context(started("tokentape", upstream.url, url))
        rows = [_measured(name, server, client) for name in KINDS]
    Console(width=200).print(f"{results.machine()}\n\n{results.table(_HEADER, rows)}", markup=False)


def _measured(name: str, server: Server, client: redis.Redis) -> tuple[str, ...]:
    calls, clients, rollouts = KINDS[name]
    asyncio.run(load.throughput(server.port, calls, clients=clients, rollouts=_WARM))
    count = clients * rollouts * len(calls.bodies)
    before, own = _counted(client), server.processor_s()[0]
    asyncio.run(load.throughput(server.port, calls, clients=clients, rollouts=rollouts))
    proxy_us = (server.processor_s()[0] - own) / count * 1e6
    redis_us, into, out, stored = ((after - was) / count for was, after in zip(before, _counted(client), strict=True))
    rates = f"{1e6 / proxy_us:,.0f}", f"{1e6 / (redis_us * 1e6):,.0f}"
    return name, f"{proxy_us:,.0f}", f"{redis_us * 1e6:,.0f}", *rates, f"{into:,.0f}", f"{out:,.0f}", f"{stored:,.0f}"


def _counted(client: redis.Redis) -> tuple[float, float, float, float]:
    """Return CPU seconds, bytes received and sent, and bytes of data of the server."""
    info = client.info("everything")
    cpu = info["used_cpu_user_main_thread"] + info["used_cpu_sys_main_thread"]
    return cpu, info["total_net_input_bytes"], info["total_net_output_bytes"], info["used_memory_dataset"]


if __name__ == "__main__":
    main()
