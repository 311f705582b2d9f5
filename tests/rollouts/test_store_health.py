"""How the store stands: there, or known to be away."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from proxy.rollouts.store_health import StoreHealth
from proxy.telemetry.metrics import make_metrics
from storage.errors import RolloutDeleted, StoreUnreachable


@pytest.fixture
async def back():
    return asyncio.Event()


@pytest.fixture
async def store_health(store, back):
    async def is_back() -> None:
        back.set()

    store_health = StoreHealth(store, make_metrics(CollectorRegistry()), is_back)
    yield store_health
    await store_health.close()


async def test_a_store_that_failed_is_away_until_it_takes_a_write(store_health, store, back):
    """A PING is not enough: a store that is full answers one."""
    store.failing.add("set_once")
    store_health.failed(StoreUnreachable("it is full"))
    with pytest.raises(StoreUnreachable, match="it is full"):
        store_health.check()
    pings, real = asyncio.Semaphore(0), store._store.ping

    async def ping() -> None:
        await real()
        pings.release()

    store._store.ping = ping
    await pings.acquire()
    await pings.acquire()
    assert not back.is_set()
    store.failing.clear()
    await asyncio.wait_for(back.wait(), 50)

    store_health.check()


async def test_what_is_wrong_with_one_rollout_is_not_the_stores_absence(store_health):
    """A deleted rollout is no reason to refuse others."""
    store_health.failed(RolloutDeleted("deleted"))

    store_health.check()


async def test_work_at_its_return_that_finds_it_away_is_done_again(store):
    """The return counts once its work is done."""
    done = asyncio.Event()
    failures = [StoreUnreachable("away again")]

    async def is_back() -> None:
        if failures:
            raise failures.pop()
        done.set()

    store_health = StoreHealth(store, make_metrics(CollectorRegistry()), is_back)
    store_health.probe()
    await asyncio.wait_for(done.wait(), 50)
    await store_health.close()

    store_health.check()
