"""Parts of records: a record that is put together from its parts is equal."""

from array import array
from contextlib import suppress

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.any_json import odd_steps
from tests.support.forests import make_choice, make_step, rollouts

from proxy.rollouts.archive.rows import chains_of, put_together, take_apart
from proxy.trajectory.blocks import BlockReader, BlockWriter
from proxy.trajectory.codec import UnreadableRecord, encode, frame, open_frame


def stored(steps):
    """Return the records of steps in one rollout, and their blocks."""
    found, records = {}, []
    for step in steps:
        with suppress(TypeError, ValueError, AttributeError):  # a failed write stores nothing
            record = encode(step, found.keys())
            found |= record.blocks
            records.append(record.record)
    return records, found


def content(record, reader):
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
        assert content(record, reader) == content(again.record, reader)
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
    _, raw = content(record, reader)
    at = draw.draw(st.integers(0, len(raw) - 1))
    changed = raw[:at] + bytes([draw.draw(st.integers(0, 255))]) + raw[at + 1 :]
    try:
        parts, is_equal = take_apart(frame(2, BlockWriter(()).compress(changed)), reader, found)
    except UnreadableRecord:
        return
    if is_equal:
        assert content(put_together(parts, found).record, reader) == (2, changed)
