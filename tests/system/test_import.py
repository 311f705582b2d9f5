"""Imports: a store that is archived and imported reads the same."""

import re
from functools import partial
from secrets import token_hex

import pytest
import redis
from tests.golden.files import STORE, check, load
from tests.golden.reads import AFTER, read_all
from tests.golden.session import SteppedClock
from tests.golden.store import load_store
from tests.support.archives import archiver, importer

from storage import StoreOptions, open_store


@pytest.fixture
async def stores(server):
    """Two empty stores, and a function that loads a recorded one into the first."""
    prefixes = token_hex(8), token_hex(8)
    opened = [await open_store(f"unix:{server.socket}", StoreOptions(prefix=prefix)) for prefix in prefixes]
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        yield *opened, partial(load_store, client, prefixes[0])
    for store in opened:
        await store.close()


async def finish_all(store):
    """Finish the open rollouts of the store."""
    async for name in store.names():
        stored = await store.get(name)
        if stored.fields.get("status", b'"limited"') in (b'"limited"', b'"open"'):
            ending = {"status": b'"completed"', "finished_ms": b"1800000099000"}
            await store.update_if(name, ending, expect={}, now_ms=stored.touched_ms)


async def test_every_read_of_an_imported_store_is_equal(stores, tmp_path):
    """Rollouts, steps, trees, drift, groups, and every format in every container, with late and undelivered steps.

    The recorded store has records of all dialects, failed and partial steps, several choices and prompts.
    """
    store, other, load_into = stores
    reads = load("reads")
    load_into(load(STORE))
    await finish_all(store)
    requests = [request for request in reads["requests"] if request[0] == "GET" and request[1] != "/policy"]
    settling = [request for request in requests if "?" not in request[1]]  # a shown rollout completes its drift
    await read_all(store, reads["exchanges"], settling)
    result = await archiver(store, tmp_path, clock=SteppedClock(2 * AFTER)).sweep()
    imported = await importer(other, tmp_path).run()
    before, after = [await read_all(each, reads["exchanges"], requests) for each in (store, other)]
    check(without_queue(before["calls"]), without_queue(after["calls"]))

    assert result.rollouts == imported.rollouts > 20


def without_queue(calls):
    """Omit the claims of groups."""
    omitted = r',"(batch_id|consumer|lease_ms)":[^,}]*'
    return [{**call, "body": re.sub(omitted, "", call["body"].replace('"claimed"', '"complete"'))} for call in calls]
