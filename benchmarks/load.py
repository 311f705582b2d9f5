"""Clients with little overhead: fixed request bytes, one call at a time per connection, responses not parsed; and exports of
rollouts that are written to a store directly.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import aiohttp
import orjson

from benchmarks import turns
from benchmarks.servers import Server
from proxy.trajectory.blocks import KnownBlocks
from proxy.trajectory.codec import encode
from proxy.trajectory.step import Step
from storage import open_store
from storage.redis.store import Store
from storage.types import StepWrite

T = TypeVar("T", bound="Client")

_REPEATED = 10  # calls of a rollout that repeat its prompt


@dataclass(frozen=True)
class Calls:
    """The calls of one rollout, by their bodies. They are sent one after the other, or together over as many connections."""

    bodies: Sequence[bytes]
    path: str = "/v1/chat/completions"
    header: str = ""  # one more header, with its line end
    are_together: bool = False

    def request(self, number: int, rollout: str) -> bytes:
        """Return the bytes of a call."""
        body = self.bodies[number]
        head = f"POST /rollouts/{rollout}{self.path} HTTP/1.1\r\nHost: localhost\r\n{self.header}"
        kind = b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        return b"".join([head.encode(), kind, body])


@cache
def chat(mode: str, count: int = _REPEATED, *, are_together: bool = False) -> Calls:
    """Return chat calls with one prompt. `mode` selects the response (see `upstream`): `stream-8000` has 8,000 words."""
    kind, _, words = mode.partition("-")
    body: dict = {"model": f"mode-{mode}", "messages": [{"role": "user", "content": "word " * int(words or 200)}]}
    if kind in ("stream", "paced", "hang"):
        body["stream"] = True
    return Calls([orjson.dumps(body)] * count, are_together=are_together)


@cache
def translated(path: str) -> Calls:
    """Return streamed calls in another dialect, to which the engine responds with a chat stream."""
    text = "word " * 200
    body: dict = {"model": "mode-stream", "stream": True}
    if path == "/v1/messages":
        body |= {"max_tokens": 200, "messages": [{"role": "user", "content": text}]}
    else:
        body |= {"input": text}
    return Calls([orjson.dumps(body)] * _REPEATED, path)


@cache
def conversation(first: int, grows: int, count: int, mode: str) -> Calls:
    """Return the turns of a conversation in a continuation mode: prompts of `first` tokens that grow by `grows`."""
    sent = turns.messages(first, grows, count)
    model = f"mode-exact-{first}-{grows}"
    bodies = [orjson.dumps({"model": model, "messages": sent[: 2 * turn + 1]}) for turn in range(count)]
    return Calls(bodies, header=f"X-Rollout-Continuation: {mode}\r\n")


class Client(asyncio.Protocol):
    """One connection; `call` sends a request and waits for the end of the response."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def call(self, request: bytes) -> "asyncio.Future[float]":
        """Return a future of the time from sending to the first byte, in s; it completes with the response."""
        self.tail, self.left, self.first = b"", None, 0.0
        self.done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self.sent = time.perf_counter()
        self.transport.write(request)
        return self.done

    def data_received(self, data: bytes) -> None:
        if not self.tail and self.left is None:
            self.first = time.perf_counter() - self.sent
        if self.left is None and not self.tail.startswith(b"chunked"):
            self._read_head(self.tail + data)
        elif self.left is not None:
            self.left -= len(data)
        else:
            self.tail = b"chunked" + (self.tail[7:] + data)[-5:]
        if (self.left == 0 or self.tail.endswith(b"0\r\n\r\n")) and not self.done.done():
            self.done.set_result(self.first)

    def _read_head(self, read: bytes) -> None:
        head, found, rest = read.partition(b"\r\n\r\n")
        if not found:
            self.tail = read
            return
        if not head.startswith(b"HTTP/1.1 200"):
            self.done.set_exception(RuntimeError(read[:300].decode()))
            return
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                self.left = int(line[15:]) - len(rest)
                self.tail = b""
                return
        self.tail = b"chunked" + rest[-5:]

    def connection_lost(self, error: Exception | None) -> None:
        if hasattr(self, "done") and not self.done.done():
            self.done.set_exception(error or ConnectionResetError("the proxy closed the connection"))


