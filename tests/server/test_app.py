"""The composition root: failures become answers, in the shape of the API that was called."""

import logging

import aiohttp
from fakes import fake_engine, proxying


async def test_a_store_that_is_away_is_503_before_anything_is_sent(store):
    """A call that could not be recorded is not made."""
    async with fake_engine() as engine, proxying(engine.url, store) as served, aiohttp.ClientSession() as http:
        store.failing = {"open", "get", "list"}
        async with http.post(served.url + "/v1/chat/completions", json={"messages": []}) as model:
            told = await model.json()
        async with http.get(served.url + "/rollouts") as control:
            pass

    assert (503, "store_unavailable", "1") == (model.status, told["error"]["type"], model.headers["Retry-After"])
    assert (503, []) == (control.status, engine.requests)


async def test_a_failure_nobody_named_is_500_and_logged(store, caplog, monkeypatch):
    """The client learns that it was ours; the log says how."""
    monkeypatch.setattr(logging.getLogger("tokentape"), "propagate", True)

    def broken(*args, **named):
        raise ZeroDivisionError("oops")

    async with fake_engine() as engine, proxying(engine.url, store) as served, aiohttp.ClientSession() as http:
        monkeypatch.setattr("proxy.api.model.calls.make_plan", broken)
        async with http.post(served.url + "/v1/chat/completions", json={"messages": []}) as response:
            told = await response.json()

    assert (500, "internal_error") == (response.status, told["error"]["code"])
    assert "oops" not in told["error"]["message"]
    assert "oops" in caplog.text


async def test_the_secret_of_minted_keys_is_the_stores(store):
    """Two processes over one store prove each other's keys."""
    async with fake_engine() as engine, proxying(engine.url, store) as one, proxying(engine.url, store) as two:
        async with (
            aiohttp.ClientSession() as http,
            http.post(one.url + "/rollouts", json={"rollout_id": "r1"}) as opened,
        ):
            first = (await opened.json())["api_key"]
        async with (
            aiohttp.ClientSession() as http,
            http.post(two.url + "/rollouts", json={"rollout_id": "r1"}) as again,
        ):
            second = (await again.json())["api_key"]

    assert first == second
