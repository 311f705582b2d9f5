"""A stable address for a store that changes its primary, in place of a service name or a balancer."""

import asyncio
from contextlib import suppress


class StableAddress:
    """A port that forwards its connections to another port. When the target changes, connections to the old one are
    closed.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._server: asyncio.Server | None = None
        self._pipes: set[asyncio.Task] = set()

    async def listen(self) -> int:
        """Listen, and return the port."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()[1]

    def lead_to(self, port: int) -> None:
        self._port = port
        for pipe in self._pipes:
            pipe.cancel()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.lead_to(0)
        await asyncio.gather(*self._pipes, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pipe = asyncio.current_task()
        self._pipes.add(pipe)
        writers = [writer]
        try:
            with suppress(OSError, asyncio.CancelledError):
                behind, onward = await asyncio.open_connection("127.0.0.1", self._port)
                writers.append(onward)
                async with asyncio.TaskGroup() as both:
                    both.create_task(_carry(reader, onward))
                    both.create_task(_carry(behind, writer))
        finally:
            for end in writers:
                end.close()
            self._pipes.discard(pipe)


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while read := await reader.read(2**16):
            writer.write(read)
            await writer.drain()
    writer.close()  # and the other direction ends as well
