"""Stores in which one value was replaced by other bytes: every reader answers, and has all other rollouts and groups."""

from random import Random
from secrets import token_hex

import orjson
import pytest
import redis
from all_readers import ADVANTAGES, LENGTHS
from archives import archiver
from golden_files import load
from golden_reads import AFTER
from golden_session import SteppedClock, staging
from golden_store import load_store
from hypothesis import strategies as st
from stored_damage import OF_ENTITIES, damage
from sweeping import Process

from proxy.export import FORMATS
from proxy.export.containers import CONTAINERS
from storage import StoreOptions, open_store

pytestmark = [pytest.mark.timeout(3600), pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")]
KEPT = ("chat", "per-token", "sglang", "schema-1", "extra-turns")


def small(dump):
    """Return the part of the golden store with a few rollouts, and all groups."""
    kept = {}
    for name, entry in dump.items():
        space, _, kind, entity = [*name.split(":", 3), "", ""][:4]
        if space or kind not in OF_ENTITIES or entity in KEPT or entity.startswith("g"):
            kept[name] = entry
    return kept


@pytest.fixture(scope="module")
def dump():
    return small(load("store"))


class Reading:
    """Requests to a proxy over a damaged store."""

    def __init__(self, stage, what) -> None:
        self.stage, self.what = stage, what

    async def __call__(self, method, path, body=None):
        found = await self.stage.call(method, path, body)
        assert found["status"] < 500, (self.what, found)
        assert not found.get("cut"), (self.what, found)
        is_json = found["status"] < 300 and dict(found["headers"])["content-type"].startswith("application/json")
        return orjson.loads(found["body"]) if is_json else {}


async def read_everything(read, random):
    """Send requests to all readers of many; return the names of the rollouts and groups that are listed or named."""
    rows = f"format={random.choice(tuple(FORMATS))}{LENGTHS}&include=flagged&report=true"
    listed = await read("GET", "/rollouts?limit=1000")
    groups = await read("GET", "/groups?limit=1000")
    await read("GET", "/training")
    await read("GET", f"/search?q={random.choice(('the', 'e', 'turn'))}")
    await read("GET", f"/export?{rows}")
    await read("GET", f"/export?{rows}&container={random.choice(tuple(CONTAINERS))}")
    await read("GET", "/policy")
    await read("GET", "/engines")
    claim = {"consumer": "c", "groups": 9, "include": "flagged", "advantage": random.choice(ADVANTAGES),
             "stale": "keep", "max_staleness": random.choice((None, 1))}  # fmt: skip
    claimed = await read("POST", "/batches/claim", claim)
    if claimed.get("batch_id"):
        await read("POST", f"/batches/{claimed['batch_id']}/release", {})
    both = listed["rollouts"] + groups["groups"] + listed.get("unreadable", []) + groups.get("unreadable", [])
    return {entry.get("rollout_id") or entry["group_id"] for entry in both}


async def read_one(read, name, random):
    """Send requests to the readers of one rollout and one group."""
    rows = f"format={random.choice(tuple(FORMATS))}{LENGTHS}&include=flagged"
    for path in ("", "/steps?limit=1000", "/tree", f"/export?{rows}", "/export?format=sequences&include=flagged"):
        await read("GET", f"/rollouts/{name}{path}")
    for path in ("", f"/export?{rows}&advantage=grpo"):
        await read("GET", f"/groups/{name}{path}")


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
        await archiver(store, folder / prefix).sweep()
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
