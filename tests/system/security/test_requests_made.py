"""The proxy calls only configured servers, for any content of a request."""

import asyncio

import pytest
from aiohttp import web
from tests.support.fakes import proxying
from tests.support.recorded import load
from tests.support.stored import stored_steps

from proxy.api.openapi import ROUTES

WHOLE = load("chat_ids_lp")
NAMES = (
    "base_url", "url", "server_url", "tool_server_url", "callback_url", "webhook", "image_url", "endpoint", "api_base",
    "engine", "server", "service", "lora_path", "model_name",
)  # fmt: skip


@pytest.fixture
async def trap():
    """Yield the address of a server, and an event that is set if it is called."""
    called = asyncio.Event()

    async def respond(reader, writer):
        called.set()
        writer.close()

    server = await asyncio.start_server(respond, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", called
    server.close()
    await server.wait_closed()


async def test_no_url_of_a_request_is_fetched(store, engine, guarded_api, trap):
    """In any field of a body, in the query, in a header, on every route: the proxy calls only its own engine."""
    url, called = trap
    engine.plays(WHOLE)
    body = dict.fromkeys(NAMES, url) | {"rollout_id": "r1", "servers": [{"base_url": url, "server_type": "vllm"}]}
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": url}]
    chat = {"messages": [{"role": "user", "content": content}], "prompt": url, "metadata": body}
    headers = dict.fromkeys(("X-Forwarded-Host", "X-Original-URL", "X-Upstream", "Forwarded", "Referer"), url)
    async with proxying(engine.url, store, atropos={"enabled": True}) as served:
        api = guarded_api(served.url)
        for route in ROUTES:
            path = route.path.replace("{", "").replace("}", "") + f"?url={url}&base_url={url}"
            for payload in (body, chat, body | chat, {"server": url, "messages": chat["messages"]}, {"base_url": url}):
                response = await api.call(route.method, path, headers=headers, json=payload)
                assert response.status != 500 or "sessions/create" in path or path.startswith("/setup"), (
                    path,
                    response.text,
                )
        await api.raw(f"GET {url}/v1/models HTTP/1.1\r\nHost: {url[7:]}\r\nConnection: close\r\n\r\n".encode())

    assert not called.is_set()
    assert engine.requests


@pytest.mark.parametrize("status", [300, 301, 302, 303, 305, 307, 308])
async def test_a_redirect_of_the_engine_is_not_followed(store, engine, guarded_api, trap, status):
    """Neither by TokenTape nor by the client, which gets 502 without the address; the step has the error."""
    url, called = trap

    async def respond(request, body):
        return web.Response(status=status, headers={"Location": url})

    engine.respond = respond
    async with proxying(engine.url, store) as served:
        api = guarded_api(served.url)
        path, chat = "/rollouts/r1/v1/chat/completions", {"messages": []}
        answers = [
            await api.call(method, path, json=body, allow_redirects=False)
            for method, path, body in (
                ("POST", path, chat),
                (
                    "POST",
                    "/rollouts/r1/v1/messages",
                    {"max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]},
                ),
                ("POST", "/tokenize", {}),
                ("GET", "/v1/models", None),
                ("GET", "/v1beta/models", None),
            )
        ]
    steps = await stored_steps(store, "r1")

    assert [answer.status for answer in answers] == [502] * 5
    assert not [answer for answer in answers if url in answer.text.decode() or "Location" in answer.headers]
    assert {answers[index].json["error"]["code"] for index in (0, 2, 3)} == {"engine_disconnected"}
    assert [answers[1].json["type"], steps[0].status] == ["error", "error"]
    assert not called.is_set()
