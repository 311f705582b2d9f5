"""Invalid HTTP requests, `Expect` headers, and connections during the shutdown."""

import asyncio
from contextlib import suppress
from urllib.parse import urlsplit

import aiohttp
import orjson
import pytest
from aiohttp import web
from tests.support.fakes import proxying

from proxy.server.connections import Runner

CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
REQUESTS = {
    "not HTTP": b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
    "method": b"P\xffST / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "version": b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
    "0.9": b"GET /rollouts\r\n\r\n",
    "0.9 by name": b"DELETE /rollouts/r1 HTTP/0.9\r\nHost: localhost\r\n\r\n",
    "2.0": b"POST /rollouts HTTP/2.0\r\nContent-Length: 2\r\n\r\n{}",
    "no host": b"GET /v1/models HTTP/1.1\r\n\r\n",
    "line": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "header": b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    "headers": b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 10_000 + b"\r\n",
    "null": b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n",
    "name": b"GET / HTTP/1.1\r\nHost: localhost\r\nX y: z\r\n\r\n",
    "url": b"GET http://[::1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "length": b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: +1\r\n\r\n",
    "chunk": CHUNKED + b"zz\r\n",
    "late chunk": (CHUNKED + b"2\r\n{}\r\n", b"zz\r\n"),
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_an_invalid_http_request_is_a_400_json_error(store, engine, connected, name):
    """The message contains no representation of Python objects; the connection is closed."""
    sent = REQUESTS[name]
    async with proxying(engine.url, store) as served:
        reader, writer = await connected(served.url)
        for part in sent if isinstance(sent, tuple) else (sent,):
            writer.write(part)
            await writer.drain()
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")

    assert b" 400 " in head.partition(b"\r\n")[0], head
    assert b"application/json" in head
    error = orjson.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "bad_request")
    assert not [word for word in ("b'", "\\x", "^", "\n", "Error", "aaa", "llhttp") if word in error["message"]]
    assert engine.requests == []


async def test_an_exception_within_aiohttp_is_a_json_internal_error(store, engine, monkeypatch):
    """It has the error id of the log."""

    def broken(*_):
        raise ZeroDivisionError("/srv/secret")

    async with proxying(engine.url, store) as served, aiohttp.ClientSession() as http:
        monkeypatch.setattr("aiohttp.web_urldispatcher.UrlDispatcher.resolve", broken)
        async with http.get(served.url + "/health") as response:
            error = (await response.json())["error"]

    assert (response.status, error["code"]) == (500, "internal_error")
    assert "error id" in error["message"]
    assert "secret" not in error["message"]


@pytest.fixture
async def connected():
    """Opens raw connections, which are closed after the test."""
    writers = []

    async def connect(url):
        address = urlsplit(url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writers.append(writer)
        return reader, writer

    yield connect
    for writer in writers:
        writer.close()


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/rollouts", b"/nothing"])
async def test_an_unknown_expectation_is_417_on_every_path(store, engine, connected, path):
    """The response does not contain the header's value."""
    async with proxying(engine.url, store) as served:
        for expected in [b"-1", b"\xff", b"100-continue, x"]:
            reader, writer = await connected(served.url)
            head = (
                b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nConnection: close\r\nExpect: %s\r\n\r\n{}"
            )
            writer.write(head % (path, expected))
            status, _, rest = (await reader.read()).partition(b"\r\n")
            assert b"417" in status
            assert orjson.loads(rest.partition(b"\r\n\r\n")[2])["error"]["code"] == "expectation_failed"


async def test_expect_100_continue_is_answered_before_the_body(store, engine, connected):
    """It is case-insensitive."""
    async with proxying(engine.url, store) as served:
        reader, writer = await connected(served.url)
        writer.write(b"POST /rollouts HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nExpect: 100-Continue\r\n\r\n")
        assert await reader.readline() == b"HTTP/1.1 100 Continue\r\n"
        writer.write(b"{}")
        await reader.readline()
        assert await reader.readline() == b"HTTP/1.1 201 Created\r\n"


async def test_a_connection_accepted_during_the_shutdown_is_closed(monkeypatch):
    """aiohttp would keep it open and ignore its requests."""

    async def handle(request):
        return web.Response(text="never")

    app = web.Application()
    app.router.add_get("/", handle)
    runner = Runner(app, shutdown_timeout=0.1)
    await runner.setup()
    connection_made = web.RequestHandler.connection_made

    def connected_during_the_shutdown(connection, transport):
        connection_made(connection, transport)
        runner.server.pre_shutdown()

    monkeypatch.setattr(web.RequestHandler, "connection_made", connected_during_the_shutdown)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        reader, writer = await asyncio.open_connection(*runner.addresses[0])
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(50):  # the keep-alive timeout is longer
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()
    finally:
        await runner.cleanup()


async def first_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Return the status, the headers and the body of the next response."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
    return int(head[0].split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


def request_to(path: str, body: bytes = b"") -> bytes:
    verb = "POST" if body else "GET"
    return f"{verb} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def test_calls_on_connections_above_the_limit_get_429_in_their_dialect_and_other_requests_are_answered(
    store, engine, http, connected
):
    """Each such connection is closed after its response; once others have closed, new ones are within the limit."""
    call = request_to(
        "/v1/messages", b'{"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}'
    )
    async with proxying(engine.url, store, agents={"max_connections": 1}) as served:
        reader, writer = await connected(served.url)
        writer.write(request_to("/health"))
        first = await first_of(reader)
        async with http.get(served.url + "/metrics") as response:  # on a second connection
            metrics = dict(line.rsplit(" ", 1) for line in (await response.text()).splitlines() if line[0] != "#")
        other_reader, other_writer = await connected(served.url)
        other_writer.write(call)
        status, headers, body = await first_of(other_reader)
        rest = await other_reader.read()
        writer.close()
        await reader.read()
        async with http.get(served.url + "/health") as response:
            later = response.status

    assert (first[0], later, status, rest) == (200, 200, 429, b"")
    assert (headers["connection"], headers["retry-after"]) == ("close", "1")
    error = orjson.loads(body)
    assert (error["type"], error["error"]["type"]) == ("error", "rate_limit_error")
    assert "agents.max_connections" in error["error"]["message"]
    counted = [float(metrics[f"tokentape_{name}"]) for name in ("connections", "connections_limit", "waiting_calls")]
    assert counted == [2, 1, 0]
