"""What clients read of failures: the shape of their API, and nothing of the installation."""

import logging
import socket

import pytest
from fakes import proxying, settings_for

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
async def test_agents_do_not_learn_where_an_engine_is(store, http, logged, path, name):
    """It cannot be reached: the answer has neither its address nor its name; the log has it, under the answer's id."""
    port = free_port()
    engines = {"endpoints": [{"url": f"http://127.0.0.1:{port}", "name": name, "kind": "vllm"}]}
    async with running(settings_for(None, engines=engines), store) as served:
        sent = {"model": "m", "input": "x"} if path == "/v1/responses" else {**BODY, "prompt": "x"}
        method, body = ("GET", None) if path == "/v1/models" else ("POST", sent)
        async with http.request(method, served.url + path, json=body) as response:
            text, step_id = await response.text(), response.headers.get("X-Step-Id")

    assert 503 == response.status
    assert "is unreachable" in text
    assert not [word for word in (str(port), "127.0.0.1", "the-name", "Connect", "Errno") if word in text]
    fields = [getattr(one, "fields", {}) for one in logged.records if str(port) in one.getMessage()]
    ids = [one.get("step_id") or one.get("error_id") for one in fields]
    assert any(one and one in text for one in ids)
    assert step_id is None or step_id in ids


async def test_agents_do_not_learn_where_the_store_is(store, engine, http, logged, monkeypatch):
    """The control API does: whoever operates the proxy reads it there."""
    monkeypatch.setattr("fakes.StoreUnreachable", lambda _: StoreUnreachable("cannot connect to /run/secret.sock"))
    async with proxying(engine.url, store) as served:
        store.failing = {"open", "get", "list"}
        async with http.post(served.url + CHAT, json=BODY) as agents, http.get(served.url + "/rollouts") as operators:
            seen, known = await agents.text(), await operators.text()

    assert (503, 503) == (agents.status, operators.status)
    assert "secret.sock" not in seen
    assert "secret.sock" in known
    error_id = seen.partition("error id ")[2].partition(")")[0]
    assert any(
        error_id in str(getattr(one, "fields", "")) and "secret.sock" in one.getMessage() for one in logged.records
    )


def test_an_internal_error_has_an_id_that_the_log_has_too(logged):
    """With the traceback, which the answer has not."""
    try:
        raise ZeroDivisionError("at /srv/secret")
    except ZeroDivisionError as failure:
        error = internal_error(failure, step_id="s1")

    (record,) = logged.records
    assert isinstance(error, InternalError)
    assert (500, "internal_error") == (error.status, error.code)
    assert record.fields["error_id"] in error.message
    assert "s1" == record.fields["step_id"]
    assert "secret" not in error.message
    assert record.exc_info[1].args == ("at /srv/secret",)


@pytest.mark.parametrize(
    "error", [EngineUnreachable("http://10.0.0.1"), EngineDisconnected("10.0.0.1"), StoreUnavailable("10.0.0.1")]
)
def test_what_is_not_for_agents_is_replaced(error):
    """By a sentence of its class and a reference; its status, code and Retry-After stay."""
    shown = error.for_agents("step s1")

    assert "10.0.0.1" not in shown.message
    assert "step s1" in shown.message
    assert (error.status, error.code, error.retry_after_s) == (shown.status, shown.code, shown.retry_after_s)
    assert "kept (r)." == EngineUnreachable("10.0.0.1", public="kept").for_agents("r").message


def test_an_agents_own_mistake_is_said_as_it_is():
    """It can mend what it is told of."""
    error = BadRequest("the body is empty")

    assert error is error.for_agents("x")
