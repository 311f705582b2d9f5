"""Rows of archived rollouts: through Parquet and back, each record is equal to the one that was stored."""

from array import array
from contextlib import suppress
from io import BytesIO

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.any_json import deep, odd_steps
from tests.support.forests import make_choice, make_step, rollouts

from proxy.rollouts.archive.dataset import ArchiveWriter, read_rows
from proxy.rollouts.archive.rows import (
    RolloutRows,
    chains_of,
    name_of,
    put_together,
    read_saved,
    record_of,
    saved_json,
    take_apart,
)
from proxy.trajectory.blocks import BlockReader, BlockWriter
from proxy.trajectory.codec import UnreadableRecord, decode, encode, frame, open_frame
from proxy.trajectory.images import names_in
from storage.types import StoredEntity

DAMAGED = (b"", b"TT\x02" + bytes(40), b"TT\x09" + bytes(40))
FIELDS = {"status": b'"completed"', "reward": b"0.5", "finished_ms": b"1800000000000", "archive": b'{"file":"f"}'}


def stored(steps):
    """Return the records of steps in one rollout, and their blocks."""
    found, records = {}, []
    for step in steps:
        with suppress(TypeError, ValueError, AttributeError):  # a failed write stores nothing
            record = encode(step, found.keys())
            found |= record.blocks
            records.append(record.record)
    return records, found


def entity(fields=FIELDS, **counts):
    return StoredEntity("r1", "i", 1_700_000_000_000, 1_700_000_000_001, fields, counts)


def through_parquet(rows):
    """Write rows to a file and read them."""
    file = BytesIO()
    writer = ArchiveWriter(file)
    for row in rows:
        writer.write(row)
    writer.close()
    file.seek(0)
    return list(read_rows(file))


def content(record, blocks):
    """Return what a record has; compression may differ."""
    try:
        schema, packed = open_frame(record)
        return schema, BlockReader(blocks).expand(packed)
    except (UnreadableRecord, ValueError):
        return record


def archived(records, blocks, marks=None):
    rows = RolloutRows(entity(steps=len(records)), marks or {}, blocks)
    return through_parquet([rows.row(record) for record in records] or [rows.empty()])


def restored(rows):
    """Return the records and blocks of rows, as an import stores them."""
    made, records = {}, []
    for row in rows:
        record = record_of(row, made)
        assert not made.keys() & record.blocks.keys()
        made |= record.blocks
        records.append(record.record)
    return records, made


@given(rollouts() | odd_steps(), st.lists(st.sampled_from(DAMAGED), max_size=2))
def test_each_record_returns_from_its_row(steps, damaged):
    """Also of steps with values of any type, and damaged records; blocks that the steps share are stored once."""
    records, blocks = stored(steps)
    records += damaged
    rows = archived(records, blocks)
    again, made = restored(rows if records else [])

    assert [content(record, blocks) for record in records] == [content(record, made) for record in again]
    assert all(made[name] == block for name, block in blocks.items())


def test_logprobs_of_float64_return_exactly_and_are_readable_as_float32():
    long = list(range(600))
    records, blocks = stored([make_step("1", long, make_choice(0, [7], logprobs=array("d", [-0.1])))])
    rows = archived(records, blocks)
    again, made = restored(rows)

    assert (records, blocks) == (again, made)
    assert array("f", [-0.1]).tobytes() == rows[0]["logprobs"]
    assert array("i", long).tobytes() == rows[0]["prompt_ids"]


def test_a_request_of_the_maximum_depth_returns():
    """Joined with its messages, it has more levels than JSON can be written with."""
    records, blocks = stored([make_step("1", [1], [7], request={"messages": [{"content": [[deep(None)]]}]})])
    again, made = restored(archived(records, blocks))

    assert len(records) == 1
    assert [content(record, blocks) for record in records] == [content(record, made) for record in again]


def test_columns_have_the_facts_of_the_step_and_its_rollout():
    step = make_step("s1", [1, 2], [7, 8], [9])
    records, blocks = stored([step])
    (row,) = archived(records, blocks, {"late:s1": b"1", "undelivered:s1": b"1"})

    assert tuple(row[name] for name in ("rollout_id", "rollout_status", "reward", "index")) == (
        "r1",
        "completed",
        0.5,
        0,
    )
    assert tuple(row[name] for name in ("step_id", "late", "delivered", "policy")) == ("s1", True, False, "default")
    assert array("i", [1, 2]).tobytes() == row["prompt_ids"]
    assert array("i", [7, 8]).tobytes() == row["completion_ids"]
    assert [choice["ids"] for choice in row["more_choices"]] == [[9]]
    assert row["finished_at"].date().isoformat() == "2027-01-15"
    assert name_of(row) == "s1"


