"""Imports: a store that is archived and imported reads the same."""

from contextlib import suppress
from datetime import UTC, datetime
from secrets import token_hex

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.archives import Died, archiver, dying, finished, importer
from tests.support.stored import stored_rollout
from tests.support.sweeping import Process, SetClock, open_group

from proxy.rollouts.archive import dataset
from proxy.rollouts.archive.archiver import Archived
from proxy.rollouts.archive.dataset import ArchiveWriter, read_rows
from proxy.rollouts.archive.importer import InvalidRow
from proxy.rollouts.archive.rows import CLAIM
from proxy.rollouts.group import find_group
from proxy.rollouts.rollout import read_rollout
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

    assert [(each.rollouts, each.steps, each.existing) for each in results] == [(1, 2, 1), (0, 0, 2)]
    assert (found.fields["reward"], found.touched_ms, found.counts) == (b"1", 9000, {"steps": 2, "sampled_tokens": 4})
    assert (kept.fields, kept.touched_ms) == ({}, 5)


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

    assert (result.rollouts, result.groups, again.groups) == (6, 3, 0)
    assert statuses == ["complete", "done", "dropped"]
    assert [queued.group for queued in (await other.queue.read(limit=9)).groups] == ["g1"]
    assert (await find_group(store, "g1")).members == (await find_group(other, "g1")).members


async def test_groups_return_to_the_queue_with_their_oldest_version_and_epoch(stores, tmp_path):
    store, other = stores
    for group in ("g0", "g1"):
        for name in await open_group(store, group, 1):
            await Process(store, SetClock()).finisher.finish(await stored_rollout(store, name), "completed", reward=1)
    await store.groups.update_if("g1", {"oldest": b'"7"', "epoch": b"2"}, expect={}, now_ms=2000)
    await archiver(store, tmp_path).sweep()
    await importer(other, tmp_path).run()
    notes = {queued.group: queued.note for queued in (await other.queue.read(limit=9)).groups}
    states = [(await find_group(other, name)).states["default"] for name in ("g0", "g1")]

    assert notes == {"g0": b'{"oldest":null}', "g1": b'{"oldest":"7","epoch":2}'}
    assert [(state.oldest, state.epoch) for state in states] == [(None, 0), ("7", 2)]


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


@pytest.fixture
async def archived(store, tmp_path):
    """An archive of two rollouts with steps, and of a group."""
    await finished(store, "a", "b", steps=2)
    for name in await open_group(store, "g", 2):
        rollout = read_rollout(await store.get(name))
        await Process(store, SetClock()).finisher.finish(rollout, "completed", reward=1.0)
    await archiver(store, tmp_path).sweep()
    for space in (store, store.groups):
        async for name in space.names():
            await space.delete(name)
    return tmp_path


def rewrite(folder, change):
    """Change the rows of each file of an archive, in which numbers are bytes."""
    for path in folder.glob("*/*.parquet"):
        with path.open("rb") as file:
            rows = list(read_rows(file))
        changed = change(rows)
        with path.open("wb") as file:
            writer = ArchiveWriter(file)
            for row in rows if changed is None else changed:
                writer.write(row)
            writer.close()


def within(row, column, part, **values):
    """Set fields in the JSON of a column."""
    saved = orjson.loads(row[column])
    saved[part].update({name: value.decode("latin-1") for name, value in values.items()})
    row[column] = orjson.dumps(saved)


def of(rows, name, index=0):
    return next(row for row in rows if row["rollout_id"] == name and row["index"] in (index, None))


def with_group(rows):
    return next(row for row in rows if row["group"] is not None)


