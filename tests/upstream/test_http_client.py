"""Requests to engines and their connections: reuse, retries, limits, cancellation, TLS."""

import asyncio
import gzip
import ssl
import zlib

import aiohttp
import pytest

from proxy.upstream.http_client import MAX_DECODED_BYTES, Decoder

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Engine:
    """Notes requests and connections. `answer(number)` returns the response to the request with this number."""

    def __init__(self, answer=lambda number: ANSWER):
        self.answer, self.requests, self.connections, self.closed = answer, [], 0, asyncio.Event()

    async def serve(self, reader, writer):
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (int(line[15:]) for line in head.lower().split(b"\r\n") if line[:15] == b"content-length:"), 0
                )
                self.requests.append(head + await reader.readexactly(length))
                answer = self.answer(len(self.requests))
                if answer is None:
                    return
                writer.write(answer)
        finally:
            self.closed.set()


async def text(client, url, method="POST", *, headers=(), body=b"{}"):
    """Send a request and return the body of the response."""
    response = await client.request(method, url, headers=headers, body=body)
    body = b"".join([read async for read in response.iter_bytes()])
    response.close()
    return body


async def test_a_connection_is_reused_after_a_complete_response(client, engine_at):
    engine = Engine()
    url = await engine_at(engine.serve)
    found = [await text(client, url) for _ in range(3)]

    assert (found, engine.connections) == ([b"ok"] * 3, 1)


@pytest.mark.parametrize("answer", [
    b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok", b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
    ANSWER + ANSWER, ANSWER + b"x",
], ids=["close", "HTTP/1.0", "another response", "surplus"])  # fmt: skip
async def test_a_connection_is_not_reused_if_it_may_be_out_of_step(client, engine_at, answer):
    """The engine closes it, or sent more than the response, which is never read as the next one."""
    engine = Engine(lambda number: answer)
    url = await engine_at(engine.serve)
    found = [await text(client, url) for _ in range(2)]

    assert (found, engine.connections) == ([b"ok"] * 2, 2)


async def test_bytes_between_two_responses_close_the_connection(client, engine_at):
    """A response that was not requested is not the response to the next request."""
    late = asyncio.Event()

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(ANSWER)
        await asyncio.sleep(0.05)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nold")
        await reader.read()
        late.set()

    url = await engine_at(serve)
    assert await text(client, url) == b"ok"
    await late.wait()
    assert await text(client, url) == b"ok"


async def test_idle_connections_are_closed(make_client, engine_at):
    """After `keepalive_s`; without one, after each response, and the request announces it."""
    engine, other = Engine(), Engine()
    url, other_url = await engine_at(engine.serve), await engine_at(other.serve)
    keeping, closing = make_client(keepalive_s=0.05), make_client(keepalive_s=None)
    for _ in range(2):
        await text(keeping, url)
        await text(closing, other_url)
        await asyncio.sleep(0.2)

    assert (engine.connections, other.connections) == (2, 2)
    assert b"Connection: close\r\n" in other.requests[0]
    assert b"Connection" not in engine.requests[0]


