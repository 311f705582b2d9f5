"""The lifetimes of rollouts that have calls in flight."""

import asyncio
from secrets import token_hex

import pytest
from aiohttp import web
from fakes import FailingStore, proxying
from prometheus_client import CollectorRegistry
from recorded import load
from stored import stored_rollout, stored_steps, wait_for_steps

from proxy.rollouts.renewals import Lifetimes
from proxy.telemetry.metrics import make_metrics
from storage import StoreOptions, open_store
from storage.redis.keys import rollout_keys
from storage.types import Origin

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
WHOLE = load("chat_ids_lp")
TTL_S = 1000
TIMEOUT_S = 10


@pytest.fixture
async def mortal(server):
    """An empty store whose rollouts expire."""
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
    """Let a rollout be about to expire."""
    for key in rollout_keys(store._prefix, name).all()[:5]:
        await on_key(store, "PEXPIRE", key, 50_000)


async def is_renewed(store, name="r1"):
    return 900_000 < await on_key(store, "PTTL", rollout_keys(store._prefix, name).rollout)


async def expire(store, name="r1"):
    """What happens to a rollout when its time has come."""
    for key in rollout_keys(store._prefix, name).all()[:5]:
        await on_key(store, "DEL", key)


async def until(condition):
    async with asyncio.timeout(TIMEOUT_S):
        while not await condition():
            await asyncio.sleep(0.005)


async def kept_one(store, lifetimes, group_id=None):
    made = await store.open("r1", {}, now_ms=1)
    return made.incarnation, lifetimes.kept("r1", made.incarnation, group_id, Origin(made.created_ms, made.fields))


async def test_a_rollout_is_renewed_while_it_has_a_call_in_flight(mortal, metrics):
    """However many it has; and its group with it. After the last one it is left to its lifetime."""
    lifetimes = Lifetimes(mortal, metrics)
    await mortal.groups.open("g1", {}, now_ms=1)
    _, first = await kept_one(mortal, lifetimes, "g1")
    _, second = await kept_one(mortal, lifetimes, "g1")
    seen = []
    with second:
        with first:
            await age(mortal)
            await age(mortal.groups, "g1")
            await lifetimes.renew()
            seen += [await is_renewed(mortal), await is_renewed(mortal.groups, "g1")]
        await age(mortal)
        await lifetimes.renew()
        seen.append(await is_renewed(mortal))
    await age(mortal)
    await lifetimes.renew()

    assert [True] * 3 == seen
    assert not await is_renewed(mortal)
    assert "<Lifetimes 0 rollouts kept>" == repr(lifetimes)


async def test_renewing_goes_on_by_itself_whatever_fails(mortal, metrics):
    """Three times in a lifetime; a store that is away is tried again, and the failure is counted."""
    assert TTL_S / 3 == Lifetimes(mortal, metrics)._every_s
    lifetimes = await Lifetimes(mortal, metrics, every_s=0.001).start()
    _, kept = await kept_one(mortal, lifetimes)

    async def has_failed():
        return metrics.store_operation_failures.labels("renew")._value.get() > 1

    with kept:
        mortal.failing.add("renew")
        await until(has_failed)
        mortal.failing.clear()
        await age(mortal)
        await until(lambda: is_renewed(mortal))
    await lifetimes.close()


async def test_without_a_ttl_nothing_is_kept(store, metrics):
    """And no task runs."""
    lifetimes = await Lifetimes(store, metrics).start()
    incarnation, kept = await kept_one(store, lifetimes)
    with kept:
        assert (None, "<Lifetimes 0 rollouts kept>", None) == (
            lifetimes.origin("r1", incarnation), repr(lifetimes), lifetimes._task
        )  # fmt: skip
    await lifetimes.close()


