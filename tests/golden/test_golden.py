"""Stored records, exports and wire bytes equal the golden files, which `record.py` records.

Sentences for people (error messages, reasons) are masked in the files.
"""

from base64 import b64encode
from secrets import token_hex

import pytest
import redis
import zstandard
from tests.golden.files import STORE, check, load
from tests.golden.reads import read_all
from tests.golden.scenes import play
from tests.golden.store import dump_store, load_store, read_block, read_record, readable, records_of

from proxy.trajectory.blocks import BlockReader
from proxy.trajectory.codec import decode, encode
from storage import StoreOptions, open_store


@pytest.fixture
async def opened(server):
    """An empty store, a Redis client of its server, and the store's prefix."""
    prefix = token_hex(8)
    store = await open_store(f"unix:{server.socket}", StoreOptions(prefix=prefix))
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        yield store, client, prefix
    await store.close()


async def test_the_store_of_the_last_release_reads_the_same(opened):
    """Records, trees, groups, listings, batches, and every format in every container."""
    store, client, prefix = opened
    reads = load("reads")
    load_store(client, prefix, load(STORE))

    found = await read_all(store, reads["exchanges"], reads["requests"])

    check(reads["calls"], found["calls"])


async def test_a_repeated_session_sends_shows_and_stores_the_same(opened):
    """Requests to engines, responses to clients, and every key of the store afterwards."""
    store, client, prefix = opened
    wire = load("wire")
    stored = wire.pop("stored")

    found = await play(store, wire)

    check({name: {part: wire[name][part] for part in played} for name, played in found.items()}, found)
    check(stored, readable(dump_store(client, prefix)))


def test_a_stored_record_that_is_encoded_again_has_the_same_bytes():
    """Each record of the last release, and each of its blocks; compressed alike only by the same version of zstd."""
    shown = _whole if list(zstandard.ZSTD_VERSION) == load("reads")["zstd"] else read_record
    for rollout, (records, stored) in records_of(load(STORE)).items():
        reader = BlockReader(stored)
        written: dict[bytes, bytes] = {}
        for record in records:
            again = encode(decode(record, reader), written)
            written |= again.blocks
            check({rollout: shown(record)}, {rollout: shown(again.record)})
        before = {name.hex(): read_block(block) for name, block in stored.items()}
        check({rollout: before}, {rollout: {name.hex(): read_block(block) for name, block in written.items()}})


def _whole(record: bytes) -> dict:
    return {**read_record(record), "bytes": b64encode(record).decode()}
