"""Imports check every row before they write: a fault names file, row, column and rollout, and nothing is imported."""

from datetime import UTC, datetime

import orjson
import pytest
from tests.support.archives import archiver, finished, importer
from tests.support.sweeping import Process, SetClock, open_group

from proxy.rollouts.archive import dataset
from proxy.rollouts.archive.importer import InvalidRow
from proxy.rollouts.archive.tables import ArchiveWriter, read_rows
from proxy.rollouts.rollout import read_rollout


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

    assert [] == [name async for name in store.names()] + [name async for name in store.groups.names()]
    assert str(archived) in str(raised.value)


async def test_an_unchanged_archive_is_imported(store, archived):
    """After it was rewritten as it was."""
    rewrite(archived, lambda rows: None)
    result = await importer(store, archived).run()

    assert (4, 4, 1) == (result.rollouts, result.steps, result.groups)


async def test_a_record_that_was_archived_as_damaged_returns_as_it_was(store, archived):
    """Its rollout is unreadable before and afterwards; the archive loses nothing."""

    def damaged(rows):
        of(rows, "a", 1).update(record_schema=None, step_id=None, record=b"x", blocks=None)

    rewrite(archived, damaged)
    await importer(store, archived).run()

    assert b"x" == (await store.read("a", 0, 9))[1]


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

    assert 1 == found["large"]
    assert "column 'rollout_id' has the type list<" in found["text"]
    assert "has no column reward" in found["missing"]
    assert dataset.Dataset(str(tmp_path)).names()
