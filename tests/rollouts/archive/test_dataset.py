"""Files of an archive on a local path: created once, complete, and listed."""

import re
import sys
from array import array
from io import BytesIO

import pyarrow.parquet as pq
import pytest

from proxy.rollouts.archive.dataset import (
    COLUMNS,
    SCHEMA,
    SCHEMA_KEY,
    ArchiveError,
    ArchiveWriter,
    Dataset,
    _swapped,
    read_rows,
)


def parquet(*names):
    """Return a file with a row for each rollout."""
    file = BytesIO()
    writer = ArchiveWriter(file)
    for name in names:
        writer.write({"rollout_id": name, "touched_ms": 7})
    writer.close()
    return file.getvalue()


def publish(dataset, name, content):
    with dataset.staged(name) as (file, path):
        file.write(content)
        file.flush()
        return dataset.publish(path, name)


@pytest.mark.parametrize("scheme", ["", "file://", "memory://"])
def test_a_file_is_created_once(tmp_path, scheme):
    """The second content is refused, and the first remains."""
    dataset = Dataset(f"{scheme}{tmp_path}/new")

    assert None is dataset.versions("date=1/a.parquet")
    assert [publish(dataset, "date=1/a.parquet", parquet(name)) for name in ("r1", "r2")] == [True, False]
    assert dataset.versions("date=1/a.parquet") == {"r1": 7}
    assert dataset.names() == ["date=1/a.parquet"]


def test_an_interrupted_file_leaves_nothing(tmp_path):
    dataset = Dataset(str(tmp_path))
    with pytest.raises(KeyboardInterrupt), dataset.staged("date=1/a.parquet") as (file, _):
        file.write(b"PAR1")
        raise KeyboardInterrupt

    assert (dataset.names(), [path for path in tmp_path.rglob("*") if path.is_file()]) == ([], [])


def test_one_file_is_a_dataset(tmp_path):
    publish(Dataset(str(tmp_path)), "a.parquet", parquet("r1"))
    one = Dataset(f"{tmp_path}/a.parquet")

    assert [one.versions(name) for name in one.names()] == [{"r1": 7}]


@pytest.mark.parametrize("content", [b"no Parquet", b""])
def test_another_file_is_refused(tmp_path, content):
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(ValueError, match="not a Parquet file"):
        Dataset(str(tmp_path)).versions("a.parquet")


def test_the_card_is_written_once(tmp_path):
    """It names every column; a card that was edited remains."""
    dataset = Dataset(str(tmp_path))
    dataset.write_card()
    written = (tmp_path / "README.md").read_bytes()
    (tmp_path / "README.md").write_text("edited")
    dataset.write_card()

    assert COLUMNS.keys() == set(re.findall(r"^\| `(\w+)` \|", written.decode(), re.MULTILINE))
    assert (tmp_path / "README.md").read_text() == "edited"


@pytest.mark.parametrize("missing", ["fsspec", "pyarrow"])
def test_the_error_of_a_missing_package_has_the_command_that_installs_it(tmp_path, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ValueError, match=r"tokentape\[archive\]"):
        publish(Dataset(str(tmp_path)), "a.parquet", parquet("r1"))


def test_an_unknown_scheme_is_refused():
    with pytest.raises(ValueError, match="nowhere"):
        Dataset("nowhere://bucket")


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArchiveError, match="Cannot write"):
        publish(Dataset(f"{tmp_path}/file"), "date=1/a.parquet", b"")


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
