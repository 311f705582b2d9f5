"""Consumer processes of two proxies; some of them, and one proxy, are killed."""

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import orjson

CONSUMER = Path(__file__).parent / "consumer.py"


@contextmanager
def serving(server, prefix: str, settings: Mapping[str, str]) -> Iterator[tuple[subprocess.Popen, str]]:
    """Run a proxy in a separate process."""
    words = [sys.executable, "-m", "proxy", "serve", "--listen", "127.0.0.1:0", "--store", f"unix:{server.socket}"]
    environment = {**os.environ, "TOKENTAPE_STORE__PREFIX": prefix, **settings}
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        body = ""
        while not (found := re.search(r"listening (http://\S+)", body)):
            body += process.stderr.readline()
            assert process.poll() is None, body
        yield process, found[1]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def open_log(log: Path) -> None:
    log.touch()


def started(words: list[str]) -> subprocess.Popen:
    return subprocess.Popen(words)


async def consume(
    server,
    prefix: str,
    log: Path,
    done: Callable[[], Awaitable[int]],
    count: int,
    *,
    policies: Sequence[str] = ("",),
    settings: Mapping[str, str] | None = None,
) -> None:
    """Run two consumers or more for each policy until `done` returns `count`; a proxy is killed after a third of it."""
    open_log(log)
    chance = random.Random(7)
    with ExitStack() as stack:
        (dying, first), (_, second) = (stack.enter_context(serving(server, prefix, settings or {})) for _ in range(2))
        consumers: list[tuple[str, subprocess.Popen]] = []
        stack.callback(lambda: [consumer.kill() or consumer.wait() for _, consumer in consumers])
        while (so_far := await done()) < count:
            for policy in policies:
                while sum(named == policy and consumer.poll() is None for named, consumer in consumers) < 4 // len(
                    policies
                ):
                    urls = [first, second] if len(consumers) % 2 else [second, first]
                    words = [sys.executable, "-I", str(CONSUMER), str(log), policy, *urls]
                    consumers.append((policy, started(words)))
            await asyncio.sleep(0.1)
            if len(consumers) < 16:
                chance.choice(consumers)[1].send_signal(signal.SIGKILL)
            if so_far > count // 3:
                dying.kill()


def events(log: Path, kind: str) -> list[list[Any]]:
    """Return the entries of a kind in the consumers' log, which has one per line."""
    lines = [orjson.loads(line) for line in log.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    return [line[1:] for line in lines if line[0] == kind]


def check_leases(holds: Sequence[Sequence[Any]]) -> None:
    """Check that no group was claimed while another consumer held it. `holds`: start, batch, group and end of each claim."""
    ends: dict[str, int] = {}
    for start, batch, group, until in sorted(holds):
        assert ends.get(group, 0) <= start, f"{group} was claimed in {batch} while another consumer held it"
        ends[group] = until
