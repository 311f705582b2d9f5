"""The balancer of compose.yaml: a real HAProxy with its configuration, and a name server for the replicas' addresses."""

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from secrets import randbelow

import aiohttp

from .conftest import DEPLOY
from .environment import program

CONFIGURATION = DEPLOY / "haproxy" / "haproxy.cfg"


def own_addresses(count: int) -> list[str]:
    """Return loopback addresses on which the configured ports are free."""
    net = f"127.{1 + randbelow(254)}.{randbelow(256)}"
    return [f"{net}.{1 + number}" for number in range(count)]


class Names(asyncio.DatagramProtocol):
    """A name server that answers every query with `addresses`, as Docker's does for a service."""

    def __init__(self) -> None:
        self.addresses: list[str] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, query: bytes, sender: tuple[str, int]) -> None:
        self._transport.sendto(self.answer(query), sender)

    async def serve_by_tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the queries of a connection; each message begins with its length."""
        try:
            while True:
                length = int.from_bytes(await reader.readexactly(2))
                answer = self.answer(await reader.readexactly(length))
                writer.write(len(answer).to_bytes(2) + answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def answer(self, query: bytes) -> bytes:
        """Return the response to a query."""
        end = query.index(b"\0", 12) + 5  # the name, its terminator, type and class
        is_for_an_address = query[end - 4 : end - 2] == b"\0\1"
        found = self.addresses if is_for_an_address else []
        head = query[:2] + b"\x85\x80" + struct.pack(">HHHH", 1, len(found), 0, 0)
        responses = [b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 1, 4) + socket.inet_aton(address) for address in found]
        return head + query[12:end] + b"".join(responses)


@asynccontextmanager
async def naming() -> AsyncIterator[tuple[Names, str]]:
    """Start the name server; yield it and its address."""
    transport, names = await asyncio.get_running_loop().create_datagram_endpoint(Names, ("127.0.0.1", 0))
    try:
        yield names, "{}:{}".format(*transport.get_extra_info("sockname"))
    finally:
        transport.close()


@asynccontextmanager
async def balancing(address: str, port: int, names: str, http: aiohttp.ClientSession) -> AsyncIterator[str]:
    """Start HAProxy for the replicas' listeners on this port; yield its URL once it forwards requests."""
    variables = {**os.environ, "API_PORT": str(port), "API_ADDRESS": address, "DNS": names}
    command = [program("haproxy"), "-db", "-f", str(CONFIGURATION)]
    balancer = await asyncio.create_subprocess_exec(*command, env=variables)
    url = f"http://{address}:{port}"
    try:
        async with asyncio.timeout(60):
            while not await _passes_on(http, url):
                assert balancer.returncode is None, "HAProxy exited; see stderr"
                await asyncio.sleep(0.05)
        yield url
    finally:
        if balancer.returncode is None:
            balancer.kill()
            await balancer.wait()


async def _passes_on(http: aiohttp.ClientSession, url: str) -> bool:
    """Return whether a replica answers: it has nothing at this path, and the balancer itself answers 503."""
    try:
        async with http.get(url) as response:
            return response.status == 404
    except aiohttp.ClientConnectionError:
        return False
