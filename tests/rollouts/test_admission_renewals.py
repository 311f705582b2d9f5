"""Renewal of rollouts that have calls in flight."""

import asyncio
from secrets import token_hex

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry
from tests.support.fakes import FailingStore, proxying
from tests.support.recorded import load
from tests.support.stored import stored_rollout, stored_steps, wait_for_steps

from proxy.rollouts.admission import Lifetimes
from proxy.rollouts.rollout import LiveRollout, LiveRollouts, Rollout, write_fields
from proxy.telemetry.metrics import make_metrics
from storage import StoreOptions, open_store

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
WHOLE = load("chat_ids_lp")
TTL_S = 1000
TIMEOUT_S = 50


@pytest.fixture
async def mortal(server):
    """An empty store that expires rollouts."""
    opened = await open_store(f"unix:{server.socket}", StoreOptions(prefix=token_hex(8), ttl_s=TTL_S))
    yield FailingStore(opened)
    await opened.close()


@pytest.fixture
def metrics():
    return make_metrics(CollectorRegistry())


async def on_key(store, verb, key, *more):
    (reply,) = await store._servers.execute(key, [(verb, key, *more)])
    return reply


async def age(store, name="r1"):
    """Let a rollout expire soon."""
    for key in store.layout.rollout(name).all[:5]:
        await on_key(store, "PEXPIRE", key, 50_000)


async def is_renewed(store, name="r1"):
    return await on_key(store, "PTTL", store.layout.rollout(name).rollout) > 900_000


async def expire(store, name="r1"):
    """Delete the keys that expire with a rollout."""
    for key in store.layout.rollout(name).all[:5]:
        await on_key(store, "DEL", key)


async def wait_until(condition):
    async with asyncio.timeout(TIMEOUT_S):
        while not await condition():
            await asyncio.sleep(0.005)


@pytest.fixture
def rollouts(metrics):
    return LiveRollouts(2**20, metrics)


async def busy_rollout(store, rollouts, **fields) -> LiveRollout:
    """Return the rollout r1, with a call in flight."""
    live = rollouts.note(await store.open("r1", write_fields(fields), now_ms=1))
    rollouts.busy.add(live)
    return live


async def test_a_rollout_and_its_group_are_renewed_while_it_has_calls_in_flight(mortal, metrics, rollouts):
    """After the last call it expires as usual."""
    lifetimes = Lifetimes(mortal, metrics, rollouts)
    await mortal.groups.open("g1", {}, now_ms=1)
    live = await busy_rollout(mortal, rollouts, group_id="g1")
    await age(mortal)
    await age(mortal.groups, "g1")
    await lifetimes.renew()
    renewed = [await is_renewed(mortal), await is_renewed(mortal.groups, "g1")]
    rollouts.busy.remove(live)
    await age(mortal)
    await lifetimes.renew()

    assert renewed == [True] * 2
    assert not await is_renewed(mortal)


async def test_renewals_continue_after_store_failures(mortal, metrics, rollouts):
    """The interval is a third of the TTL; failures are counted."""
    assert Lifetimes(mortal, metrics, rollouts)._every_s == TTL_S / 3
    lifetimes = Lifetimes(mortal, metrics, rollouts, every_s=0.001).start()
    await busy_rollout(mortal, rollouts)

    async def has_failed():
        return metrics.store_operation_failures.labels("renew")._value.get() > 1

    mortal.failing.add("renew")
    await wait_until(has_failed)
    mortal.failing.clear()
    await age(mortal)
    await wait_until(lambda: is_renewed(mortal))
    await lifetimes.close()


async def test_without_a_ttl_nothing_is_renewed(store, metrics, rollouts):
    """No task runs."""
    lifetimes = Lifetimes(store, metrics, rollouts).start()

    assert lifetimes._task is None
    await lifetimes.close()


