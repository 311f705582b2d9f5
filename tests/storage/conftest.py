"""Servers for the tests of storage: real ones, on Unix sockets and free local ports."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import redis

from storage import StoreOptions, open_store
from storage.embedded.server import LAUNCH, bundled_server

REDIS = shutil.which("redis-server")
NO_REDIS = "redis-server is not installed (Debian: apt-get install redis-server), so Redis is not tested"
START_TIMEOUT_S = 50


@contextmanager
def running(binary, *settings, kind=None, password=None, tls=False):
    """Run a server on a free port in its own directory; it stops with the test, or with pytest."""
    with tempfile.TemporaryDirectory(prefix="tt-", ignore_cleanup_errors=True) as directory:
        port = free_port()
        server = (kind or Server)(binary, port, Path(directory), settings, password=password, tls=tls)
        server.start()
        try:
            yield server
        finally:
            server.stop()


class Server:
    def __init__(self, binary, port, directory, settings, *, password=None, tls=False):
        self.binary = str(binary)
        self.port = port
        self.directory = directory
        self.settings = settings
        self.password = password
        self.tls = tls
        self.process = None

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    @property
    def url(self):
        return f"redis{'s' * self.tls}://{self.address}"

    @property
    def client(self):
        tls = {"ssl": True, "ssl_cert_reqs": "none", "ssl_check_hostname": False} if self.tls else {}
        return redis.Redis(port=self.port, password=self.password, socket_timeout=50, **tls)

    @property
    def words(self):
        listen = ["--port", "0", "--tls-port", str(self.port)] if self.tls else ["--port", str(self.port)]
        return [*listen, "--bind", "127.0.0.1", "--dir", str(self.directory), "--save", "", *self.settings]

    def start(self):
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(LAUNCH), str(os.getpid()), self.binary, *self.words],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                with self.client as client:
                    client.ping()
                return
            except redis.ConnectionError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError((self.directory / "log").read_text()) from None
                time.sleep(0.01)

    def stop(self):
        self.process.kill()
        self.process.wait()

    def send(self, *words):
        """Send a command and return its reply."""
        with self.client as client:
            return client.execute_command(*words)


class SentinelServer(Server):
    @property
    def words(self):
        conf = self.directory / "sentinel.conf"  # where it keeps its state
        if not conf.exists():
            lines = [f"port {self.port}", "bind 127.0.0.1", f"dir {self.directory}", *self.settings]
            conf.write_text("\n".join(lines) + "\n")
        return [str(conf), "--sentinel"]


def free_port():
    """Return a free port with a valid cluster bus port (10,000 higher)."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        if port < 55_000:
            return port


@pytest.fixture(scope="session")
def valkey():
    """Return the path of the bundled valkey-server."""
    return bundled_server()


@pytest.fixture
def start(valkey):
    """Return a function that starts a server (Valkey by default), which stops with the test."""
    with ExitStack() as stack:
        yield lambda *settings, binary=valkey, **more: stack.enter_context(running(binary, *settings, **more))


@pytest.fixture
def start_redis(start):
    """Return a function that starts a redis-server of the system, which stops with the test."""
    if REDIS is None:
        pytest.skip(NO_REDIS)
    return lambda *settings, **more: start(*settings, binary=REDIS, **more)


@pytest.fixture(scope="session")
def redis_server():
    """Run one redis-server for the whole session."""
    if REDIS is None:
        pytest.skip(NO_REDIS)
    with running(REDIS) as server:
        yield server


@pytest.fixture(scope="session")
def cluster_servers(valkey):
    """Run a cluster of three primaries with a third of the slots each for the whole session."""
    settings = ("--cluster-enabled", "yes", "--cluster-require-full-coverage", "no", "--cluster-node-timeout", "2000")
    with ExitStack() as stack:
        servers = [stack.enter_context(running(valkey, *settings)) for _ in range(3)]
        clients = [stack.enter_context(server.client) for server in servers]
        for number, client in enumerate(clients):
            first, last = 16_384 * number // 3, 16_384 * (number + 1) // 3 - 1
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", servers[0].port)
        wait_for_cluster(clients)
        yield servers


