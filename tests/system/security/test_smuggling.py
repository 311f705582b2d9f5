"""Requests that two servers could parse differently, on raw sockets, with an engine that notes what it receives."""

import re

import orjson
import pytest
from tests.support.fakes import proxying
from tests.support.recorded import load
from tests.support.stored import stored_steps

from proxy.rollouts.rollout import MAX_ID_CHARACTERS

WHOLE = load("chat_ids_lp")
BODY = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
HIDDEN = (
    b"POST /rollouts/hidden/v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(BODY)
    + BODY
)
PATH = "/rollouts/r1/v1/chat/completions"


@pytest.fixture
async def api(store, engine, guarded_api):
    engine.plays(WHOLE)
    async with proxying(engine.url, store) as served:
        yield guarded_api(served.url)


def request(*lines, body=BODY, path=PATH, length=True):
    """Return a POST with these header lines that closes the connection."""
    sized = (b"Content-Length: %d" % len(body),) if length else ()
    head = (b"POST %s HTTP/1.1" % path.encode("latin-1"), b"Host: localhost", b"Connection: close", *sized, *lines)
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def statuses(response):
    """Return the status of every response on the connection."""
    return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3}) ", response)]


@pytest.mark.parametrize("lines", [
    (b"Transfer-Encoding: chunked",),
    (b"Transfer-Encoding: chunked, identity",),
    (b"Transfer-Encoding: identity",),
    (b"Transfer-Encoding: xchunked",),
    (b"Transfer-Encoding : chunked",),
    (b"Transfer-Encoding:\x0bchunked",),
    (b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",),
    (b" Transfer-Encoding: chunked",),
    (b"X: y\nTransfer-Encoding: chunked",),
    (b"X: y\rTransfer-Encoding: chunked",),
    (b"Content-Length: 0",),
    (b"Content-Length: +3",),
    (b"Content-Length: 0x10",),
    (b"Content-Length: -1",),
    (b"Content-Length: 3, 3",),
    (b"Content-Length: 1_0",),
    (b"Content-Length : 0",),
])  # fmt: skip
async def test_a_body_with_two_lengths_is_rejected(api, engine, store, lines):
    """Conflicting or malformed lengths are 400, nothing is forwarded, and the bytes behind are not read as a request."""
    response = await api.raw(request(*lines, body=BODY + HIDDEN))

    assert statuses(response) == [400]
    assert engine.requests == []
    assert (await store.get("hidden"), await store.get("r1")) == (None, None)


@pytest.mark.parametrize("body", [
    b"0\r\n\r\n", b"0x3\r\nabc\r\n0\r\n\r\n", b"-1\r\n\r\n", b"fffffffffffffffff\r\n", b"3 \r\nabc\r\n0\r\n\r\n",
    b"3\nabc\n0\n\n", b"3;\nx\r\nabc\r\n0\r\n\r\n", b"2\r\nabc\r\n0\r\n\r\n",
])  # fmt: skip
async def test_malformed_chunks_are_rejected(api, engine, body):
    """One 400; the bytes behind them are not read as a request."""
    response = await api.raw(request(b"Transfer-Encoding: chunked", body=body + HIDDEN, length=False))

    assert statuses(response)[0] == 400
    assert engine.requests == []


async def test_one_request_is_one_request_to_the_engine(api, engine):
    """A body that looks like a second request reaches the engine as a body, with a Content-Length."""
    content = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": HIDDEN.decode()}]})
    response = await api.raw(request(body=content))

    assert statuses(response) == [200]
    assert len(engine.requests) == 1
    assert HIDDEN.decode() == engine.requests[0]["messages"][0]["content"]
    assert "transfer-encoding" not in engine.headers[0] or "content-length" not in engine.headers[0]


@pytest.mark.parametrize("lines", [
    (b"X-Rollout-Id: a\x00b",), (b"X-Rollout-Id: a\nX-Evil: 1",), (b"X-Rollout-Id: a\r\n b",), (b"X-Rollout-Id: a\x7fb",),
    (b"X Y: 1",), (b"X\x00Y: 1",), (b": empty",), (b"no colon",), (b"X-Rollout-Id: " + b"a" * (MAX_ID_CHARACTERS + 1),),
])  # fmt: skip
async def test_malformed_headers_are_rejected(api, engine, lines):
    """Control characters, folded lines and invalid names are 400, and nothing is forwarded."""
    response = await api.raw(request(*lines, path="/v1/chat/completions"))

    assert statuses(response) == [400]
    assert engine.requests == []


@pytest.mark.parametrize(
    "name", ["a%0d%0aX-Evil:%201", "a%0aSet-Cookie:x", "%00", "a%c2%85b", "%ff", "%ed%a0%80", "a%0d"]
)
async def test_an_id_cannot_split_a_response(api, engine, name):
    """Line breaks in an ID, in any encoding, are 400 and create no header."""
    for path in (f"/rollouts/{name}/v1/chat/completions", f"/sessions/{name}/v1/completions", f"/rollouts/{name}/tree"):
        response = await api.raw(request(path=path))
        head = response.partition(b"\r\n\r\n")[0].lower()

        assert statuses(response) == [400] or statuses(response) == [404]
        assert b"\nx-evil" not in head
        assert b"\nset-cookie" not in head
    assert engine.requests == []


@pytest.mark.parametrize("field", ["rollout_id", "metadata"])
async def test_an_id_in_a_body_cannot_split_a_response(api, engine, field):
    """JSON can encode any character; the result is the same."""
    for name in ("a\r\nX-Evil: 1", "a\x00", "\ud800"):
        value = name if field == "rollout_id" else {"rollout_id": name}
        body = b'{"messages":[],"%s":%s}' % (field.encode(), _ascii(value))
        response = await api.raw(request(body=body, path="/v1/chat/completions"))

        assert statuses(response) == [400]
        assert b"\nX-Evil" not in response
    assert engine.requests == []


async def test_an_id_with_non_ascii_letters_is_one_header(api):
    """X-Rollout-Id has it in one line."""
    response = await api.raw(request(path="/rollouts/gr%C3%BC%C3%9F%20%2F%20%E2%9C%93/v1/chat/completions"))

    assert statuses(response) == [200]
    assert "X-Rollout-Id: grüß / ✓\r\n".encode() in response


async def test_hop_by_hop_headers_and_keys_are_not_forwarded(api, engine, store):
    """The engine gets no header that Connection names, no key in any case, and no framing of the client."""
    lines = (
        b"Authorization: Bearer planted", b"X-API-KEY: planted", b"Proxy-Authorization: planted", b"TE: trailers, planted",
        b"Keep-Alive: planted", b"X-Named: planted", b"Connection: X-Named",
    )  # fmt: skip
    await api.raw(request(*lines))

    assert [name for name, value in engine.headers[0].items() if "planted" in value] == []
    assert len(await stored_steps(store, "r1")) == 1


@pytest.mark.parametrize("path", [
    "/v1/models/../../pause", "/v1/models/..", "/v1/models/a/../../../metrics", "/v1/models/%2e%2e/%2e%2e/pause",
    "/v1/models/.%2E/x", "/v1/models/%2e%2e%2fpause", "/v1/models/..%5cpause", "/v1/models/%252e%252e/pause", "/v1/models/x%00",
    "/v1/models/x%0d%0aEvil",
    "/rollouts/r1/v1/models/../../pause",
])  # fmt: skip
async def test_a_model_name_reaches_no_other_route_of_the_engine(api, engine, path):
    """Dot segments and control characters, encoded or not, are 404 without a request to the engine."""
    await engine_is_known(api)
    before = len(engine.requests)
    response = await api.raw(b"GET %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % path.encode())

    assert statuses(response) == [404]
    assert before == len(engine.requests)


@pytest.mark.parametrize("path", ["/pause", "/v1/load_lora_adapter", "/collective_rpc", "/tokenize/../pause", "//tokenize",
    "/tokenize/", "/update_weights_from_disk", "http://10.0.0.1/tokenize", "/v1/embeddings%2f..%2f..%2fpause"])  # fmt: skip
async def test_no_other_route_of_the_engine_is_reachable(api, engine, path):
    """A route that is neither recorded nor on the allow-list is 404, in any form."""
    await engine_is_known(api)
    before = len(engine.requests)
    response = await api.raw(request(path=path))

    assert statuses(response) in ([404], [400])
    assert before == len(engine.requests)


async def engine_is_known(api):
    """After one call, the proxy sends the engine no requests of its own."""
    assert statuses(await api.raw(request())) == [200]


def _ascii(value):
    import json

    return json.dumps(value).encode()
