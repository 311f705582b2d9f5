"""Secrets are configured in every possible place, and searched for in all output."""

import asyncio
import io
import logging
from contextlib import suppress

import aiohttp
import orjson
import pytest
from tests.support.fakes import settings_for
from tests.support.recorded import load
from tests.support.rollout_servers import QUESTION, rollout_server
from tests.support.stored import stored_steps

from proxy.export import FORMATS
from proxy.server.listener import running
from proxy.telemetry.logs import LOG, WIRE_LOG, JsonLines, TextLines

WHOLE = load("chat_ids_lp")
CONTROL, AGENT, ENGINE, SERVER, STORE = (
    f"planted-{owner}" for owner in ("control", "agent", "engine", "server", "store")
)
HEADERS = {
    name: f"planted-{name.lower()}"
    for name in (
        "X-Api-Key", "Api-Key", "Proxy-Authorization", "Cookie", "X-Auth-Token", "X-Amz-Security-Token", "OpenAI-Organization",
        "X-Forwarded-For", "X-Session-Id", "X-Request-Id", "User-Agent", "Referer", "Origin", "From", "Idempotency-Key",
        "X-Anything-Else", "Accept-Language", "Baggage", "Traceparent",
    )
}  # fmt: skip
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
SETTINGS_WITH_SECRETS = {
    "agents": {"api_keys": [AGENT]},
    "control": {"api_keys": [CONTROL]},
    "atropos": {"enabled": True},
    "store": {"password": STORE},
}


@pytest.fixture
def logged():
    """Everything logged at every level in both formats, by TokenTape and its libraries."""
    out = io.StringIO()
    streams = []
    for form in (TextLines, JsonLines):
        streams.append(logging.StreamHandler(out))
        streams[-1].setFormatter(form())
    before = LOG.level, logging.root.level
    LOG.setLevel(logging.DEBUG)
    logging.root.setLevel(logging.DEBUG)
    for stream in streams:
        logging.root.addHandler(stream)
    yield out
    for stream in streams:
        logging.root.removeHandler(stream)
    LOG.setLevel(before[0])
    logging.root.setLevel(before[1])


@pytest.fixture
async def api(store, engine, guarded_api):
    async with rollout_server() as runner:
        runner.status, runner.response_body = 500, {"error": "no"}
        engines = {"endpoints": [{"url": engine.url, "name": "fake", "kind": "vllm", "api_key": ENGINE}]}
        osmosis = {"servers": {"runner": {"url": runner.url, "api_key": SERVER}}}
        async with running(
            settings_for(None, engines=engines, osmosis=osmosis, **SETTINGS_WITH_SECRETS), store
        ) as served:
            yield guarded_api(served.url)


async def seen(api, engine, store):
    """All output: of calls that succeed or fail in every known way, and of the routes that report them."""
    out = []
    minted = (await api.call("POST", "/rollouts", CONTROL, json={"rollout_id": "r1"})).json["api_key"]

    async def send(method, path, key=AGENT, **named):
        response = await api.call(method, path, key, headers=HEADERS | named.pop("headers", {}), **named)
        out.extend([response.text, repr(response.headers).encode()])

    endpoint = {"url": engine.url, "name": "fake", "kind": "vllm", "api_key": ENGINE}
    await send("PUT", "/engines", CONTROL, json={"endpoints": [endpoint]})
    for wrong in (
        {"kind": "x"},
        {"url": "ftp://me:planted-a@x"},
        {"url": "http://me:planted-b@x"},
        {"api_key": ["planted-c"]},
    ):
        await send("PUT", "/engines", CONTROL, json={"endpoints": [endpoint | wrong]})
    await send("PUT", "/engines", CONTROL, json={"endpoints": [endpoint, endpoint]})
    chat = "/rollouts/r1/v1/chat/completions"
    engine.plays(WHOLE)
    for key in (AGENT, minted, "planted-wrong", None):
        await send("POST", chat, key, json=CHAT, headers={"Idempotency-Key": f"planted-{key}"})
        await send("POST", chat, key, data=b"{")
        await send("GET", "/v1/nowhere", key)
        await send("GET", "/rollouts/r1", key)
    engine.hangs()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(send("POST", chat, json=CHAT | {"n": 1}, headers={"Idempotency-Key": "planted-1"}), 0.1)
    engine.streams([b"data: nonsense\n\n"], then="die")
    with suppress(aiohttp.ClientPayloadError):
        await send("POST", chat, json=CHAT | {"stream": True}, headers={"Idempotency-Key": "planted-2"})
    with suppress(aiohttp.ClientPayloadError):
        await send("POST", chat, json=CHAT, headers={"Idempotency-Key": "planted-3"})
    await send("POST", "/rollouts/r1/dispatch", CONTROL, json={"server": "runner", "messages": QUESTION, "wait": True})
    for line in (b"Authorization Bearer planted-line", b"X-Api-Key: planted-\x00", b"Authorization: Bearer planted\nX"):
        await api.raw(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n%s\r\n\r\n" % line)
    paths = ("/metrics", "/engines", "/ready", "/rollouts", "/rollouts/r1", "/rollouts/r1/steps", "/rollouts/r1/tree")
    for path in (*paths, *(f"/rollouts/r1/export?format={name}&report=true" for name in FORMATS)):
        response = await api.call("GET", path, CONTROL)
        out.append(response.text)
    out += [repr(step).encode() for step in await stored_steps(store, "r1")]
    return out, minted


async def test_no_output_contains_a_secret(api, engine, store, logged):
    """Not logs, responses, metrics, errors, stored steps or exports, whether calls succeed or fail."""
    out, minted = await seen(api, engine, store)

    assert len(await stored_steps(store, "r1")) >= 2
    assert "call" in logged.getvalue()
    assert "Malformed request" in logged.getvalue()
    for output in [*out, logged.getvalue().encode()]:
        found = output.find(b"planted-")
        assert found < 0, output[max(0, found - 300) : found + 60]
        assert minted.encode() not in output


async def test_the_engine_gets_its_key_and_a_server_its_own(api, engine, store):
    """Each secret is used where it belongs, so the test above searches for values that exist."""
    engine.plays(WHOLE)
    await api.call("POST", "/rollouts/r1/v1/chat/completions", AGENT, json=CHAT)

    assert engine.headers[-1]["authorization"] == f"Bearer {ENGINE}"


def test_a_malformed_request_is_logged_without_its_bytes(logged):
    """aiohttp's own message quotes the malformed line."""
    from aiohttp.http_exceptions import BadHttpMessage

    WIRE_LOG.error(
        "Error handling request from %s", "x", exc_info=BadHttpMessage("b'Authorization Bearer planted-line'")
    )

    assert "planted" not in logged.getvalue()
    assert logged.getvalue().count("Malformed request") == 2


async def test_settings_show_no_secret():
    """Printed, dumped or in an error, they show that a secret is set, but not its value."""
    settings = settings_for(
        "http://e", **{**SETTINGS_WITH_SECRETS, "osmosis": {"servers": {"s": {"url": "http://s", "api_key": SERVER}}}}
    )

    assert "planted" not in repr(settings) + str(settings) + orjson.dumps(settings.model_dump(mode="json")).decode()
