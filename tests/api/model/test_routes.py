"""Routes of the model API."""

import aiohttp
import pytest
from tests.support.session import session_with


@pytest.fixture
async def session(engine, store):
    async with session_with(engine, store) as session:
        yield session


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health", 200),
        ("GET", "/rollouts/r1/health", 200),
        ("GET", "/v1/chat/completions", 404),
        ("GET", "/v1/messages/count_tokens", 404),
        ("POST", "/v1/models", 404),
        ("POST", "/v1/unknown", 404),
        ("POST", "/v1/audio/speech", 404),
        ("POST", "/v1/realtime", 404),
        ("POST", "/nothing", 404),
        ("POST", "/rollouts/r1/v1/images", 404),
        ("GET", "/v1/responses/none", 404),
    ],
)
async def test_a_wrong_method_or_an_unknown_path_is_404(engine, session, method, path, status):
    """Nothing reaches the engine that is neither recorded nor listed in `engines.passthrough`."""
    response = await session.call(method, path, json={})

    assert status == response.status
    assert status == 200 or response.json["error"]["type"] == "not_found_error"
    assert engine.requests == []


async def test_the_error_of_a_wrong_method_names_the_right_one(session):
    assert "POST" in (await session.get("/v1/chat/completions")).json["error"]["message"]


@pytest.mark.parametrize(
    ("endpoint", "fields"),
    [
        ("/v1/chat/completions", {"message", "type", "param", "code"}),
        ("/v1/messages", {"type", "message"}),
        ("/v1/responses", {"message", "type", "param", "code"}),
        ("/v1beta/models/m:generateContent", {"code", "message", "status"}),
    ],
)
async def test_the_error_of_an_invalid_rollout_id_has_the_dialects_format(engine, session, endpoint, fields):
    response = await session.post(f"/rollouts/a%00b{endpoint}", {})
    error = response.json["error"]

    assert response.status == 400
    assert fields == error.keys() - {"details"}
    assert "rollout id" in error["message"]
    assert engine.requests == []


@pytest.mark.parametrize("path", ["/v1/responses", "/rollouts/r1/v1/responses"])
async def test_a_websocket_is_refused_so_that_the_client_uses_http(engine, session, path):
    """Codex tries a WebSocket first; after any other status it tries five times more."""
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await session.http.ws_connect(session.url + path)

    assert (refused.value.status, refused.value.headers["Upgrade"]) == (426, "HTTP/1.1")
    assert engine.requests == []