def test_a_rollout_without_steps_has_one_row():
    (row,) = archived([], {})

    assert (row["index"], row["rollout_status"]) == (None, "completed")


@given(
    st.dictionaries(st.text(max_size=5), st.binary(max_size=9)), st.dictionaries(st.text(max_size=5), st.integers(0, 9))
)
def test_fields_counts_and_marks_of_any_bytes_return(marks, counts):
    """The field with the claim of the archive does not."""
    saved = read_saved(saved_json(entity(**counts), marks).decode())

    assert (saved.marks, saved.counts) == (marks, counts)
    assert FIELDS.keys() - {"archive"} == saved.fields.keys()
    assert (saved.name, saved.created_ms, saved.touched_ms) == ("r1", 1_700_000_000_000, 1_700_000_000_001)


def test_images_return_from_rows_that_are_equal_and_from_copied_records():
    """The data of an image is in the blocks again, and the step is the same."""
    messages = [{"role": "user", "content": [{"image_url": {"url": "data:image/png;base64," + "QUJD" * 500}}]}]
    extra = {"images": {"ids": names_in(messages), "token": None}}
    narrow, wide = make_choice(0, [3]), make_choice(0, [3], logprobs=array("d", [-0.1]))
    steps = [make_step(name, [1, 2], choice, request={"messages": messages}, extra=extra)
             for name, choice in (("a", wide), ("b", narrow), ("c", wide))]  # fmt: skip
    for chosen in (steps, steps[1:]):
        records, blocks = stored(chosen)
        again, made = restored(archived(records, blocks))

        assert blocks.items() <= made.items()
        assert chosen == [decode(record, BlockReader(made)) for record in again]


def payload(record, reader):
    schema, packed = open_frame(record)
    return schema, reader.expand(packed)


@given(rollouts() | odd_steps())
def test_a_record_that_is_put_together_has_the_same_content_and_blocks(steps):
    """The blocks that a rollout's steps share are made once."""
    records, found = stored(steps)
    reader, made = BlockReader(found), {}
    for record in records:
        parts, is_equal = take_apart(record, reader, found)
        assert is_equal
        again = put_together(parts, made)
        assert not made.keys() & again.blocks.keys()
        assert set(again.leans_on) <= made.keys()
        made |= again.blocks
        assert payload(record, reader) == payload(again.record, reader)
        assert chains_of(orjson.loads(parts.head)) - {bytes(16)} <= made.keys()

    assert made == found


def test_a_record_with_logprobs_of_float64_has_parts_but_is_not_equal():
    choice = make_choice(0, [7], logprobs=array("d", [-0.1]))
    (wide,), found = stored([make_step("1", [1], choice)])
    parts, is_equal = take_apart(wide, BlockReader(found), found)

    assert not is_equal
    assert (array("i", [7]).tobytes(),) == parts.ids
    assert (array("f", [-0.1]).tobytes(),) == parts.logprobs


def test_damaged_records_and_records_without_their_blocks_are_refused():
    record = encode(make_step("1", list(range(600)), [7]))
    for damaged in (record.record, record.record[:-1], b"", b"TT\x09" + record.record[3:]):
        with pytest.raises(UnreadableRecord):
            take_apart(damaged, BlockReader({}), record.blocks)


@given(st.data())
def test_a_record_of_any_payload_is_equal_or_not_or_refused(draw):
    """Any byte of the content may be another one."""
    (record,), found = stored([make_step("1", [1, 2], [7])])
    reader = BlockReader(found)
    _, raw = payload(record, reader)
    at = draw.draw(st.integers(0, len(raw) - 1))
    changed = raw[:at] + bytes([draw.draw(st.integers(0, 255))]) + raw[at + 1 :]
    try:
        parts, is_equal = take_apart(frame(2, BlockWriter(()).compress(changed)), reader, found)
    except UnreadableRecord:
        return
    if is_equal:
        assert payload(put_together(parts, found).record, reader) == (2, changed)
