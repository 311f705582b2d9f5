"""Real servers: a cluster of three primaries with a replica each, and a primary with a replica and three Sentinels."""

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from signal import SIGKILL

import redis.asyncio
from redis.exceptions import RedisError
from tests.system.faults.system import Part

from storage.embedded.server import LAUNCH

NODE_TIMEOUT_MS = 2000
_WAIT_S = 60


_taken: set[int] = set()


def free_port() -> int:
    """Return a free port that was not returned before, with a valid port of the cluster bus, 10,000 higher."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port < 55_000 and port not in _taken:
            _taken.add(port)
            return port


class Node(Part):
    """A server on a port of its own. It ends with pytest, even if that is killed."""

    def __init__(self, binary: str, folder: Path, *settings: str) -> None:
        self.port = free_port()
        self.home = folder / f"node-{self.port}"
        self.home.mkdir()
        own = [
            "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.home), "--appendonly", "yes", "--save", "",
            "--maxmemory-policy", "noeviction", "--repl-diskless-sync-delay", "0", *settings,
        ]  # fmt: skip
        guard = [sys.executable, "-I", "-S", str(LAUNCH)]
        super().__init__(f"node-{self.port}", [*guard, str(os.getpid()), binary, *own], folder)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def ask(self, *words: str | int) -> object:
        """Return the reply to a command, decoded."""
        client = redis.asyncio.Redis(port=self.port, socket_timeout=5, decode_responses=True)
        async with client:
            return await client.execute_command(*words)

    async def answers(self) -> None:
        """Wait until the server answers."""
        async with asyncio.timeout(_WAIT_S):
            while True:
                with suppress(RedisError, OSError):
                    await self.ask("PING")
                    return
                await asyncio.sleep(0.02)

    async def role(self) -> str:
        """Return `master`, `slave`, or nothing if the server does not answer."""
        with suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(1):
                reply = await self.ask("ROLE")
                return str(reply[0])  # type: ignore[index]
        return ""


@asynccontextmanager
async def nodes(binary: str, folder: Path, count: int, *settings: str) -> AsyncIterator[list[Node]]:
    """Run servers; they are killed at the end."""
    running = [Node(binary, folder, *settings) for _ in range(count)]
    try:
        await asyncio.gather(*(node.start() for node in running))
        await asyncio.gather(*(node.answers() for node in running))
        yield running
    finally:
        for node in running:
            if node.process is not None and node.process.returncode is None:
                await node.end(SIGKILL)


class RedisCluster:
    """Six servers, created by `redis-cli --cluster create` as an operator does."""

    def __init__(self, servers: Sequence[Node]) -> None:
        self.servers = list(servers)

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(server.address for server in self.servers[:3])

    async def create(self) -> None:
        addresses = [server.address for server in self.servers]
        await self.cli("create", *addresses, "--cluster-replicas", "1", "--cluster-yes")
        await self.settled()

    async def cli(self, *words: str) -> str:
        """Run `redis-cli --cluster`; return its output."""
        process = await asyncio.create_subprocess_exec(
            "redis-cli", "--cluster", *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()
        return output.decode()

    async def settled(self) -> None:
        """Wait until all servers serve all slots, and each replica is connected to its primary."""
        async with asyncio.timeout(_WAIT_S):
            while not all(await asyncio.gather(*map(self._is_settled, self.servers))):
                await asyncio.sleep(0.1)

    async def _is_settled(self, server: Node) -> bool:
        with suppress(RedisError, OSError):
            info, role = str(await server.ask("CLUSTER", "INFO")), await server.ask("ROLE")
            is_linked = role[0] == "master" or role[3] == "connected"  # type: ignore[index]
            return all(part in info for part in ("state:ok", "slots_ok:16384", "known_nodes:6")) and is_linked
        return False

    async def primary_of(self, slot: int) -> Node:
        """Return the server that serves a slot, as the first server that answers says."""
        for server in self.servers:
            if not await server.role():
                continue
            slots = await server.ask("CLUSTER", "SLOTS")
            for first, last, primary, *_ in slots:  # type: ignore[attr-defined]
                if first <= slot <= last:
                    return self.by_port(primary[1])
        raise AssertionError(f"no server serves slot {slot}")

    async def primaries(self) -> list[Node]:
        """Return the servers that are primaries."""
        return [server for server in self.servers if await server.role() == "master"]

    async def replica_of(self, primary: Node) -> Node:
        """Return the replica of a primary."""
        for server in self.servers:
            if server is not primary and await server.role() == "slave":
                role = await server.ask("ROLE")
                if role[2] == primary.port:  # type: ignore[index]
                    return server
        raise AssertionError(f"{primary.address} has no replica")

    def by_port(self, port: int) -> Node:
        return next(server for server in self.servers if server.port == port)


async def promoted(node: Node) -> float:
    """Wait until a replica has become the primary; return the time of the loop."""
    return await _has_role(node, "master")


async def demoted(node: Node) -> float:
    """Wait until a primary has become a replica; return the time of the loop."""
    return await _has_role(node, "slave")


async def _has_role(node: Node, role: str) -> float:
    async with asyncio.timeout(_WAIT_S):
        while await node.role() != role:
            await asyncio.sleep(0.02)
    return asyncio.get_running_loop().time()


@asynccontextmanager
async def clustered(binary: str, folder: Path, *settings: str) -> AsyncIterator[RedisCluster]:
    """Run a cluster of three primaries with a replica each."""
    own = ("--cluster-enabled", "yes", "--cluster-node-timeout", str(NODE_TIMEOUT_MS), "--cluster-require-full-coverage", "no",
           "--cluster-replica-validity-factor", "0", "--cluster-migration-barrier", "99")  # fmt: skip
    async with nodes(binary, folder, 6, *own, *settings) as servers:
        cluster = RedisCluster(servers)
        await cluster.create()
        yield cluster


class Sentinels:
    """A primary, its replica, and three Sentinels that watch them as the service `tt`."""

    def __init__(self, servers: Sequence[Node], sentinels: Sequence[Node]) -> None:
        self.servers, self.sentinels = list(servers), list(sentinels)

    @property
    def url(self) -> str:
        return "redis+sentinel://" + ",".join(sentinel.address for sentinel in self.sentinels) + "/tt"

    async def primary(self) -> Node:
        """Return the primary, as the first Sentinel says."""
        _, port = await self.sentinels[0].ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "tt")  # type: ignore[misc]
        return next(server for server in self.servers if server.port == int(port))

    async def settled(self) -> None:
        """Wait until each Sentinel knows the replica and the other Sentinels."""
        async with asyncio.timeout(_WAIT_S):
            for sentinel in self.sentinels:
                while not await self._is_settled(sentinel):
                    await asyncio.sleep(0.1)

    async def _is_settled(self, sentinel: Node) -> bool:
        seen = (await sentinel.ask("INFO", "sentinel"))["master0"]  # type: ignore[index]
        return (seen["slaves"], seen["sentinels"]) == (1, 3)


@asynccontextmanager
async def guarded(binary: str, folder: Path, *settings: str) -> AsyncIterator[Sentinels]:
    """Run a primary with a replica and three Sentinels."""
    async with nodes(binary, folder, 2, *settings) as (primary, replica):
        await replica.ask("REPLICAOF", "127.0.0.1", primary.port)
        sentinels = [Sentinel(binary, folder, primary.port) for _ in range(3)]
        try:
            await asyncio.gather(*(sentinel.start() for sentinel in sentinels))
            await asyncio.gather(*(sentinel.answers() for sentinel in sentinels))
            watched = Sentinels([primary, replica], sentinels)
            await watched.settled()
            yield watched
        finally:
            for sentinel in sentinels:
                if sentinel.process is not None and sentinel.process.returncode is None:
                    await sentinel.end(SIGKILL)


class Sentinel(Node):
    """A Sentinel that watches the service `tt`."""

    def __init__(self, binary: str, folder: Path, primary_port: int) -> None:
        super().__init__(binary, folder)
        configuration = self.home / "sentinel.conf"
        configuration.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {self.home}\nsentinel monitor tt 127.0.0.1 {primary_port} 2\n"
            f"sentinel down-after-milliseconds tt {NODE_TIMEOUT_MS}\nsentinel failover-timeout tt 10000\n"
        )
        self.words = [*self.words[:5], binary, str(configuration), "--sentinel"]