async def test_of_thousands_of_calls_each_rollout_is_renewed_once_in_bounded_bunches(mortal, metrics):
    """Never more than some at once; the cost is the rollouts', not the calls'."""
    lifetimes, at_once, most, renewed = Lifetimes(mortal, metrics), 0, 0, []

    async def renew(name, incarnation):
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0)
        renewed.append(name)
        at_once -= 1

    mortal.renew = renew
    contexts = [lifetimes.kept(f"r{number % 500}", "b", None, Origin(1)) for number in range(2000)]
    for context in contexts:
        context.__enter__()
    await lifetimes.renew()

    assert 500 == len(renewed) == len(set(renewed))
    assert most <= 64


@pytest.fixture
def held(engine):
    """The engine answers whole, once the event is set."""
    hold = asyncio.Event()

    async def respond(request, body):
        await hold.wait()
        return web.Response(body=WHOLE.response, content_type="application/json")

    engine.respond = respond
    return hold


async def in_flight(engine, http, url):
    """A call that the engine has."""
    calling = asyncio.ensure_future(http.post(url + "/rollouts/r1/v1/chat/completions", json=BODY))
    await engine.reached.wait()
    return calling


async def test_a_step_whose_rollout_expired_meanwhile_is_stored(mortal, engine, http, held):
    """The rollout is restored, with its age, its terms, its group and the key that it was opened with."""
    async with proxying(engine.url, mortal) as served:
        terms = {"rollout_id": "r1", "group_id": "g1", "metadata": {"task": 7}, "limits": {"max_steps": 5}}
        async with http.post(served.url + "/rollouts", json=terms) as response:
            opened = await response.json()
        calling = await in_flight(engine, http, served.url)
        before = await mortal.get("r1")
        await expire(mortal)
        held.set()
        status = (await calling).status
        rollout = await stored_rollout(mortal, "r1")
        async with http.post(served.url + "/rollouts", json=terms) as response:
            again = await response.json()
        async with http.get(served.url + "/metrics") as response:
            told = await response.text()

    assert (200, 1) == (status, len(await stored_steps(mortal, "r1")))
    assert (before.incarnation, before.created_ms) == (rollout.incarnation, rollout.created_ms)
    assert ("g1", {"task": 7}, 5, "open") == (
        rollout.group_id, rollout.metadata, rollout.limits.max_steps, rollout.status
    )  # fmt: skip
    assert opened == again
    assert "tokentape_restored_rollouts_total 1.0" in told


async def test_a_step_whose_client_left_and_whose_rollout_expired_is_stored(mortal, engine, http, held):
    """The call is over then, and what its rollout is restored with is known still."""
    async with proxying(engine.url, mortal) as served:
        async with http.post(served.url + "/rollouts", json={"rollout_id": "r1", "group_id": "g1"}):
            pass
        calling = await in_flight(engine, http, served.url)
        await expire(mortal)
        calling.cancel()
        (step,) = await wait_for_steps(mortal, "r1")

    assert ("partial", "g1") == (step.status, (await stored_rollout(mortal, "r1")).group_id)


async def test_a_step_whose_rollout_was_deleted_meanwhile_is_not_stored_and_counted(mortal, engine, http, held):
    """With a ttl as without one."""
    async with proxying(engine.url, mortal) as served:
        calling = await in_flight(engine, http, served.url)
        async with http.delete(served.url + "/rollouts/r1"):
            pass
        held.set()
        status = (await calling).status
        async with http.get(served.url + "/metrics") as response:
            told = await response.text()

    assert (200, None) == (status, await mortal.get("r1"))
    assert "tokentape_discarded_steps_total 1.0" in told
    assert "tokentape_restored_rollouts_total 0.0" in told


async def test_a_call_in_flight_is_kept_from_its_admission_on(mortal, engine, http, held, monkeypatch):
    """By the process itself, which renews its rollout until the call has ended."""
    monkeypatch.setattr("proxy.rollouts.renewals._RENEWALS_PER_TTL", 200_000)
    async with proxying(engine.url, mortal) as served:
        calling = await in_flight(engine, http, served.url)
        await age(mortal)
        await until(lambda: is_renewed(mortal))
        held.set()
        assert 200 == (await calling).status
