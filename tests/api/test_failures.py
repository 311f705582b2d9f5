"""Error responses: they have the API's shape and contain nothing about the installation."""

import logging
import socket

import pytest
from tests.support.fakes import proxying, settings_for

from proxy.api.failures import internal_error
from proxy.errors import BadRequest, EngineDisconnected, EngineUnreachable, InternalError, StoreUnavailable
from proxy.server.listener import running
from storage.errors import StoreUnreachable

CHAT = "/rollouts/r1/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
PATHS = [
    "/v1/chat/completions",
    CHAT,
    "/v1/messages",
    "/v1/responses",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/models",
]


@pytest.fixture
def logged(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("tokentape"), "propagate", True)
    return caplog


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["", "the-name"])
async def test_an_error_for_agents_does_not_contain_the_engines_address(store, http, logged, path, name):
    """The response has neither the address nor the name of an unreachable engine; the log has both, with the response's
    ID.
    """
    port = free_port()
    engines = {"endpoints": [{"url": f"http://127.0.0.1:{port}", "name": name, "kind": "vllm"}]}
    async with running(settings_for(None, engines=engines), store) as served:
        sent = {"model": "m", "input": "x"} if path == "/v1/responses" else {**BODY, "prompt": "x"}
        method, body = ("GET", None) if path == "/v1/models" else ("POST", sent)
        async with http.request(method, served.url + path, json=body) as response:
            text, step_id = await response.text(), response.headers.get("X-Step-Id")

    assert response.status == 503
    assert "is unreachable" in text
    assert not [word for word in (str(port), "127.0.0.1", "the-name", "Connect", "Errno") if word in text]
    fields = [getattr(record, "fields", {}) for record in logged.records if str(port) in record.getMessage()]
    ids = [entry.get("step_id") or entry.get("error_id") for entry in fields]
    assert any(entry_id and entry_id in text for entry_id in ids)
    assert step_id is None or step_id in ids


async def test_an_error_for_agents_does_not_contain_the_stores_address(store, engine, http, logged, monkeypatch):
    """The control API returns it to operators; nothing is sent to the engine."""
    monkeypatch.setattr(
        "tests.support.fakes.StoreUnreachable", lambda *_: StoreUnreachable("cannot connect to /run/secret.sock")
    )
    async with proxying(engine.url, store) as served:
        store.failing = {"open", "get_all"}
        async with http.post(served.url + CHAT, json=BODY) as agents, http.get(served.url + "/rollouts") as operators:
            for_agents, for_operators = await agents.text(), await operators.text()

    assert (agents.status, operators.status, agents.headers["Retry-After"]) == (503, 503, "1")
    assert engine.requests == []
    assert "secret.sock" not in for_agents
    assert "secret.sock" in for_operators
    error_id = for_agents.partition("error id ")[2].partition(")")[0]
    assert any(
        error_id in str(getattr(record, "fields", "")) and "secret.sock" in record.getMessage()
        for record in logged.records
    )


def test_an_internal_error_is_logged_under_its_id_with_its_traceback(logged):
    """The response does not contain the traceback."""
    try:
        raise ZeroDivisionError("at /srv/secret")
    except ZeroDivisionError as failure:
        error = internal_error(failure, step_id="s1")

    (record,) = logged.records
    assert isinstance(error, InternalError)
    assert (error.status, error.code) == (500, "internal_error")
    assert record.fields["error_id"] in error.message
    assert record.fields["step_id"] == "s1"
    assert "secret" not in error.message
    assert record.exc_info[1].args == ("at /srv/secret",)


@pytest.mark.parametrize(
    "error", [EngineUnreachable("http://10.0.0.1"), EngineDisconnected("10.0.0.1"), StoreUnavailable("10.0.0.1")]
)
def test_the_message_of_an_infrastructure_error_is_replaced_for_agents(error):
    """It has the sentence of its class and a reference; status, code and Retry-After are unchanged."""
    shown = error.for_agents("step s1")

    assert "10.0.0.1" not in shown.message
    assert "step s1" in shown.message
    assert (error.status, error.code, error.retry_after_s) == (shown.status, shown.code, shown.retry_after_s)
    assert EngineUnreachable("10.0.0.1", public="kept").for_agents("r").message == "kept (r)."


def test_the_message_of_a_request_error_is_unchanged_for_agents():
    error = BadRequest("the body is empty")

    assert error is error.for_agents("x")
