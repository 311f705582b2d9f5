"""Headers, paths and queries of any bytes: a response, and never a 500."""

import re

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.fakes import settings_for
from tests.support.recorded import load

from proxy.server.listener import running

WHOLE = load("chat_ids_lp")
CONTENTS = [{"role": "user", "parts": [{"text": "hi"}]}]
CHAT = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "contents": CONTENTS})
ODD = [
    b"\xff", b"\xed\xa0\x80", b"\xc0\x80", b"a\xffb", b"\xf0\x9f", "\N{GRINNING FACE}".encode(), b"9" * 5000, b"a\tb",
    b"%ff", b"{}",
]  # fmt: skip
HEADERS = [
    "Idempotency-Key", "X-Stainless-Retry-Count", "X-Rollout-Id", "X-Rollout-Group", "X-Rollout-Continuation", "X-Request-Id",
    "Authorization", "X-Api-Key", "Accept", "User-Agent", "anthropic-version", "anthropic-beta", "X-Reply-Tokens",
    "X-Reply-Ids", "Traceparent", "Content-Type", "Content-Encoding", "Cookie", "Origin", "Host",
    "X-Anything", "Accept-Encoding", "X-Goog-Api-Key",
]  # fmt: skip
PATHS = [
    "/v1/chat/completions", "/rollouts/r1/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/models",
    "/v1/models/alias", "/v1/embeddings", "/v1/messages/count_tokens", "/rollouts", "/rollouts/r1", "/groups", "/export",
    "/health", "/nowhere", "/v1beta/models", "/v1beta/models/m:generateContent", "/rollouts/r1/v1beta/models/m:generateContent",
]  # fmt: skip
POSTED = (b"completions", b"messages", b"responses", b"embeddings", b"count_tokens", b"m:generateContent")


@pytest.fixture
async def api(store, engine, guarded_api):
    engine.plays(WHOLE)
    sections = {"models": {"alias": "m"}, "atropos": {"enabled": True}}
    async with running(settings_for(engine.url, **sections), store) as served:
        yield guarded_api(served.url)


def sent(path: bytes, *lines: bytes) -> bytes:
    """Send a request as bytes, with POST where the path accepts it."""
    body = CHAT if path.partition(b"?")[0].rpartition(b"/")[2] in POSTED else b""
    line = b"%s %s HTTP/1.1" % (b"POST" if body else b"GET", path)
    head = (line, b"Host: localhost", b"Connection: close", b"Content-Length: %d" % len(body))
    return b"\r\n".join((*head, *lines)) + b"\r\n\r\n" + body


def check(response: bytes, sent: bytes) -> None:
    """Assert that there is no 500 except for the engine's failures, and that errors are JSON."""
    head, _, body = response.partition(b"\r\n\r\n")
    status = int(re.match(rb"HTTP/1\.[01] (\d{3}) ", head)[1])
    assert status < 500 or status == 502, (response[:500], sent[:200])
    if status >= 400 and b"application/json" in head:
        assert isinstance(orjson.loads(body), dict)
    assert status < 400 or b"application/json" in head, response[:500]


@pytest.mark.parametrize("header", HEADERS)
async def test_a_header_of_any_bytes_is_accepted_or_rejected(api, header):
    """On every path: 4xx in JSON, or a response."""
    for path in PATHS:
        for value in ODD[:5]:
            request = sent(path.encode(), header.encode() + b": " + value)
            check(await api.raw(request), request)


async def test_an_idempotency_key_of_any_bytes_is_a_key(api, engine, store):
    """Equal bytes are the same key, other bytes another key."""
    responses = [
        await api.raw(sent(b"/rollouts/r1/v1/chat/completions", b"Idempotency-Key: " + key))
        for key in (b"\xff", b"\xff", b"\xfe")
    ]

    assert [response[9:12] for response in responses] == [b"200"] * 3
    assert [b"X-Idempotent-Replayed" in response for response in responses] == [False, True, False]
    assert len(engine.requests) == 2


@pytest.mark.parametrize(
    "odd",
    [*ODD[:7], b"%ff", b"%ed%a0%80", b"%00", b"%2e%2e", b"%", b"a%zz", b"%09", b"%F0%9F"],
    ids=lambda odd: repr(odd[:20]),
)
async def test_a_path_or_query_of_any_bytes_is_accepted_or_rejected(api, odd):
    """As IDs, names of models and responses, options and cursors."""
    paths = [
        b"/%s", b"/rollouts/%s", b"/rollouts/%s/steps", b"/rollouts/%s/v1/chat/completions", b"/v1/models/%s",
        b"/sessions/%s/v1/chat/completions", b"/v1/responses/%s", b"/groups/%s", b"/rollouts/r1/steps/%s",
        b"/rollouts?cursor=%s", b"/rollouts?%s=1", b"/rollouts?group_id=%s", b"/groups?status=%s", b"/v1/models?%s",
        b"/rollouts/r1/export?format=%s", b"/ui/%s", b"/v1/embeddings?%s", b"/%s/v1/chat/completions", b"/export?since=%s",
        b"/policies/%s", b"/batches/%s", b"/rollouts/r1/tree?%s", b"/events?group_id=%s&x=%s",
    ]  # fmt: skip
    for path in paths:
        request = sent(path.replace(b"%s", odd))
        check(await api.raw(request), request)


@given(
    value=st.binary(min_size=1, max_size=20).filter(lambda value: not set(value) & {0, 10, 13}),
    header=st.sampled_from(HEADERS),
)
async def test_random_headers_are_accepted_or_rejected(api, value, header):
    """Drawn by hypothesis."""
    request = sent(b"/rollouts/r1/v1/chat/completions", header.encode() + b": " + value)
    check(await api.raw(request), request)
