"""Archived rows as Parquet: row groups of bounded size, and schema versions."""

from array import array
from io import BytesIO

import pyarrow.parquet as pq
import pytest

from proxy.rollouts.archive.dataset import COLUMNS, SCHEMA, SCHEMA_KEY, ArchiveWriter, _swapped, read_rows


def written(rows, *limits):
    file = BytesIO()
    writer = ArchiveWriter(file, *limits)
    for row in rows:
        writer.write(row)
    writer.close()
    writer.abandon()
    return file


def test_row_groups_have_a_bounded_size():
    """In bytes, so that a rollout of any length is written in constant memory."""
    ids = array("i", range(1000)).tobytes()
    file = written(({"rollout_id": "r", "index": at, "prompt_ids": ids} for at in range(20)), 10_000)

    assert pq.ParquetFile(file).num_row_groups == 7
    assert [row["prompt_ids"] for row in read_rows(file)] == [ids] * 20


def test_lists_may_be_empty_or_null():
    rows = [
        {"completion_ids": b"", "logprobs": None},
        {"completion_ids": None, "logprobs": array("f", [-0.5]).tobytes()},
    ]
    read = list(read_rows(written(rows)))

    assert rows == [{name: row[name] for name in ("completion_ids", "logprobs")} for row in read]
    assert COLUMNS.keys() == read[0].keys()


@pytest.mark.parametrize(
    ("version", "message"), [(b"0", "not a file of an archive"), (str(SCHEMA + 1).encode(), "supported")]
)
def test_other_schemas_are_refused(version, message):
    table = pq.read_table(written([{"rollout_id": "r"}])).replace_schema_metadata({SCHEMA_KEY: version})
    file = BytesIO()
    pq.write_table(table, file)
    with pytest.raises(ValueError, match=message):
        next(read_rows(file))


def test_numbers_are_little_endian_on_every_machine():
    assert _swapped(b"\x01\x02\x03\x04", "big") == b"\x04\x03\x02\x01"
