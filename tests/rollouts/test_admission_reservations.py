"""Calls in flight count towards the limit of steps of their rollout."""

import asyncio
from collections import Counter

import pytest
from tests.support.fakes import proxying
from tests.support.recorded import load
from tests.support.stored import stored_steps, wait_for_steps

from proxy.rollouts import admission
from proxy.rollouts.rollout import write_fields

CHAT = "/rollouts/r1/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def proxy(store, engine):
    """A proxy with a limit of two steps for rollout r1."""
    await store.open("r1", write_fields({"limits": {"max_steps": 2}}), now_ms=1)
    engine.plays(load("chat_ids_lp"))
    async with proxying(engine.url, store) as served:
        yield served.url + CHAT


async def status_of(http, url, body=BODY, **headers):
    async with http.post(url, json=body, headers=headers) as response:
        await response.read()
        return response.status


async def wait_until(condition):
    async with asyncio.timeout(50):
        while not await condition():
            await asyncio.sleep(0.005)


async def test_calls_in_flight_count_towards_the_limit_of_steps(proxy, store, engine, http):
    """Of many concurrent calls, only as many reach the engine as steps remain."""
    statuses = await asyncio.gather(*(status_of(http, proxy) for _ in range(20)))

    assert Counter(statuses) == {200: 2, 429: 18}
    assert len(engine.requests) == len(await stored_steps(store, "r1")) == 2


async def test_the_error_of_the_limit_mentions_the_calls_in_flight(proxy, engine, http):
    """The rollout has no step yet."""
    engine.hangs()
    calls = [asyncio.ensure_future(status_of(http, proxy)) for _ in range(2)]

    async def both_are_there():
        return len(engine.requests) == 2

    await wait_until(both_are_there)
    async with http.post(proxy, json=BODY) as refused:
        payload = await refused.json()
    for call in calls:
        call.cancel()

    assert (refused.status, payload["error"]["type"]) == (429, "rollout_limit")
    assert "0 of 2 steps, and calls for the remaining steps are in flight" in payload["error"]["message"]


async def test_a_call_that_a_full_queue_rejects_releases_its_reservation(store, engine, http):
    """A 429 of TokenTape itself does not use up the last step of a rollout."""
    await store.open("r1", write_fields({"limits": {"max_steps": 1}}), now_ms=1)
    engine.hangs()
    engines = {"endpoints": [{"url": engine.url, "max_in_flight": 1}], "max_queued": 0}
    async with proxying(engine.url, store, engines=engines) as served:
        other = asyncio.ensure_future(status_of(http, served.url + CHAT.replace("r1", "other")))

        async def is_busy():
            return len(engine.requests) == 1

        await wait_until(is_busy)
        rejected = await status_of(http, served.url + CHAT)
        other.cancel()
        engine.plays(load("chat_ids_lp"))

        async def succeeds():
            return await status_of(http, served.url + CHAT) == 200

        await wait_until(succeeds)

    assert rejected == 429
    assert len(await stored_steps(store, "r1")) == 1


async def test_a_call_that_is_never_sent_releases_its_reservation(proxy, store, engine, http):
    """The calls are rejected before they are sent."""
    refused = [await status_of(http, proxy, **{"X-Reply-Tokens": "nonsense"}) for _ in range(5)]
    requests = len(engine.requests)

    async def both_succeed():
        return [await status_of(http, proxy) for _ in range(2)] == [200, 200]

    assert requests == 0
    assert {*refused} <= {400, 422}
    await wait_until(both_succeed)
    assert await status_of(http, proxy) == 429


async def test_the_call_of_a_disconnected_client_keeps_its_reservation(proxy, store, engine, http):
    """Its partial step counts, also before it is stored."""
    hold = store.waiting["append"] = asyncio.Event()
    engine.streams([load("chat_ids_lp_stream").response[:2000]], then="hang")
    response = await http.post(proxy, json={**BODY, "stream": True})
    await response.content.readany()
    response.close()
    await engine.aborted.wait()
    engine.plays(load("chat_ids_lp"))
    calls = [asyncio.ensure_future(status_of(http, proxy)) for _ in range(5)]
    async with asyncio.timeout(50):
        while sum(call.done() for call in calls) < 4:
            await asyncio.sleep(0.005)
    hold.set()

    assert Counter(await asyncio.gather(*calls)) == {200: 1, 429: 4}
    assert len(await wait_for_steps(store, "r1", 2)) == 2


async def test_the_lease_of_a_reservation_is_renewed_during_a_long_call(proxy, store, engine, http, monkeypatch):
    """The first lease expires immediately here."""
    monkeypatch.setattr(admission, "_RENEWAL_INTERVAL_S", 0.02)
    real, extend, renewed = store.open, store.extend, set()

    async def open_briefly(*positional, reservation, **named):
        return await real(*positional, **named, reservation=reservation._replace(lease_ms=1))

    async def extend_and_count(rollout, incarnation, reservation):
        await extend(rollout, incarnation, reservation)
        renewed.add(reservation[0])

    monkeypatch.setattr(store, "open", open_briefly)
    monkeypatch.setattr(store, "extend", extend_and_count)
    engine.hangs()
    calls = [asyncio.ensure_future(status_of(http, proxy)) for _ in range(2)]

    async def both_are_renewed():
        return len(renewed) == 2

    await wait_until(both_are_renewed)
    refused = await status_of(http, proxy)
    for call in calls:
        call.cancel()

    assert refused == 429


async def test_a_replayed_response_releases_its_reservation(proxy, store, engine, http):
    """The call has a reservation until its stored response is found."""
    key = {"Idempotency-Key": "k"}

    statuses = [await status_of(http, proxy, **key) for _ in range(4)]

    async def another_call_succeeds():
        return await status_of(http, proxy) == 200

    assert statuses == [200] * 4
    await wait_until(another_call_succeeds)
    assert len(engine.requests) == 2
