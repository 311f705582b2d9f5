"""The store is unreachable from a failed command until a successful write."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from proxy.rollouts.outages import StoreHealth
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


async def test_a_store_that_failed_is_unreachable_until_a_write_succeeds(store_health, store, back):
    """A reply to PING is not sufficient, since a full store sends one."""
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


async def test_an_error_of_one_rollout_does_not_make_the_store_unreachable(store_health):
    """RolloutDeleted does not affect other rollouts."""
    store_health.failed(RolloutDeleted("deleted"))

    store_health.check()


async def test_work_after_the_recovery_is_repeated_if_it_fails(store):
    """The store counts as reachable only after the work has succeeded."""
    done = asyncio.Event()
    failures = [StoreUnreachable("unreachable again")]

    async def is_back() -> None:
        if failures:
            raise failures.pop()
        done.set()

    store_health = StoreHealth(store, make_metrics(CollectorRegistry()), is_back)
    store_health.probe()
    await asyncio.wait_for(done.wait(), 50)
    await store_health.close()

    store_health.check()
