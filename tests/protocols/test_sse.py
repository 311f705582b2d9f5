"""A byte stream is parsed into server-sent events."""

import re
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import EngineEventTooLong
from proxy.protocols.sse import Event, EventParser, read_event


def parse(pieces: list[bytes]) -> list[Event]:
    parser = EventParser()
    events = [event for piece in pieces for event in parser.feed(piece)]
    rest = parser.finish()
    return [*events, rest] if rest else events


def pieces_from(stream: bytes, sizes: list[int]) -> list[bytes]:
    pieces, position = [], 0
    for size in sizes:
        pieces.append(stream[position : position + size])
        position += size
    return [*pieces, stream[position:]]


LINES = st.sampled_from(
    [b"data: {}", b"data:x", b"data: \xf0\x9f\xa6\x8a", b": keep-alive", b"event: sglext_ids", b"id: 1", b"retry", b""]
)
STREAMS = st.lists(st.tuples(LINES, st.sampled_from([b"\n", b"\r\n", b"\r"])), max_size=30).map(
    lambda lines: b"".join(line + end for line, end in lines)
)


@given(STREAMS, st.lists(st.integers(0, 9), max_size=60))
def test_events_do_not_depend_on_the_chunking(stream, sizes):
    assert parse([stream]) == parse(pieces_from(stream, sizes))


@given(STREAMS, st.lists(st.integers(0, 9), max_size=60))
def test_no_byte_is_lost_or_added(stream, sizes):
    """The raw bytes of all events, joined, equal the input."""
    events = parse(pieces_from(stream, sizes))

    assert stream == b"".join(event.raw for event in events)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_lf_crlf_and_cr_end_a_line(end):
    stream = b"event: a" + end + b"data: 1" + end + b"data: 2" + end + end + b"data: 3" + end + end

    assert [(event.name, event.payload) for event in parse([stream])] == [(b"a", b"1\n2"), (b"", b"3")]


def test_a_comment_is_an_event_without_payload():
    assert [Event(b": ping\n\n", b"")] == parse([b": ping\n\n"])


def test_an_incomplete_last_event_is_returned_by_finish():
    parser = EventParser()

    assert parser.feed(b'data: {"id"') == []
    assert Event(b'data: {"id"', b'{"id"') == parser.finish()
    assert parser.finish() is None


def test_an_event_is_returned_at_its_blank_line():
    """It does not wait for the next event."""
    parser = EventParser()

    assert [event.payload for event in parser.feed(b"data: 1\n\ndata: 2\n\ndata")] == [b"1", b"2"]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"data: 1\n\n", b"data: 9\n\n"),
        (b"data: 1\r\n\r\n", b"data: 9\r\n\r\n"),
        (b"event: x\ndata: 1\n\n", b"event: x\ndata: 9\n\n"),
        (b"event: x\r\ndata: 1\r\n\r\n", b"event: x\r\ndata: 9\r\n\r\n"),
    ],
)
def test_replacing_the_payload_keeps_name_and_line_endings(raw, expected):
    event = read_event(raw)

    assert event.before + b"9" + event.after == expected


def test_the_bytes_of_an_event_that_is_too_long_are_forgotten():
    parser = EventParser(limit=1000)
    with pytest.raises(EngineEventTooLong):
        parser.feed(b"data: " + b"x" * 1000) or parser.feed(b"x")

    assert parser.finish() is None


def test_a_long_event_takes_at_most_five_times_its_size_in_memory():
    """A 16 MB event in reads of 64 kB: the pending bytes, the joined event and its payload."""
    piece = b"x" * 2**16
    tracemalloc.start()
    try:
        parser = EventParser()
        for _ in range(256):
            parser.feed(piece)
        assert len(parser.feed(b"\n\n")) == 1
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 5 * 2**24


def test_an_event_longer_than_the_limit_raises():
    """Bytes of other events do not count."""
    parser = EventParser(limit=1000)
    for _ in range(5):
        assert len(parser.feed(b"data: x\n\n" * 9 + b"x" * 900)) == 9
        assert len(parser.rest) == 900
        assert len(parser.feed(b"\n\n")) == 1
    parser.feed(b"x" * 1000)
    with pytest.raises(EngineEventTooLong, match="1000"):
        parser.feed(b"x")


@given(
    st.lists(st.sampled_from([b"data", b"data:", b": ", b" ", b"event:", b"x", b"\n", b"\r\n", b"\r", b"adata:"])).map(
        b"".join
    )
)
def test_fields_are_parsed_as_the_standard_defines(raw):
    """A line is a field name, a colon, one optional space, and a value; other fields are ignored."""
    payload, name = [], b""
    for line in re.split(rb"\r\n|\n|\r", raw):
        field, _, value = line.partition(b":")
        if field == b"data":
            payload.append(value.removeprefix(b" "))
        elif field == b"event":
            name = value.removeprefix(b" ")

    assert (b"\n".join(payload), name) == read_event(raw)[1:3]