CHANGES = {
    "metadata": lambda rows: within(of(rows, "a"), "rollout", "fields", metadata=b"{{{"),
    "reward: NaN": lambda rows: within(of(rows, "a"), "rollout", "fields", reward=b"NaN"),
    "reward column": lambda rows: of(rows, "a").update(reward=float("nan")),
    "status": lambda rows: within(of(rows, "a"), "rollout", "fields", status=b'"zzz"'),
    "open": lambda rows: within(of(rows, "a"), "rollout", "fields", status=b'"open"'),
    "group status": lambda rows: within(with_group(rows), "group", "fields", status=b'"zzz"'),
    "group name": lambda rows: with_group(rows).update(group=with_group(rows)["group"].replace('"name":"g"', '"name":"x"')),
    "rollout name": lambda rows: of(rows, "a").update(rollout_id="x"),
    "no name": lambda rows: of(rows, "a").update(rollout=b'{"name":5}'),
    "status column": lambda rows: of(rows, "a").update(rollout_status="failed"),
    "metadata column": lambda rows: of(rows, "a").update(metadata=b'{"a":1}'),
    "broken column": lambda rows: of(rows, "a").update(metadata=b"{{{"),
    "time column": lambda rows: of(rows, "a").update(created_at=datetime.fromtimestamp(7, UTC)),
    "step name": lambda rows: of(rows, "a", 1).update(step_id="x"),
    "status of a step": lambda rows: of(rows, "a").update(status="error"),
    "exact": lambda rows: of(rows, "a").update(exact=False),
    "problems": lambda rows: of(rows, "a").update(problems=["no_usage"]),
    "model": lambda rows: of(rows, "a").update(model="other"),
    "policy of a step": lambda rows: of(rows, "a").update(policy="other"),
    "finish reason": lambda rows: of(rows, "a").update(finish_reason="other"),
    "late": lambda rows: of(rows, "a").update(late=True),
    "duration": lambda rows: of(rows, "a").update(duration_s=float("nan")),
    "arrival": lambda rows: of(rows, "a").update(received_at=datetime.fromtimestamp(7, UTC)),
    "step twice": lambda rows: rows.insert(2, {**rows[1], "index": 2}),
    "index": lambda rows: of(rows, "a", 1).update(index=7),
    "missing step": lambda rows: rows.remove(of(rows, "a", 1)),
    "no first row": lambda rows: rows[0].update(rollout=None),
    "request": lambda rows: of(rows, "a").update(request=b"{{{"),
    "head": lambda rows: of(rows, "a").update(head=b"[]"),
    "response": lambda rows: of(rows, "a").update(response=b"{{{"),
    "deep response": lambda rows: of(rows, "a").update(response=b'{"a":' + b"[" * 1020 + b"]" * 1020 + b"}"),
    "no response": lambda rows: of(rows, "a").update(response=None),
    "record": lambda rows: of(rows, "a").update(record_schema=None, record=b"x", blocks=None),
    "schema": lambda rows: of(rows, "a").update(record_schema=99),
    "counts": lambda rows: of(rows, "a").update(rollout=of(rows, "a")["rollout"].replace('"steps":2', '"steps":-2')),
}  # fmt: skip


@pytest.mark.parametrize("fault", CHANGES)
async def test_an_invalid_value_or_a_contradiction_imports_nothing(store, archived, fault):
    rewrite(archived, lambda rows: CHANGES[fault](rows) and None)
    with pytest.raises(
        InvalidRow, match=r"parquet, row \d+, rollout .*, column '\w+': .* Nothing was imported"
    ) as raised:
        await importer(store, archived).run()

    assert [name async for name in store.names()] + [name async for name in store.groups.names()] == []
    assert str(archived) in str(raised.value)


async def test_an_unchanged_archive_is_imported(store, archived):
    """After it was rewritten as it was."""
    rewrite(archived, lambda rows: None)
    result = await importer(store, archived).run()

    assert (result.rollouts, result.steps, result.groups) == (4, 4, 1)


async def test_a_record_that_was_archived_as_damaged_returns_as_it_was(store, archived):
    """Its rollout is unreadable before and afterwards; the archive loses nothing."""

    def damaged(rows):
        of(rows, "a", 1).update(record_schema=None, step_id=None, record=b"x", blocks=None)

    rewrite(archived, damaged)
    await importer(store, archived).run()

    assert (await store.read("a", 0, 9))[1] == b"x"


async def test_columns_have_their_types_and_none_is_missing(store, tmp_path):
    """Texts in Arrow's other type are read."""
    import pyarrow as pa
    from pyarrow import parquet

    await finished(store, "a")
    await archiver(store, tmp_path).sweep()
    (path,) = tmp_path.glob("*/*.parquet")
    table = parquet.read_table(path)
    place = table.schema.get_field_index("rollout_id")
    large = table.set_column(place, "rollout_id", table.column("rollout_id").cast(pa.large_string()))
    await store.delete("a")
    found = {}
    for name, changed in {
        "large": large,
        "text": table.set_column(place, "rollout_id", pa.array([[1]])),
        "missing": table.drop_columns(["reward"]),
    }.items():
        parquet.write_table(changed.replace_schema_metadata(table.schema.metadata), path)
        try:
            found[name] = (await importer(store, tmp_path).run()).rollouts
        except ValueError as error:
            found[name] = str(error)

    assert found["large"] == 1
    assert "column 'rollout_id' has the type list<" in found["text"]
    assert "has no column reward" in found["missing"]
    assert dataset.Dataset(str(tmp_path)).names()
