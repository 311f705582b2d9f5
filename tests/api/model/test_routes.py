"""Routes of the model API."""

import aiohttp
import pytest
from tests.support.fakes import proxying


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health", 200),
        ("GET", "/rollouts/r1/health", 200),
        ("GET", "/v1/chat/completions", 404),
        ("GET", "/v1/messages/count_tokens", 404),
        ("POST", "/v1/models", 404),
        ("POST", "/v1/unknown", 404),
        ("GET", "/v1/responses/none", 404),
    ],
)
async def test_a_wrong_method_or_an_unknown_path_is_404(store, engine, http, method, path, status):
    """Nothing reaches the engine that is neither recorded nor listed in `engines.passthrough`."""
    async with proxying(engine.url, store) as served, http.request(method, served.url + path) as response:
        assert status == response.status
    assert [] == engine.requests


async def test_the_error_of_a_wrong_method_names_the_right_one(store, engine, http):
    async with proxying(engine.url, store) as served, http.get(f"{served.url}/v1/chat/completions") as response:
        body = await response.json()

    assert "POST" in body["error"]["message"]


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        ("/v1/chat/completions", {"message", "type", "param", "code"}),
        ("/v1/messages", {"type", "message"}),
        ("/v1/responses", {"message", "type", "param", "code"}),
        ("/v1beta/models/m:generateContent", {"code", "message", "status"}),
    ],
)
async def test_the_error_of_an_invalid_rollout_id_has_the_dialects_format(store, engine, http, endpoint, fields):
    async with (
        proxying(engine.url, store) as served,
        http.post(f"{served.url}/rollouts/a%00b{endpoint}", json={}) as response,
    ):
        error = (await response.json())["error"]

    assert 400 == response.status
    assert fields == error.keys() - {"details"}
    assert "rollout id" in error["message"]
    assert [] == engine.requests


@pytest.mark.parametrize("path", ["/v1/responses", "/rollouts/r1/v1/responses"])
async def test_a_websocket_is_refused_so_that_the_client_uses_http(store, engine, http, path):
    """Codex tries a WebSocket first; after any other status it tries five times more."""
    async with proxying(engine.url, store) as served:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await http.ws_connect(served.url + path)

    assert (426, "HTTP/1.1") == (refused.value.status, refused.value.headers["Upgrade"])
    assert [] == engine.requests