async def connect(port: int, kind: type[T] = Client) -> T:
    """Return a connected client."""
    _, client = await asyncio.get_running_loop().create_connection(kind, "127.0.0.1", port)
    return client


async def throughput(
    port: int, calls: Calls, *, clients: int, rollouts: int, refused: list[Exception] | None = None
) -> float:
    """Return the calls per second of all clients together; each has `rollouts` rollouts of its own, one after the other.

    A failed call ends the measurement, unless `refused` collects it; then only successful calls count.
    """
    width = len(calls.bodies) if calls.are_together else 1
    connections = [await connect(port) for _ in range(clients * width)]

    async def send(client: Client, number: int, rollout: str) -> None:
        try:
            await client.call(calls.request(number, rollout))
        except (RuntimeError, OSError) as failure:
            if refused is None:
                raise
            refused.append(failure)

    async def repeat(first: int) -> None:
        for _ in range(rollouts):
            name = f"load-{first}-{time.time_ns()}"
            if calls.are_together:
                await asyncio.gather(*(send(connections[first + n], n, name) for n in range(width)))
            else:
                for number in range(len(calls.bodies)):
                    await send(connections[first], number, name)

    before = len(refused or ())
    started = time.perf_counter()
    await asyncio.gather(*(repeat(first) for first in range(0, len(connections), width)))
    elapsed = time.perf_counter() - started
    for client in connections:
        client.transport.close()
    return (clients * rollouts * len(calls.bodies) - len(refused or ()) + before) / elapsed


async def latency(port: int, mode: str, *, calls: int) -> tuple[float, float]:
    """Return the median seconds to the whole response and to its first byte, with one client."""
    client = await connect(port)
    request = chat(mode).request(0, f"latency-{time.time_ns()}")
    whole, first = [], []
    for _ in range(calls):
        started = time.perf_counter()
        first.append(await client.call(request))
        whole.append(time.perf_counter() - started)
    client.transport.close()
    return median(whole), median(first)


async def at_once(port: int, mode: str, calls: int) -> tuple[float, int]:
    """Send all calls concurrently; return the seconds until all are complete, and the number that succeeded."""
    connections = [await connect(port) for _ in range(calls)]
    started = time.perf_counter()
    results = await asyncio.gather(
        *(client.call(chat(mode).request(0, f"many-{n % 500}")) for n, client in enumerate(connections)),
        return_exceptions=True,
    )
    elapsed = time.perf_counter() - started
    for client in connections:
        client.transport.close()
    return elapsed, sum(isinstance(result, float) for result in results)


CONCURRENCY = 32


def _numbered(number: int) -> str:
    return f"r{number}"


async def fill(
    socket: Path, rollouts: int, steps: Iterable[Step], *, first: int = 0, names: Callable[[int], str] = _numbered
) -> None:
    """Store `rollouts` rollouts with these steps, named `names(first)`, `names(first + 1)`, ...; one may be of an iterator."""
    store = await open_store(f"unix:{socket}")
    numbers = iter(range(first, first + rollouts))

    async def store_next() -> None:
        for number in numbers:
            await _store(store, names(number), steps)

    await asyncio.gather(*(store_next() for _ in range(CONCURRENCY)))
    await store.close()


async def _store(store: Store, name: str, steps: Iterable[Step]) -> None:
    incarnation = (await store.open(name, {}, now_ms=1)).incarnation
    known = KnownBlocks()
    for step in steps:
        record = encode(replace(step, rollout_id=name), known)
        known.update((*record.blocks, *record.names))
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


async def play(server: Server, source: str, name: str, bodies: Sequence[Mapping[str, Any]]) -> list[float]:
    """Open a playback and send these calls, which its tape answers; return the seconds of each. The opening is not included."""
    async with aiohttp.ClientSession() as http:
        opening = {"rollout_id": name, "playback": {"of": source}}
        async with http.post(f"{server.url}/rollouts", json=opening) as answer:
            assert answer.status == 201, await answer.text()
        taken = []
        for body in bodies:
            started_at = time.perf_counter()
            async with http.post(f"{server.url}/rollouts/{name}/v1/chat/completions", json=body) as answer:
                assert answer.headers.get("X-Playback") == "answered", await answer.text()
                await answer.read()
            taken.append(time.perf_counter() - started_at)
        return taken