@pytest.fixture(scope="module")
def replicated_cluster(valkey):
    """Run a cluster of three primaries, each with a replica, in which a failover takes about two seconds."""
    settings = (
        "--cluster-enabled", "yes", "--cluster-require-full-coverage", "no", "--cluster-node-timeout", "1000",
        "--repl-diskless-sync-delay", "0", "--appendonly", "no",
    )  # fmt: skip
    with ExitStack() as stack:
        servers = [stack.enter_context(running(valkey, *settings)) for _ in range(6)]
        clients = [stack.enter_context(server.client) for server in servers]
        for number, client in enumerate(clients):
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", servers[0].port)
        for number, client in enumerate(clients[:3]):
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 16_384 * number // 3, 16_384 * (number + 1) // 3 - 1)
        wait_for_cluster(clients, 6)
        for primary, replica in zip(clients[:3], clients[3:], strict=True):
            replica.execute_command("CLUSTER", "REPLICATE", primary.execute_command("CLUSTER", "MYID"))
        wait_for_replicas(clients)
        yield servers


def wait_for_replicas(clients):
    """Wait until each replica has the data of its primary."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while sum(client.info("replication").get("master_link_status") == "up" for client in clients) < 3:
        assert time.monotonic() < deadline, [client.info("replication") for client in clients]
        time.sleep(0.05)


@pytest.fixture(scope="session")
def sentinel_kind():
    return SentinelServer


@pytest.fixture
def sentinels(valkey, start):
    """Run a primary, a replica, and three sentinels, which find a primary dead after half a second."""
    with ExitStack() as stack:
        primary = start("--repl-diskless-sync-delay", "0")
        replica = start("--repl-diskless-sync-delay", "0", "--replicaof", "127.0.0.1", str(primary.port))
        settings = (
            f"sentinel monitor main 127.0.0.1 {primary.port} 2", "sentinel down-after-milliseconds main 500",
            "sentinel failover-timeout main 5000",
        )  # fmt: skip
        trio = [stack.enter_context(running(valkey, *settings, kind=SentinelServer)) for _ in range(3)]
        deadline = time.monotonic() + START_TIMEOUT_S
        while any(not has_quorum(sentinel) for sentinel in trio):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield primary, replica, trio


def has_quorum(sentinel):
    """Return whether a sentinel knows the replica and the other sentinels, so that it can start a failover."""
    reply = sentinel.send("SENTINEL", "MASTER", "main")
    fields = reply if isinstance(reply, dict) else dict(zip(reply[::2], reply[1::2], strict=True))
    found = {name.decode() if isinstance(name, bytes) else name: value for name, value in fields.items()}
    return (int(found["num-slaves"]), int(found["num-other-sentinels"])) == (1, 2)


def wait_for_cluster(clients, count=3):
    """Wait until each server finds all slots served and is connected to all others (for PUBLISH)."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while any(not cluster_is_whole(client, count) for client in clients):
        assert time.monotonic() < deadline, [client.execute_command("CLUSTER", "INFO") for client in clients]
        time.sleep(0.05)


def cluster_is_whole(client, count):
    info = client.execute_command("CLUSTER", "INFO")
    text = info.decode() if isinstance(info, bytes) else str(info)
    links = [node["connected"] for node in client.cluster("nodes").values()]
    is_served = all(field in text.replace("': '", ":") for field in ("cluster_state:ok", "cluster_slots_ok:16384"))
    return is_served and all(links) and len(links) == count


@pytest.fixture
def url_of(request, tmp_path):
    """Return a function that returns the URL of an empty store: embedded, redis or cluster."""

    def url(kind):
        if kind == "embedded":
            return f"embedded:{tmp_path / 'store'}"
        servers = request.getfixturevalue("cluster_servers" if kind == "cluster" else "redis_server")
        for server in servers if kind == "cluster" else [servers]:
            with server.client as client:
                client.flushall()
        return f"redis+cluster://{servers[0].address}" if kind == "cluster" else servers.url

    return url


@pytest.fixture
async def opened():
    """Return a function that opens stores and closes them after the test."""
    stores = []

    async def opened(url, **options):
        store = await open_store(url, StoreOptions(**options))
        stores.append(store)
        return store

    yield opened
    for store in stores:
        await store.close()


@pytest.fixture
async def on_redis(url_of, opened):
    """Return a store on the redis-server."""
    return await opened(url_of("redis"))


@pytest.fixture(scope="session")
def command():
    """Return a function that sends a command to every server of a store and returns the replies."""

    async def command(store, *parts):
        return [(await server.execute(b"", [parts]))[0] for server in await store._servers.all()]

    return command


@pytest.fixture(scope="session")
def key_count(command):
    """Return a function that counts all keys of the servers of a store, without the one that every store has."""

    async def key_count(store):
        return sum(await command(store, "DBSIZE")) - 1

    return key_count


@pytest.fixture(scope="session")
def until():
    """Return a function that waits until a condition is true."""

    async def until(condition, timeout_s=50):
        async with asyncio.timeout(timeout_s):
            while True:
                if await condition():
                    return
                await asyncio.sleep(0.02)

    return until
