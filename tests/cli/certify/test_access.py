"""Access to an engine: limits of requests, and a proxy that acts nowhere else and leaves nothing."""

import asyncio
import tempfile

import aiohttp
import pytest
from aiohttp import web

from proxy.cli.certify import access
from proxy.cli.certify.access import Answer, Client, Unanswered, access_to, certified_settings
from proxy.config.settings import load

MODELS = {"data": [{"id": "m"}]}


@pytest.fixture
async def client(engine, http):
    return Client(http, engine.url, "the engine", asyncio.get_running_loop().time() + 50)


async def test_a_response_is_read_completely(engine, client):
    """With status, type and message, of GET and POST."""

    async def respond(request, body):
        return web.json_response({"error": {"message": f"{request.method} {body.get('a')}"}}, status=418)

    engine.respond = respond
    answer = await client.post("/v1/chat/completions", {"a": 1})

    assert (answer.status, answer.content_type, answer.message) == (418, "application/json", "POST 1")
    assert (await client.get("/v1/x")).message == "GET None"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "a"}}', "a"),
        (b'{"message": "a", "code": 1}', "a"),
        (b'{"detail": "a"}', "a"),
        (b"<html>", "<html>"),
        (b"[1]", "[1]"),
        (b'{"error": {"message": {"error": {"message": 1}}}}', "{'message': 1}"),
        (b"x" * 1000, "x" * 200),
    ],
)
def test_the_message_of_an_error_is_read_from_any_body(body, message):
    assert message == Answer(400, "", body).message


async def test_a_response_that_is_too_large_or_too_slow_is_no_answer(engine, client, monkeypatch):
    monkeypatch.setattr(access, "MAX_BYTES", 100)
    monkeypatch.setattr(access, "CALL_TIMEOUT_S", 0.2)
    engine.streams([b"x" * 80, b"x" * 80], then="hang")
    with pytest.raises(Unanswered, match="sends more than") as large:
        await client.post("/v1/chat/completions", {})
    engine.streams([b"x" * 80], then="hang")
    with pytest.raises(Unanswered, match="did not answer /v1/chat/completions within") as slow:
        await client.post("/v1/chat/completions", {})

    assert (large.value.is_slow, slow.value.is_slow) == (False, True)


async def test_a_stream_is_left_after_some_events(engine, client):
    """What follows is not awaited."""
    engine.streams([b"data: 1\n\n", b"data: 2\n\n", b"data: 3\n\n"], then="hang")
    answer = await client.post("/v1/chat/completions", {}, events=2)
    await asyncio.wait_for(engine.aborted.wait(), 50)

    assert answer.body.startswith(b"data: 1\n\ndata: 2\n\n")


async def test_a_redirect_is_not_followed(engine, client):
    """It would carry the key to another server."""

    async def respond(request, body):
        return web.Response(status=302, headers={"Location": "http://127.0.0.1:1/"})

    engine.respond = respond

    assert (await client.get("/v1/models")).status == 302


async def test_a_broken_or_missing_connection_is_no_answer(engine, client, http):
    engine.streams([b"data: 1\n\n"], then="die")
    with pytest.raises(Unanswered, match="did not answer"):
        await client.post("/v1/chat/completions", {})
    with pytest.raises(Unanswered, match="did not answer"):
        await Client(http, "http://127.0.0.1:1", "x", asyncio.get_running_loop().time() + 50).get("/")


def test_the_proxy_acts_nowhere_but_at_the_engine(tmp_path):
    """Of the user's settings it has what affects calls: the engine's own, recording, continuation and dialects."""
    theirs = load(
        agents={"api_keys": ["k"]},
        control={"api_keys": ["c"], "listen": "0.0.0.0:9"},
        archive={"url": "s3://bucket"},
        engines={"endpoints": [{"url": "http://e:1", "logprobs_mode": "raw_logits"}, {"url": "http://f:1"}]},
        record={"streaming": "live"},
        sampling={"override": {"temperature": 0}},
        audit={"sample_rate": 1},
        tracing={"endpoint": "http://t:1"},
        store={"url": "redis://s"},
    )
    used = certified_settings(theirs, "http://e:1/v1", "a-key", tmp_path)
    (endpoint,) = used.engines.endpoints

    assert (endpoint.logprobs_mode, endpoint.api_key.get_secret_value()) == ("raw_logits", "a-key")
    assert (used.record.streaming, used.listen) == ("live", "127.0.0.1:0")
    assert used.store.url == f"embedded:{tmp_path / 'store'}"
    default = load(agents={"max_resumes": 0})  # an aborted call shows what the engine does
    for name in ("agents", "control", "archive", "sampling", "audit", "tracing", "policies", "groups"):
        assert getattr(default, name) == getattr(used, name)


async def test_the_proxy_and_its_store_are_removed(engine, tmp_path_factory, monkeypatch):
    """Also after an error; before the engine answers, nothing is started."""
    folder = tmp_path_factory.mktemp("t")  # a short path, because a Unix socket is in it
    monkeypatch.setattr(tempfile, "tempdir", str(folder))

    async def respond(request, body):
        return web.json_response(MODELS)

    engine.respond = respond
    with pytest.raises(KeyError):
        async with access_to(load(), engine.url, None, 50) as both:
            assert (await both.proxy.get("/health")).status == 200
            assert [*folder.glob("tokentape-certify-*/store")]
            raise KeyError
    with pytest.raises(Unanswered):
        async with access_to(load(), "http://127.0.0.1:1", None, 50):
            pass

    assert [*folder.iterdir()] == []
    with pytest.raises(aiohttp.ClientError):
        async with aiohttp.ClientSession() as http, http.get(both.proxy.root):
            pass


async def test_the_key_is_sent_to_the_engine_alone(engine):
    async def respond(request, body):
        return web.json_response(MODELS)

    engine.respond = respond
    async with access_to(load(), engine.url, "a-key", 50) as both:
        await both.engine.post("/v1/chat/completions", {})

    assert {headers["authorization"] for headers in engine.headers} == {"Bearer a-key"}
