"""The hand-over of connections from the supervisor to workers."""

import asyncio
import socket
import ssl
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from proxy.server import handover
from proxy.server.connections import Runner
from proxy.server.handover import Acceptor, HandedOver


@pytest.fixture
async def acceptor():
    """An acceptor on a free port, and the URL."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    listening.settimeout(0)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    acceptor = Acceptor([listening])
    yield acceptor, url
    acceptor.close()


@asynccontextmanager
async def working(acceptor, name, tls=None):
    """Run a worker in this process that responds with its name; it ends as if it were killed, if it has not stopped."""
    app = web.Application()

    async def respond(request: web.Request) -> web.Response:
        return web.Response(text=name)

    app.router.add_get("/", respond)
    runner = Runner(app, shutdown_timeout=1)
    await runner.setup()
    channel = acceptor.add_worker()
    site = HandedOver(runner, channel, name, tls)
    await site.start()
    try:
        yield site
    finally:
        channel.shutdown(socket.SHUT_RDWR)
        await runner.cleanup()
        channel.close()


async def connect(url, **options):
    """Return a session with one connection, and the name of the worker that serves it."""
    http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1))
    try:
        async with http.get(url, **options) as response:
            return http, await response.text()
    except aiohttp.ClientError:
        await http.close()
        raise


async def named(url):
    """Return the name of the worker that serves a new connection."""
    http, name = await connect(url)
    await http.close()
    return name


async def wait_until(condition):
    async with asyncio.timeout(50):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("together", [True, False])
async def test_connections_are_spread_evenly(acceptor, together):
    """16 connections over two workers are eight each, whether they arrive together or one after the other."""
    accepting, url = acceptor
    async with working(accepting, "a"), working(accepting, "b"):
        if together:
            connections = await asyncio.gather(*(connect(url) for _ in range(16)))
        else:
            connections = [await connect(url) for _ in range(16)]
        for http, _ in connections:
            await http.close()

    assert Counter(name for _, name in connections) == {"a": 8, "b": 8}


async def test_short_connections_take_turns(acceptor):
    accepting, url = acceptor
    async with working(accepting, "a"), working(accepting, "b"):
        names = Counter([await named(url) for _ in range(10)])

    assert {"a", "b"} == {*names}
    assert 4 <= names["a"] <= 6


async def test_a_worker_gets_new_connections_after_its_connections_have_closed(acceptor):
    accepting, url = acceptor
    async with working(accepting, "a"), working(accepting, "b"):
        connections = [await connect(url) for _ in range(8)]
        for http, name in connections:
            if name == "a":
                await http.close()
        await wait_until(lambda: sorted(worker.open for worker in accepting._workers) == [0, 4])
        later = [await connect(url) for _ in range(4)]
        for http, _ in connections + later:
            await http.close()

    assert [name for _, name in later] == ["a"] * 4


async def test_a_killed_worker_gets_no_connections_and_its_replacement_does(acceptor):
    """Meanwhile they go to the other one."""
    accepting, url = acceptor
    async with working(accepting, "b"):
        async with working(accepting, "a"):
            assert {await named(url) for _ in range(4)} == {"a", "b"}
        assert {await named(url) for _ in range(4)} == {"b"}
        async with working(accepting, "c"):
            await wait_until(lambda: sum(worker.is_accepting for worker in accepting._workers) == 2)
            assert {await named(url) for _ in range(4)} == {"b", "c"}


async def test_connections_wait_while_no_worker_accepts(acceptor):
    accepting, url = acceptor
    connecting = asyncio.create_task(named(url))
    await asyncio.sleep(0.05)
    assert not connecting.done()
    async with working(accepting, "a"):
        assert await connecting == "a"


async def test_a_worker_that_stops_serves_the_connections_that_it_was_given(acceptor):
    """No connection is lost, and new ones go to the other worker."""
    accepting, url = acceptor
    async with working(accepting, "a") as stopping, working(accepting, "b"):
        assert {await named(url) for _ in range(4)} == {"a", "b"}
        connecting = [asyncio.create_task(named(url)) for _ in range(40)]
        await asyncio.sleep(0)
        await stopping.stop()
        names = await asyncio.gather(*connecting)
        assert {await named(url) for _ in range(4)} == {"b"}

    assert len(names) == 40


async def test_a_stopping_acceptor_listens_until_no_worker_accepts(acceptor):
    accepting, url = acceptor
    async with working(accepting, "a") as worker:
        assert await named(url) == "a"
        accepting.stop()
        assert await named(url) == "a"
        await worker.stop()
        with pytest.raises(aiohttp.ClientConnectorError):
            await named(url)


async def test_a_connection_is_held_while_the_channels_are_full(acceptor, monkeypatch):
    """It is handed over as soon as a worker reads."""
    accepting, url = acceptor
    send, fails = socket.send_fds, [BlockingIOError()] * 3
    tries = []

    def send_fds(*args):
        tries.append(args)
        if fails:
            raise fails.pop()
        return send(*args)

    monkeypatch.setattr(socket, "send_fds", send_fds)
    async with working(accepting, "a"):
        assert await named(url) == "a"

    assert len(tries) == 4


async def test_an_error_of_accept_is_logged_and_retried(acceptor, monkeypatch, caplog):
    """Without free file descriptors, connections wait."""
    monkeypatch.setattr("proxy.server.handover._ERROR_INTERVAL_S", 0.05)
    accepting, url = acceptor
    (listening,) = accepting._listening

    class Failing:
        """A listening socket that fails its first accept."""

        fails = True

        def accept(self):
            if self.fails:
                self.fails = False
                raise OSError(24, "Too many open files")
            return listening.accept()

        def __getattr__(self, name):
            return getattr(listening, name)

    accepting._listening = [Failing()]
    async with working(accepting, "a"):
        assert await named(url) == "a"

    assert "Cannot accept connections: [Errno 24] Too many open files" in caplog.text


async def test_workers_serve_tls_and_count_failed_handshakes_as_closed(acceptor, certificate):
    accepting, url = acceptor
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    trusting = ssl.create_default_context(cafile=certificate[0])
    async with working(accepting, "a", context):
        with pytest.raises(aiohttp.ClientError):
            await named(url)
        http, name = await connect(url.replace("http", "https"), ssl=trusting)
        assert name == "a"
        await wait_until(lambda: accepting._workers[0].open == 1)
        await http.close()
        await wait_until(lambda: accepting._workers[0].open == 0)


async def test_a_worker_stops_without_its_supervisor(acceptor, monkeypatch):
    """The supervisor was killed, and cannot end the connection."""
    monkeypatch.setattr(handover, "_END_TIMEOUT_S", 1000)
    accepting, _ = acceptor
    async with AsyncExitStack() as stack:
        site = await stack.enter_async_context(working(accepting, "a"))
        accepting.close()
        await asyncio.wait_for(site.stop(), 50)


async def test_connections_that_a_worker_has_not_accepted_yet_are_counted(acceptor):
    """They wait in its channel, each with a byte."""
    one, url = acceptor
    async with working(one, "a") as site:
        before = site.waiting
        asyncio.get_running_loop().remove_reader(site._channel)  # the worker is busy
        port = int(url.rpartition(":")[2])
        writers = [(await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(3)]
        async with asyncio.timeout(50):
            while site.waiting < 3:
                await asyncio.sleep(0.001)
        for writer in writers:
            writer.close()

    assert before == 0


async def test_connections_that_no_worker_has_yet_are_counted(acceptor):
    """Those in the backlog, and one that is accepted while all channels are full."""
    one, url = acceptor
    port = int(url.rpartition(":")[2])
    before = one.waiting
    writers = [(await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(3)]
    in_backlog = one.waiting
    one._accept(one._listening[0])
    for writer in writers:
        writer.close()

    assert (before, in_backlog, one.waiting) == (0, 3, 3)
