"""Stores in which one value was replaced by other bytes: every reader answers, and has all other rollouts and groups."""

from random import Random
from secrets import token_hex

import pytest
import redis
from hypothesis import strategies as st
from tests.golden.files import STORE, load
from tests.golden.reads import AFTER
from tests.golden.session import SteppedClock, staging
from tests.golden.store import load_store
from tests.support.archives import archiver
from tests.support.damaged_reads import Reading, read_everything, read_one, small
from tests.support.stored_damage import damage
from tests.support.sweeping import Process

from storage import StoreOptions, open_store

pytestmark = [pytest.mark.timeout(3600), pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")]


@pytest.fixture(scope="module")
def dump():
    return small(load(STORE))


async def read_damaged(server, client, dump, folder, seed):
    """Damage a store and read it; raise AssertionError for a response of 500, or without another rollout or group."""
    random, prefix = Random(seed), token_hex(8)
    load_store(client, prefix, dump)
    store = await open_store(f"unix:{server.socket}", StoreOptions(prefix=prefix))
    try:
        entities = [name async for name in store.names() if await store.get(name)]
        entities += [name async for name in store.groups.names()]
        what = [damage(client, prefix, random) for _ in range(random.choice((1, 1, 3)))]
        damaged = {entity for _, entity, _, _ in what if entity is not None}
        async with staging(store, SteppedClock(AFTER), [], None, name="vllm", hides_keys=False) as stage:
            read = Reading(stage, what)
            assert set(entities) - damaged <= await read_everything(read, random), what
            for name in {"chat", "g0", *damaged}:
                await read_one(read, name.replace("/", "%2F").replace(" ", "%20"), random)
            await read("POST", "/rollouts", {"rollout_id": "new", "group_id": "new-group"})
        process = Process(store, SteppedClock(AFTER))
        await process.deadlines.sweep()
        await process.finisher.settle_all()
        await archiver(store, folder / prefix, clock=SteppedClock(AFTER)).sweep()
        for name in damaged:
            await store.delete(name)
            assert await store.get(name) is None, what
    finally:
        await store.close()
        client.delete(*client.scan_iter(match=f"{prefix}*", count=1000))


async def test_a_damaged_value_affects_only_its_own_entity(fuzz, server, dump, tmp_path):
    """Bytes, JSON and records of any kind, in every kind of key."""
    with redis.Redis(unix_socket_path=str(server.socket)) as client:

        async def check(seed):
            await read_damaged(server, client, dump, tmp_path, seed)

        await fuzz(0.05, st.integers(0, 2**40), check)
