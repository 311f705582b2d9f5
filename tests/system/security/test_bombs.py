"""Expensive requests: compressed, nested, long, slow."""

import asyncio
import gzip
import tracemalloc
import zlib
from urllib.parse import urlsplit

import orjson
import pytest
import zstandard
from tests.support.fakes import proxying
from tests.support.recorded import load

WHOLE = load("chat_ids_lp")
MAX_BYTES = 2**20
PATH = "/rollouts/r1/v1/chat/completions"
CHAT = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
LONG = 2**28
# Functions, since each process that collects these tests would compress them.
CODINGS = {
    "gzip": lambda: gzip.compress(bytes(LONG)),
    "deflate": lambda: zlib.compress(bytes(LONG)),
    "zstd": lambda: zstandard.compress(bytes(LONG)),
    "br": lambda: b"\x5b\xff\xff\xff",
    "bogus": lambda: b"{}",
    "gzip, gzip": lambda: gzip.compress(gzip.compress(bytes(LONG))),
}
UNSUPPORTED = ("unsupported_encoding", 415)


@pytest.fixture
def agents():
    """The limits of the proxy; a test may override them. Timeouts are long, since a busy machine sends a body slowly."""
    return {"max_body_bytes": MAX_BYTES}


HASTY = pytest.mark.parametrize("agents", [{"idle_timeout_s": 0.3, "body_timeout_s": 0.3}], ids=["hasty"])


@pytest.fixture
async def api(store, engine, guarded_api, agents):
    engine.plays(WHOLE)
    async with proxying(engine.url, store, agents=agents) as served:
        yield guarded_api(served.url)


@pytest.mark.parametrize("coding", CODINGS)
async def test_the_body_limit_applies_to_inflated_bytes(api, engine, coding):
    """256 MB in a few bytes are rejected in little memory: 413, or 415 for an unsupported encoding."""
    body = CODINGS[coding]()
    tracemalloc.start()
    try:
        response = await api.call("POST", PATH, data=body, headers={"Content-Encoding": coding})
        _, peak = tracemalloc.get_traced_memory()  # including the client's
    finally:
        tracemalloc.stop()

    code, status = UNSUPPORTED if coding in ("br", "bogus", "gzip, gzip") else ("request_too_large", 413)
    assert (response.status, response.json["error"]["code"]) == (status, code)
    assert engine.requests == []
    assert peak < 16 * MAX_BYTES


async def test_a_body_of_the_maximum_size_is_accepted(api, engine):
    """The limit is on inflated bytes, and one more is 413."""
    exact = CHAT[:-1] + b" " * (MAX_BYTES - len(CHAT)) + b"}"
    taken = await api.call("POST", PATH, data=gzip.compress(exact), headers={"Content-Encoding": "gzip"})
    refused = await api.call("POST", PATH, data=gzip.compress(exact + b" "), headers={"Content-Encoding": "gzip"})

    assert (len(exact), taken.status, refused.status) == (MAX_BYTES, 200, 413)
    assert len(engine.requests) == 1


@pytest.mark.parametrize(("bomb", "status"), [
    (b"[" * 500_000, 413),
    (b'{"a":' * 200_000, 413),
    (b"[" * 100_000, 400),
    (b'{"messages":' + b"[" * 1000 + b"]" * 1000 + b"}", 400),
    (b'{"messages":[],"seed":' + b"9" * 500_000 + b"}", 400),
    (b'{"messages":[],"seed":1e999}', 400),
    (b'{"messages":[],"seed":-' + b"9" * 100 + b"}", 400),
    (b'{"messages":[],"temperature":NaN}', 400),
    (b'{"messages":[],"x":"\xff"}', 400),
    (b'{"messages":[],"x":"\\ud800"}', 400),
    (b'{"messages":[]' + b',"a":1' * 150_000 + b"}", 200),
    (b'{"messages":[],"messages":"x","messages":[{"role":"user","content":"last"}]}', 200),
])  # fmt: skip
async def test_json_bombs_are_rejected_or_harmless(api, engine, bomb, status):
    """Deep nesting, huge numbers and invalid UTF-8 are 400; too many values are 413. The last duplicate key wins
    everywhere.
    """
    response = await api.call("POST", PATH, data=bomb)

    assert status == response.status, response.text[:300]
    assert (status == 200) == bool(engine.requests)
    if b"last" in bomb:
        assert engine.requests[0]["messages"][0]["content"] == "last"


@pytest.mark.parametrize("lines", [
    b"X-Long: " + b"a" * 100_000, b"A" * 100_000 + b": 1", b"\r\n".join(b"X-%d: %s" % (n, b"a" * 99) for n in range(10_000)),
])  # fmt: skip
async def test_huge_headers_are_rejected(api, engine, lines):
    """One long line, one long name, ten thousand lines: 400, and nothing is sent to the engine."""
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n%s\r\nContent-Length: 2\r\n\r\n{}"
    response = await api.raw(head % (PATH.encode(), lines))

    assert not response or response.startswith((b"HTTP/1.1 400", b"HTTP/1.0 400"))
    assert engine.requests == []


async def test_the_length_of_a_path_is_limited(api):
    """A request line of 100 kB is 400."""
    response = await api.raw(b"GET /%s HTTP/1.1\r\nHost: localhost\r\n\r\n" % (b"a" * 100_000))

    assert not response or b" 400 " in response[:15]


@HASTY
@pytest.mark.parametrize("sent", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: "])
async def test_an_incomplete_request_head_times_out(api, sent):
    """The connection is closed after agents.idle_timeout_s, even if bytes keep arriving; other clients are served meanwhile."""
    parts = urlsplit(api.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(sent)
    other = await api.call("GET", "/health")
    async with asyncio.timeout(50):
        while not reader.at_eof():
            if sent:
                writer.write(b"a")
            try:
                await asyncio.wait_for(reader.read(), 0.05)
            except TimeoutError:
                continue
            except ConnectionResetError:
                break
    writer.close()

    assert other.status == 200


@HASTY
async def test_an_incomplete_body_is_408(api, engine):
    """After agents.body_timeout_s; nothing is sent to the engine."""
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 100\r\n\r\n{" % PATH.encode()
    response = await api.raw(head)

    assert response.startswith(b"HTTP/1.1 408")
    assert b"request_timeout" in response
    assert engine.requests == []
