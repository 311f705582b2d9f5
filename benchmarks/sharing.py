"""Measures how connections are shared between workers: `python -m benchmarks.sharing`.

The supervisor's hand-over is compared with SO_REUSEPORT, by which the kernel chooses a listening socket by a hash: the share of
the busiest worker, relative to an equal share, over many rounds of short connections one after the other, and of long ones.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.servers import free_port
from proxy.server.handover import Acceptor

ROUNDS = 40
SHORT, LONG = 1000, 64


def listening(port: int, *, shared: bool) -> socket.socket:
    """Return a listening socket."""
    opened = socket.socket()
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT if shared else socket.SO_REUSEADDR, 1)
    opened.settimeout(0)
    opened.bind(("127.0.0.1", port))
    opened.listen(4096)
    return opened


class Workers:
    """Workers that only count their connections: `has` of each, and all that it ever got in `counts`."""

    def __init__(self, count: int) -> None:
        self.counts = [0] * count
        self.has: list[set[socket.socket]] = [set() for _ in range(count)]
        self.on_close: Callable[[int], None] = lambda _number: None

    def add(self, number: int, connection: socket.socket) -> None:
        """Serve a connection until its client closes it."""
        self.counts[number] += 1
        self.has[number].add(connection)
        connection.settimeout(0)
        loop = asyncio.get_running_loop()

        def read() -> None:
            if not connection.recv(100):
                loop.remove_reader(connection)
                connection.close()
                self.has[number].discard(connection)
                self.on_close(number)

        loop.add_reader(connection, read)


@asynccontextmanager
async def reuseport(workers: Workers) -> AsyncIterator[int]:
    """Let each worker listen at one port."""
    loop, port = asyncio.get_running_loop(), free_port()
    with ExitStack() as stack:
        for number in range(len(workers.counts)):
            own = stack.enter_context(listening(port, shared=True))
            loop.add_reader(own, lambda own=own, number=number: workers.add(number, own.accept()[0]))
            stack.callback(loop.remove_reader, own)
        yield port


@asynccontextmanager
async def handed_over(workers: Workers) -> AsyncIterator[int]:
    """Accept connections as the supervisor does, and hand them over."""
    loop, port = asyncio.get_running_loop(), free_port()
    acceptor = Acceptor([listening(port, shared=False)])
    channels = [acceptor.add_worker() for _ in workers.counts]

    def receive(number: int) -> None:
        _, descriptors, _, _ = socket.recv_fds(channels[number], 1, 1)
        if descriptors:
            workers.add(number, socket.socket(fileno=descriptors[0]))

    for number, channel in enumerate(channels):
        channel.send(b"+")
        loop.add_reader(channel, receive, number)
    workers.on_close = lambda number: channels[number].send(b"c")
    try:
        yield port
    finally:
        for channel in channels:
            loop.remove_reader(channel)
            channel.close()
        acceptor.close()


async def short(workers: Workers, port: int) -> float:
    """Open short connections one after the other; return the busiest worker's share of them, relative to an equal one."""
    before = list(workers.counts)
    for _ in range(SHORT):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        await writer.wait_closed()
    await settled(lambda: sum(workers.counts) - sum(before) == SHORT and not any(workers.has))
    return _busiest([now - then for now, then in zip(workers.counts, before, strict=True)])


async def long(workers: Workers, port: int) -> float:
    """Open long connections together; return the busiest worker's share of them, relative to an equal one."""
    writers = [
        writer for _, writer in await asyncio.gather(*(asyncio.open_connection("127.0.0.1", port) for _ in range(LONG)))
    ]
    await settled(lambda: sum(map(len, workers.has)) == LONG)
    found = _busiest(list(map(len, workers.has)))
    for writer in writers:
        writer.close()
    await settled(lambda: not any(workers.has))
    return found


async def settled(condition: Callable[[], bool]) -> None:
    """Wait until the workers have received or closed all connections."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def _busiest(counts: list[int]) -> float:
    return max(counts) * len(counts) / sum(counts)


async def measured(kind: Callable, count: int) -> tuple[list[float], list[float]]:
    """Return the shares of short and of long connections."""
    workers = Workers(count)
    async with kind(workers) as port:
        return [await short(workers, port) for _ in range(ROUNDS // 8)], [
            await long(workers, port) for _ in range(ROUNDS)
        ]


def main() -> None:
    """Print the table."""
    table = Table(
        "workers", "by", f"{SHORT:,} short connections: median (worst)", f"{LONG} long connections: median (worst)"
    )
    for count in (2, 4):
        for name, kind in (("SO_REUSEPORT", reuseport), ("hand-over", handed_over)):
            shares = asyncio.run(measured(kind, count))
            table.add_row(str(count), name, *(f"{median(share):.2f} ({max(share):.2f})" for share in shares))
    Console(width=140).print("connections of the busiest worker / an equal share", table)


if __name__ == "__main__":
    main()
