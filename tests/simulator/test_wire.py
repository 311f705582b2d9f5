"""What responses share: usage, events, weights and experts."""

import ast
from base64 import b64decode
from struct import unpack

from proxy.simulator.wire import (
    EXPERTS_PER_TOKEN,
    LAYERS,
    WeightVersions,
    event,
    experts_as_int32,
    experts_as_npy,
    usage,
)


def test_a_chunk_is_one_event():
    """A chunk is one data line, compact and unescaped, and a blank line."""
    assert event({"a": "é"}) == 'data: {"a":"é"}\n\n'.encode()


def test_usage_counts_prompt_and_completion():
    """Usage has the prompt tokens, the total and the completion tokens, then the details of some responses."""
    assert list(usage(2, 3, more=None).items()) == [
        ("prompt_tokens", 2),
        ("total_tokens", 5),
        ("completion_tokens", 3),
        ("more", None),
    ]


IDS = [5, 6, 7]


def test_a_span_ends_where_the_next_begins():
    """Spans cover a choice without gaps; a version that is recorded twice in a row is one span."""
    versions = WeightVersions()
    for position, version in enumerate(["a", "a", "b", "a"]):
        versions.record(position, version)

    assert versions.spans(4) == [
        {"version": "a", "start": 0, "end": 2},
        {"version": "b", "start": 2, "end": 3},
        {"version": "a", "start": 3, "end": 4},
    ]


def test_spans_end_with_the_choice():
    """A choice has no spans after its end, and an empty choice has none."""
    versions = WeightVersions()
    versions.record(0, "a")
    versions.record(3, "b")

    assert versions.spans(3) == [{"version": "a", "start": 0, "end": 3}]
    assert versions.spans(0) == []


def test_vllms_experts_are_an_npy_array():
    """vLLM's form is a .npy file: a header with type and shape, padded to 64 bytes, then the numbers."""
    raw = b64decode(experts_as_npy(IDS))
    (size,) = unpack("<H", raw[8:10])
    header = ast.literal_eval(raw[10 : 10 + size].decode())

    assert raw[:8] == b"\x93NUMPY\x01\x00"
    assert (10 + size) % 64 == 0
    assert header == {"descr": "<i4", "fortran_order": False, "shape": (2, LAYERS, EXPERTS_PER_TOKEN)}
    assert raw[10 + size :] == b64decode(experts_as_int32(IDS))


def test_the_last_token_has_no_experts():
    """Every token but the last has experts, which depend on the tokens before it."""
    size = 4 * LAYERS * EXPERTS_PER_TOKEN
    raw = b64decode(experts_as_int32(IDS))

    assert len(raw) == 2 * size
    assert raw[:size] == b64decode(experts_as_int32([5, 9]))
    assert experts_as_int32([]) == experts_as_int32([5]) == ""
