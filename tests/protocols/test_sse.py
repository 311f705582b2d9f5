"""Cutting a byte stream into events."""

import re
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import EngineEventTooLong
from proxy.protocols.sse import Event, EventParser, read_event


def cut(pieces: list[bytes]) -> list[Event]:
    cutter = EventParser()
    events = [event for piece in pieces for event in cutter.feed(piece)]
    rest = cutter.finish()
    return [*events, rest] if rest else events


def pieces_of(stream: bytes, sizes: list[int]) -> list[bytes]:
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
def test_any_cut_gives_the_same_events(stream, sizes):
    """However the bytes are cut, the same events come out."""
    assert cut([stream]) == cut(pieces_of(stream, sizes))


@given(STREAMS, st.lists(st.integers(0, 9), max_size=60))
def test_no_byte_is_lost_or_added(stream, sizes):
    """The raw bytes of all events, joined, are the bytes that came."""
    events = cut(pieces_of(stream, sizes))

    assert stream == b"".join(event.raw for event in events)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_every_line_ending_of_the_standard_ends_a_line(end):
    """LF, CRLF and CR end lines alike."""
    stream = b"event: a" + end + b"data: 1" + end + b"data: 2" + end + end + b"data: 3" + end + end

    assert [(b"a", b"1\n2"), (b"", b"3")] == [(event.name, event.payload) for event in cut([stream])]


def test_a_comment_is_an_event_without_payload():
    """A keep-alive comment is kept as it came and means nothing."""
    assert [Event(b": ping\n\n", b"")] == cut([b": ping\n\n"])


def test_an_event_that_was_cut_off_comes_last():
    """Bytes after the last blank line are given when the stream is over, and not before."""
    cutter = EventParser()

    assert [] == cutter.feed(b'data: {"id"')
    assert Event(b'data: {"id"', b'{"id"') == cutter.finish()
    assert cutter.finish() is None


def test_an_event_is_given_as_soon_as_it_is_whole():
    """Nothing waits for the event after it."""
    cutter = EventParser()

    assert [b"1", b"2"] == [event.payload for event in cutter.feed(b"data: 1\n\ndata: 2\n\ndata")]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"data: 1\n\n", b"data: 9\n\n"),
        (b"data: 1\r\n\r\n", b"data: 9\r\n\r\n"),
        (b"event: x\ndata: 1\n\n", b"event: x\ndata: 9\n\n"),
        (b"event: x\r\ndata: 1\r\n\r\n", b"event: x\r\ndata: 9\r\n\r\n"),
    ],
)
def test_another_payload_keeps_the_framing(raw, expected):
    """An event whose payload was changed keeps its name and its line endings."""
    assert expected == read_event(raw).with_payload(b"9")


@pytest.mark.parametrize("filler", [b"x", b"\r", b"x\n", b"data: \r\n"])
def test_the_time_of_a_long_event_is_linear(filler):
    """A four times longer event takes about four times the CPU time, not sixteen times; with CRs in it as well."""
    piece = b"data: " + filler * (8_192 // len(filler)) if filler != b"\r" else (b"x" * 4_095 + b"\r") * 2

    def cpu_s(reads: int) -> float:
        cutter, before = EventParser(limit=2**30), time.thread_time()
        for _ in range(reads):
            assert [] == cutter.feed(piece)
        assert len(cutter.rest) == reads * len(piece)
        assert 1 == len(cutter.feed(b"x\n\n"))
        return time.thread_time() - before

    short, long = (min(cpu_s(reads) for _ in range(3)) for reads in (512, 2048))

    assert long < 9 * short


def test_a_long_event_costs_a_few_times_its_bytes_in_memory():
    """32 MB of it in reads of 64 kB: the bytes pending, the joined event and its payload."""
    piece = b"x" * 2**16
    tracemalloc.start()
    try:
        cutter = EventParser()
        for _ in range(512):
            cutter.feed(piece)
        assert 1 == len(cutter.feed(b"\n\n"))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert most < 5 * 2**25


def test_one_event_has_a_limit():
    """Over it the engine is at fault; bytes of other events do not count."""
    cutter = EventParser(limit=1000)
    for _ in range(5):
        assert 9 == len(cutter.feed(b"data: x\n\n" * 9 + b"x" * 900))
        assert 900 == len(cutter.rest)
        assert 1 == len(cutter.feed(b"\n\n"))
    cutter.feed(b"x" * 1000)
    with pytest.raises(EngineEventTooLong, match="1000"):
        cutter.feed(b"x")


@given(
    st.lists(st.sampled_from([b"data", b"data:", b": ", b" ", b"event:", b"x", b"\n", b"\r\n", b"\r", b"adata:"])).map(
        b"".join
    )
)
def test_fields_are_read_as_the_standard_reads_lines(raw):
    """A line is a field name, a colon, one space that is left out, and a value; other fields mean nothing."""
    payload, name = [], b""
    for line in re.split(rb"\r\n|\n|\r", raw):
        field, _, value = line.partition(b":")
        if field == b"data":
            payload.append(value.removeprefix(b" "))
        elif field == b"event":
            name = value.removeprefix(b" ")

    assert (b"\n".join(payload), name) == read_event(raw)[1:]
