"""Peak memory of the server process while it exports many rollouts, which are written to its store directly."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import aiohttp

from benchmarks.servers import Server
from proxy.trajectory.codec import encode
from proxy.trajectory.step import Step
from storage import open_store
from storage.store import Store
from storage.types import StepWrite

CONCURRENCY = 32


def _numbered(number: int) -> str:
    return f"r{number}"


async def fill(
    socket: Path, rollouts: int, steps: Sequence[Step], *, first: int = 0, names: Callable[[int], str] = _numbered
) -> None:
    """Store `rollouts` rollouts with these steps, named `names(first)`, `names(first + 1)`, ..."""
    store = await open_store(f"unix:{socket}")
    numbers = iter(range(first, first + rollouts))

    async def store_next() -> None:
        for number in numbers:
            await _store(store, names(number), steps)

    await asyncio.gather(*(store_next() for _ in range(CONCURRENCY)))
    await store.close()


async def _store(store: Store, name: str, steps: Sequence[Step]) -> None:
    incarnation = (await store.open(name, {}, now_ms=1)).incarnation
    known: set[bytes] = set()
    for step in steps:
        record = encode(replace(step, rollout_id=name), known)
        known |= {*record.blocks, *record.names}
        entry = StepWrite(name, incarnation, step.step_id, record.record, record.blocks, record.leans_on, {"steps": 1})
        await store.append(entry, now_ms=1)


async def export(server: Server, container: str) -> tuple[int, int]:
    """Read a whole export; return its length and the peak resident memory of the server meanwhile, both in bytes."""
    server.forget_peak()
    length = 0
    url = f"{server.url}/export?format=sequences&container={container}"
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)) as http, http.get(url) as answer:
        assert answer.status == 200, await answer.text()
        async for piece in answer.content.iter_any():
            length += len(piece)
    return length, server.peak_bytes()