async def test_each_rollout_is_renewed_once_per_interval_with_at_most_64_renewals_at_a_time(mortal, metrics, rollouts):
    """Also one that was forgotten while it has calls, and is known again."""
    lifetimes, at_once, most, renewed = Lifetimes(mortal, metrics, rollouts), 0, 0, []

    async def renew(name, incarnation):
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0)
        renewed.append(name)
        at_once -= 1

    mortal.renew = renew
    rollouts.busy |= {LiveRollout(Rollout(f"r{number % 500}", "b", 1, 1)) for number in range(1000)}
    await lifetimes.renew()

    assert len(renewed) == len(set(renewed)) == 500
    assert most <= 64


@pytest.fixture
def release(engine):
    """An event that releases the engine's response."""
    event = asyncio.Event()

    async def respond(request, body):
        await event.wait()
        return web.Response(body=WHOLE.response, content_type="application/json")

    engine.respond = respond
    return event


async def start_call(engine, http, url):
    """Start a call; return once the engine has it."""
    call = asyncio.ensure_future(http.post(url + "/rollouts/r1/v1/chat/completions", json=BODY))
    await engine.reached.wait()
    return call


async def test_a_step_restores_its_expired_rollout(mortal, engine, http, release):
    """The rollout has the same age, terms, group and key."""
    async with proxying(engine.url, mortal) as served:
        terms = {"rollout_id": "r1", "group_id": "g1", "metadata": {"task": 7}, "limits": {"max_steps": 5}}
        async with http.post(served.url + "/rollouts", json=terms) as response:
            opened = await response.json()
        call = await start_call(engine, http, served.url)
        before = await mortal.get("r1")
        await expire(mortal)
        release.set()
        status = (await call).status
        rollout = await stored_rollout(mortal, "r1")
        async with http.post(served.url + "/rollouts", json=terms) as response:
            reopened = await response.json()
        async with http.get(served.url + "/metrics") as response:
            text = await response.text()

    assert (status, len(await stored_steps(mortal, "r1"))) == (200, 1)
    assert (before.incarnation, before.created_ms) == (rollout.incarnation, rollout.created_ms)
    assert (
        rollout.group_id, rollout.metadata, rollout.limits.max_steps, rollout.status
    ) == ("g1", {"task": 7}, 5, "open")  # fmt: skip
    assert opened == reopened
    assert "tokentape_restored_rollouts_total 1.0" in text


async def test_the_partial_step_of_a_disconnected_client_restores_its_expired_rollout(mortal, engine, http, release):
    async with proxying(engine.url, mortal) as served:
        async with http.post(served.url + "/rollouts", json={"rollout_id": "r1", "group_id": "g1"}):
            pass
        call = await start_call(engine, http, served.url)
        await expire(mortal)
        call.cancel()
        (step,) = await wait_for_steps(mortal, "r1")

    assert (step.status, (await stored_rollout(mortal, "r1")).group_id) == ("partial", "g1")


async def test_a_step_of_a_deleted_rollout_is_discarded_and_counted(mortal, engine, http, release):
    async with proxying(engine.url, mortal) as served:
        call = await start_call(engine, http, served.url)
        async with http.delete(served.url + "/rollouts/r1"):
            pass
        release.set()
        status = (await call).status
        async with http.get(served.url + "/metrics") as response:
            text = await response.text()

    assert (status, await mortal.get("r1")) == (200, None)
    assert "tokentape_discarded_steps_total 1.0" in text
    assert "tokentape_restored_rollouts_total 0.0" in text


async def test_a_process_renews_the_rollout_of_a_call_in_flight(mortal, engine, http, release, monkeypatch):
    monkeypatch.setattr("proxy.rollouts.admission._RENEWALS", 200_000)
    async with proxying(engine.url, mortal) as served:
        call = await start_call(engine, http, served.url)
        await age(mortal)
        await wait_until(lambda: is_renewed(mortal))
        release.set()
        assert (await call).status == 200
