"""Imports: a store that is archived and imported reads the same."""

from contextlib import suppress
from secrets import token_hex

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.archives import Died, archiver, dying, finished, importer
from tests.support.stored import stored_rollout
from tests.support.sweeping import Process, SetClock, open_group

from proxy.rollouts.archive.archiver import Archived
from proxy.rollouts.archive.rows import CLAIM
from proxy.rollouts.group import find_group
from storage import StoreOptions, open_store


@pytest.fixture
async def stores(server):
    """Two empty stores."""
    opened = [await open_store(f"unix:{server.socket}", StoreOptions(prefix=token_hex(8))) for _ in range(2)]
    yield opened
    for store in opened:
        await store.close()


async def test_an_import_can_be_repeated_and_changes_no_other_rollout(stores, tmp_path):
    """A rollout that exists is not changed; of several versions the newest is imported."""
    store, other = stores
    await finished(store, "a", "b", steps=2)
    await archiver(store, tmp_path).sweep()
    await store.update_if("a", {"reward": b"1"}, expect={}, now_ms=9000)
    await archiver(store, tmp_path).sweep()
    await other.open("b", {}, now_ms=5)
    results = [await importer(other, tmp_path).run() for _ in range(2)]
    found, kept = await other.get("a"), await other.get("b")

    assert [(1, 2, 1), (0, 0, 2)] == [(each.rollouts, each.steps, each.existing) for each in results]
    assert (b"1", 9000, {"steps": 2, "sampled_tokens": 4}) == (found.fields["reward"], found.touched_ms, found.counts)
    assert ({}, 5) == (kept.fields, kept.touched_ms)


@given(st.sampled_from(["open", "append", "mark", "update_if"]), st.integers(0, 5), st.booleans())
async def test_an_import_that_died_is_completed_by_the_next(store, tmp_path_factory, verb, number, is_after):
    """A rollout is open until all its steps are stored."""
    url = tmp_path_factory.mktemp("archive")
    async for name in store.names():
        await store.delete(name)
    await finished(store, "a", "b", steps=2)
    before = {name: await snapshot(store, name) for name in "ab"}
    await archiver(store, url, delete=True).sweep()
    importing = importer(store, url)
    dying(importing, verb, number, is_after=is_after)
    with suppress(Died):
        await importing.run()
    for name in "ab":
        stored = await store.get(name)
        assert stored is None or "status" not in stored.fields or before[name] == await snapshot(store, name)
    await importer(store, url).run()

    assert before == {name: await snapshot(store, name) for name in "ab"}


async def snapshot(store, name):
    """Return what a rollout has, without its incarnation and its claim."""
    full = await store.read_all(name, 99)
    kept = {field: value for field, value in full.rollout.fields.items() if field != CLAIM}
    stored = full.rollout
    return full.records, full.blocks, full.marks, kept, stored.counts, stored.created_ms, stored.touched_ms


async def test_groups_return_to_the_queue_unless_they_had_left_it(stores, tmp_path):
    """A claim's holder is forgotten; an acknowledged group is not claimed again."""
    store, other = stores
    clock = SetClock()
    for group, status in (("g1", b'"claimed"'), ("g2", b'"done"'), ("g3", b'"dropped"')):
        for name in await open_group(store, group, 2):
            await Process(store, clock).finisher.finish(await stored_rollout(store, name), "completed", reward=1)
        await store.groups.update_if(group, {"status": status, "consumer": b'"c"'}, expect={}, now_ms=2000)
    await archiver(store, tmp_path).sweep()
    result = await importer(other, tmp_path).run()
    again = await importer(other, tmp_path).run()
    statuses = [(await find_group(other, name)).status_at(9000) for name in ("g1", "g2", "g3")]

    assert (6, 3, 0) == (result.rollouts, result.groups, again.groups)
    assert ["complete", "done", "dropped"] == statuses
    assert ["g1"] == [queued.group for queued in await other.queue.list_available(9)]
    assert (await find_group(store, "g1")).members == (await find_group(other, "g1")).members


async def test_groups_return_to_the_queue_with_their_oldest_version_and_epoch(stores, tmp_path):
    store, other = stores
    for group in ("g0", "g1"):
        for name in await open_group(store, group, 1):
            await Process(store, SetClock()).finisher.finish(await stored_rollout(store, name), "completed", reward=1)
    await store.groups.update_if("g1", {"oldest": b'"7"', "epoch": b"2"}, expect={}, now_ms=2000)
    await archiver(store, tmp_path).sweep()
    await importer(other, tmp_path).run()
    notes = {queued.group: queued.note for queued in await other.queue.list_available(9)}
    states = [(await find_group(other, name)).states["default"] for name in ("g0", "g1")]

    assert {"g0": b'{"oldest":null}', "g1": b'{"oldest":"7","epoch":2}'} == notes
    assert [(None, 0), ("7", 2)] == [(state.oldest, state.epoch) for state in states]


async def test_imported_rollouts_are_neither_archived_again_nor_deleted(store, tmp_path):
    """By an archive to the same dataset."""
    await finished(store, "a")
    await archiver(store, tmp_path, delete=True).sweep()
    await importer(store, tmp_path).run()
    result = await archiver(store, tmp_path, delete=True).sweep()

    assert Archived() == result
    assert None is not await store.get("a")


async def test_another_file_is_refused(store, tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="not a Parquet file"):
        await importer(store, tmp_path).run()
