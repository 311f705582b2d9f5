"""The estimate of the memory that parsing takes."""

import tracemalloc

import orjson
import pytest

from proxy.protocols.json_weight import most_weight, stream_weight
from proxy.protocols.sse import EventParser


@pytest.mark.parametrize(
    "piece",
    ["[],", "{},", '{"a":{}},', "1234567,", '"ab",', "1.5,", '{"1":{"logprob":-1.5,"rank":1,"decoded_token":"a"}},'],
)
def test_the_weight_of_a_text_is_about_the_memory_of_its_values_or_more(piece):
    """Within 10 %."""
    text = f"[{piece * 20_000}1]".encode()
    tracemalloc.start()
    try:
        value = orjson.loads(text)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert value
    assert size < 1.1 * most_weight(text)


@pytest.mark.parametrize("piece", [b"\n\n", b":\n\n", b"\r\r", b"data: 1\n\n"])
def test_the_weight_of_a_response_covers_very_short_events(piece):
    text = piece * 10_000
    tracemalloc.start()
    try:
        events = EventParser().feed(text)
        held = [event.raw for event in events]
        del events
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert held
    assert size < stream_weight(text)
