"""Authentication of calls."""

import orjson
import pytest
from tests.support.fakes import proxying
from tests.support.recorded import load

from proxy.api.api_keys import mint
from proxy.api.auth import bearer

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(autouse=True)
def cassette(engine):
    """The engine responds to all requests with one completion."""
    engine.plays(load("chat_ids_lp"))


async def post(http, url, **named):
    async with http.post(url, **named) as response:
        return response, orjson.loads(await response.read())


async def test_with_configured_keys_a_call_requires_one_of_them(store, engine, http):
    """A missing key, a wrong key and a rollout's name as the key are 401."""
    async with proxying(engine.url, store, agents={"api_keys": ["good"]}, control={"api_keys": ["boss"]}) as served:
        url = served.url + "/rollouts/r1/v1/chat/completions"
        statuses = [
            (await post(http, url, json=BODY, headers={"Authorization": f"Bearer {key}"} if key else {}))[0].status
            for key in ("", "bad", "rollout:r1", "good")
        ]

    assert statuses == [401, 401, 401, 200]


async def test_a_minted_key_names_its_rollout_and_is_rejected_for_others(store, engine, http):
    """For another rollout it is 403; after its rollout is deleted, 401."""
    stored = await store.open("r1", {}, now_ms=1)
    secret = await store.set_once("minting-secret", b"s" * 32)
    headers = {"Authorization": f"Bearer {mint('r1', stored.incarnation, secret)}"}
    async with proxying(engine.url, store, agents={"api_keys": ["good"]}, control={"api_keys": ["boss"]}) as served:
        own, _ = await post(http, served.url + "/v1/chat/completions", json=BODY, headers=headers)
        other, _ = await post(http, served.url + "/rollouts/r2/v1/chat/completions", json=BODY, headers=headers)
        body, _ = await post(
            http, served.url + "/v1/chat/completions", json=BODY, headers=headers | {"X-Rollout-Id": "r2"}
        )
        await store.delete("r1")
        deleted, _ = await post(http, served.url + "/v1/chat/completions", json=BODY, headers=headers)

    assert (own.status, own.headers["X-Rollout-Id"]) == (200, "r1")
    assert [other.status, body.status, deleted.status] == [403, 403, 401]
    assert await store.get("r2") is None


def test_a_bearer_key_is_read_from_the_authorization_header():
    """The scheme is case-insensitive; other schemes are ignored."""
    assert [bearer(text) for text in ("Bearer k", "bearer  k", "Basic k", "Bearer", None)] == [
        "k",
        "k",
        None,
        None,
        None,
    ]
