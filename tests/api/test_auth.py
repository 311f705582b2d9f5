"""Who may call models."""

import orjson
import pytest
from fakes import proxying
from recorded import load

from proxy.api.api_keys import mint

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(autouse=True)
def answered(engine):
    """The engine has an answer to everything."""
    engine.plays(load("chat_ids_lp"))


async def post(http, url, **named):
    async with http.post(url, **named) as response:
        return response, orjson.loads(await response.read())


async def test_with_keys_configured_a_call_needs_one(store, engine, http):
    """401 without, with a wrong one, and with the name of a rollout, which proves nothing."""
    async with proxying(engine.url, store, agents={"api_keys": ["good"]}) as served:
        url = served.url + "/rollouts/r1/v1/chat/completions"
        statuses = [
            (await post(http, url, json=BODY, headers={"Authorization": f"Bearer {key}"} if key else {}))[0].status
            for key in ("", "bad", "rollout:r1", "good")
        ]

    assert [401, 401, 401, 200] == statuses


async def test_a_minted_key_names_its_rollout_and_opens_no_other(store, engine, http):
    """It is good for its own rollout, 403 for another, 401 once that is deleted."""
    stored = await store.open("r1", {}, now_ms=1)
    secret = await store.set_once("minting-secret", b"s" * 32)
    headers = {"Authorization": f"Bearer {mint('r1', stored.incarnation, secret)}"}
    async with proxying(engine.url, store, agents={"api_keys": ["good"]}) as served:
        own, _ = await post(http, served.url + "/v1/chat/completions", json=BODY, headers=headers)
        other, _ = await post(http, served.url + "/rollouts/r2/v1/chat/completions", json=BODY, headers=headers)
        body, _ = await post(
            http, served.url + "/v1/chat/completions", json=BODY, headers=headers | {"X-Rollout-Id": "r2"}
        )
        await store.delete("r1")
        gone, _ = await post(http, served.url + "/v1/chat/completions", json=BODY, headers=headers)

    assert (200, "r1") == (own.status, own.headers["X-Rollout-Id"])
    assert [403, 403, 401] == [other.status, body.status, gone.status]
    assert await store.get("r2") is None