@pytest.mark.parametrize("reading", [False, True])
async def test_closing_an_incomplete_response_closes_the_connection(client, engine_at, reading):
    """An engine stops to generate then."""
    engine = Engine(lambda number: b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\nok")
    response = await client.request("POST", await engine_at(engine.serve), headers=(), body=b"{}")
    if reading:
        await anext(response.iter_bytes())
    response.close()
    async with asyncio.timeout(50):
        await engine.closed.wait()


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"], ids=["head", "body"])
async def test_a_cancelled_request_closes_its_connection(client, engine_at, answer):
    engine = Engine(lambda number: answer)
    url = await engine_at(engine.serve)

    async def call():
        response = await client.request("POST", url, headers=(), body=b"{}")
        try:
            await anext(response.iter_bytes())
        finally:
            response.close()

    calling = asyncio.create_task(call())
    while not engine.requests:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    calling.cancel()
    await asyncio.wait([calling])
    async with asyncio.timeout(50):
        await engine.closed.wait()


@pytest.mark.parametrize(("method", "sent"), [("GET", 2), ("DELETE", 2), ("POST", 1), ("PATCH", 1)])
async def test_idempotent_requests_are_sent_once_more_if_the_connection_is_lost(client, engine_at, method, sent):
    engine = Engine(lambda number: None if number == 1 else ANSWER)
    url = await engine_at(engine.serve)
    if sent == 2:
        assert await text(client, url, method, body=None) == b"ok"
    else:
        with pytest.raises(aiohttp.ServerDisconnectedError, match="Server disconnected"):
            await text(client, url, method)

    assert sent == len(engine.requests)


async def test_a_second_loss_is_an_error(client, engine_at):
    engine = Engine(lambda number: None)
    with pytest.raises(aiohttp.ServerDisconnectedError):
        await text(client, await engine_at(engine.serve), "GET", body=None)

    assert len(engine.requests) == 2


async def test_max_connections_limits_concurrent_requests(make_client, engine_at):
    """The second request waits until the first response is complete, or was closed."""
    engine = Engine(lambda number: b"HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\nok" if number == 1 else ANSWER)
    client, url = make_client(max_connections=1), await engine_at(engine.serve)
    first = await client.request("POST", url, headers=(), body=b"{}")
    second = asyncio.create_task(text(client, url))
    await asyncio.sleep(0.1)
    assert len(engine.requests) == 1
    first.close()

    assert await second == b"ok"
    assert engine.connections == 2


async def test_a_large_body_is_written_at_the_pace_of_the_engine(client, engine_at):
    """And arrives complete; the connection is reused."""
    engine, body = Engine(), bytes(range(256)) * 2**16
    url = await engine_at(engine.serve)
    assert [await text(client, url, body=body) for _ in range(2)] == [b"ok", b"ok"]

    assert [request.endswith(b"\r\n\r\n" + body) for request in engine.requests] == [True, True]
    assert engine.connections == 1


@pytest.mark.parametrize("then", ["close", "wait"])
async def test_a_response_may_arrive_while_the_request_is_being_written(client, engine_at, then):
    """The rest of the request is not written, and the connection is closed."""
    closed = asyncio.Event()

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
        if then == "wait":
            await asyncio.sleep(0.2)
            while await reader.read(2**16):
                pass
            closed.set()

    url = await engine_at(serve)
    response = await client.request("POST", url, headers=(), body=bytes(2**26))
    assert (response.status, await anext(response.iter_bytes())) == (413, b"no")
    if then == "wait":
        async with asyncio.timeout(50):
            await closed.wait()


async def test_the_request_has_the_headers_that_engines_require(client, engine_at):
    """Host first; `Accept` unless the client has one; a length if there is a body, or the method usually has one."""
    engine = Engine()
    url = await engine_at(engine.serve)
    host = url.removeprefix("http://").removesuffix("/x").encode()
    await text(client, url + "?a=%20b#c", "GET", headers=[("X-A", "é\udcff")], body=None)
    await text(client, url, "POST", headers=[("accept", "a/b"), ("X-A", "1"), ("X-A", "2")], body=None)
    await text(client, url, "POST")

    assert engine.requests == [
        b"GET /x?a=%20b HTTP/1.1\r\nHost: " + host + b"\r\nX-A: \xc3\xa9\r\nAccept: */*\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: " + host + b"\r\naccept: a/b\r\nX-A: 1\r\nX-A: 2\r\nContent-Length: 0\r\n\r\n",
        b"POST /x HTTP/1.1\r\nHost: " + host + b"\r\nAccept: */*\r\nContent-Length: 2\r\n\r\n{}",
    ]


@pytest.mark.parametrize("header", [("X-A", "a\r\nX-Evil: 1"), ("X-A\n", "a"), ("X-A", "a\x00"), ("X-A", "a\rb")])
async def test_a_line_break_in_a_header_is_an_error(client, engine_at, header):
    """Nothing is sent. Line breaks in a URL are removed, as by aiohttp."""
    engine = Engine()
    url = await engine_at(engine.serve)
    with pytest.raises(ValueError, match="line break or a null byte"):
        await text(client, url, headers=[header])
    assert engine.connections == 0
    await text(client, url + "/\r\nX-Evil: 1")

    assert engine.requests[0].startswith(b"POST /x/X-Evil: 1 HTTP/1.1\r\n")


async def test_a_url_without_a_host_is_an_error(client):
    with pytest.raises(aiohttp.InvalidURL):
        await text(client, "/x")


async def test_connections_with_tls_are_verified_and_reused(make_client, engine_at, certificate):
    """The host name and the authority are checked; a large body passes as without TLS."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    engine = Engine()
    url = await engine_at(engine.serve, ssl=context)
    trusting = make_client(tls=ssl.create_default_context(cafile=certificate[0]))

    assert [await text(trusting, url, body=bytes(2**22)) for _ in range(2)] == [b"ok"] * 2
    assert engine.connections == 1
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await text(make_client(), url)


async def test_connecting_times_out(make_client, engine_at):
    """Including the TLS handshake."""

    async def serve(reader, writer):
        await reader.read()

    url = (await engine_at(serve)).replace("http://", "https://")
    with pytest.raises(aiohttp.ConnectionTimeoutError, match=f"Connection timeout to host {url}"):
        await text(make_client(connect_timeout_s=0.2), url)


async def test_a_refused_connection_is_an_error_and_not_retried(client):
    with pytest.raises(aiohttp.ClientConnectorError, match="Cannot connect to host 127.0.0.1:9"):
        await text(client, "http://127.0.0.1:9/x", "GET", body=None)


@pytest.fixture
def sent(upstream_to, engine_at):
    """Return a function that sends headers to an endpoint with these settings, and returns the lines that arrive."""

    async def send(pairs, /, **settings):
        received = []

        async def serve(reader, writer):
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"POST /x "):  # and no detection
                received.extend(head.decode().split("\r\n")[2:-2])
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

        upstream = upstream_to((await engine_at(serve)).removesuffix("/x"), **settings)
        response = await upstream.send(upstream.endpoints[0], "POST", "/x", headers=pairs, body=b"{}")
        response.close()
        return received

    return send


async def test_connection_headers_and_credentials_are_not_sent_to_the_engine(sent):
    """TokenTape's own headers are not either; trace headers and others are. The engine's API key is added."""
    headers = [
        ("Authorization", "Bearer agent"),
        ("x-api-key", "agent"),
        ("Connection", "close, X-Private"),
        ("X-Private", "1"),
        ("Transfer-Encoding", "chunked"),
        ("Content-Encoding", "gzip"),
        ("Host", "me"),
        ("X-Rollout-Id", "r1"),
        ("X-Rollout-Continuation", "append"),
        ("Content-Type", "application/json"),
        ("X-Request-Id", "t"),
    ]

    assert await sent(headers, api_key="engine") == [
        "Content-Type: application/json",
        "X-Request-Id: t",
        "Accept-Encoding: identity",
        "Authorization: Bearer engine",
        "Accept: */*",
        "Content-Length: 2",
    ]


async def test_configured_headers_replace_the_clients(sent):
    lines = await sent(
        [("x-tenant", "theirs"), ("X-Mine", "m"), ("Accept", "a/b")], headers={"X-Tenant": "ours", "X-Other": "o"}
    )

    assert lines == [
        "X-Mine: m",
        "Accept: a/b",
        "X-Tenant: ours",
        "X-Other: o",
        "Accept-Encoding: identity",
        "Content-Length: 2",
    ]


@pytest.mark.parametrize("value", ["a\x01b", "\x1b[31m", "a\x7f", "a\nb"])
async def test_headers_with_control_characters_are_not_sent(sent, value):
    assert "X-Tab: a\tb" in (lines := await sent([("X-Odd", value), ("X-Tab", "a\tb")]))
    assert not [line for line in lines if line.startswith("X-Odd")]


TEXT = bytes(range(256)) * 5000


def decoded(coding, *parts):
    """Return the decoded parts."""
    decoder = Decoder(coding)
    found = [decoded for part in parts for decoded in decoder.parts(part)]
    decoder.check_end()
    return found


@pytest.mark.parametrize(("coding", "packed"), [
    ("gzip", gzip.compress(TEXT)), ("gzip", gzip.compress(b"") + gzip.compress(TEXT)), ("deflate", zlib.compress(TEXT)),
    ("deflate", zlib.compress(TEXT, wbits=-15)),
])  # fmt: skip
@pytest.mark.parametrize("size", [1, 7, 10_000_000])
def test_any_parts_are_decoded(coding, packed, size):
    """At most 256 KiB each."""
    found = decoded(coding, *(packed[start : start + size] for start in range(0, len(packed), size)))

    assert b"".join(found) == TEXT
    assert max(map(len, found)) <= MAX_DECODED_BYTES


@pytest.mark.parametrize("coding", ["br", "zstd"])
def test_other_codings_are_errors(coding):
    with pytest.raises(ValueError, match=f"Can not decode content-encoding: {coding}"):
        Decoder(coding)


@pytest.mark.parametrize(("coding", "packed"), [
    ("gzip", b"hello"), ("gzip", gzip.compress(TEXT)[:-8] + b"x" * 8), ("gzip", gzip.compress(b"") * 1001),
    ("deflate", zlib.compress(TEXT)[:100]),
])  # fmt: skip
def test_broken_streams_are_errors(coding, packed):
    """As are more than 1,000 members."""
    with pytest.raises(aiohttp.ClientPayloadError, match=f"Can not decode content-encoding: {coding}"):
        decoded(coding, packed)


def test_an_incomplete_gzip_stream_is_accepted():
    """As by aiohttp's client; JSON that is cut is detected by its parser."""
    assert TEXT.startswith(b"".join(decoded("gzip", gzip.compress(TEXT)[:300])))
