"""Clients with little overhead: fixed request bytes, one call at a time per connection, responses not parsed."""

import asyncio
import time
from statistics import median

import orjson

CALLS_PER_ROLLOUT = 10


def request_for(mode: str, rollout: str = "bench") -> bytes:
    """Return the bytes of a chat call. `mode` selects the response (see `upstream`), as in `stream-8000` for 8,000 words."""
    kind, _, words = mode.partition("-")
    body: dict = {"model": f"mode-{mode}", "messages": [{"role": "user", "content": "word " * int(words or 200)}]}
    if kind in ("stream", "paced", "hang"):
        body["stream"] = True
    text = orjson.dumps(body)
    head = f"POST /rollouts/{rollout}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(text) + text


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


async def connect(port: int) -> Client:
    """Return a connected client."""
    _, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", port)
    return client


async def throughput(
    port: int, mode: str, *, clients: int, calls: int, refused: list[Exception] | None = None
) -> float:
    """Return the calls per second of all clients together; each has its own rollouts of ten calls.

    A failed call ends the measurement, unless `refused` collects it; then only successful calls count.
    """
    connections = [await connect(port) for _ in range(clients)]

    async def repeat(number: int, client: Client) -> None:
        for call in range(calls // clients):
            if call % CALLS_PER_ROLLOUT == 0:
                request = request_for(mode, f"{mode}-{number}-{time.time_ns()}")
            try:
                await client.call(request)
            except (RuntimeError, OSError) as failure:
                if refused is None:
                    raise
                refused.append(failure)

    before = len(refused or ())
    started = time.perf_counter()
    await asyncio.gather(*(repeat(number, client) for number, client in enumerate(connections)))
    elapsed = time.perf_counter() - started
    for client in connections:
        client.transport.close()
    return (calls // clients * clients - len(refused or ()) + before) / elapsed


async def latency(port: int, mode: str, *, calls: int) -> tuple[float, float]:
    """Return the median seconds to the whole response and to its first byte, with one client."""
    client = await connect(port)
    request = request_for(mode, f"latency-{time.time_ns()}")
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
        *(client.call(request_for(mode, f"many-{n % 500}")) for n, client in enumerate(connections)),
        return_exceptions=True,
    )
    elapsed = time.perf_counter() - started
    for client in connections:
        client.transport.close()
    return elapsed, sum(isinstance(result, float) for result in results)
