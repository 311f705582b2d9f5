"""Which version of the weights sampled which tokens."""

import ast
from base64 import b64decode
from struct import unpack

from proxy.simulator.weights import EXPERTS_PER_TOKEN, LAYERS, Versions, as_int32, as_npy

IDS = [5, 6, 7]


def test_a_span_ends_where_the_next_version_begins():
    """Spans cover a choice without gaps, and one version noted twice is one span."""
    versions = Versions()
    for position, version in enumerate(["a", "a", "b", "a"]):
        versions.note(position, version)

    assert versions.spans(4) == [
        {"version": "a", "start": 0, "end": 2},
        {"version": "b", "start": 2, "end": 3},
        {"version": "a", "start": 3, "end": 4},
    ]


def test_a_choice_that_ended_earlier_has_earlier_spans():
    """What came after a choice's end is not told of it, and an empty choice has no span."""
    versions = Versions()
    versions.note(0, "a")
    versions.note(3, "b")

    assert versions.spans(3) == [{"version": "a", "start": 0, "end": 3}]
    assert versions.spans(0) == []


def test_vllms_form_is_an_array_with_its_shape():
    """It is a .npy file: numbers behind a header that says their type and shape, and is padded to 64 bytes."""
    raw = b64decode(as_npy(IDS))
    (size,) = unpack("<H", raw[8:10])
    header = ast.literal_eval(raw[10 : 10 + size].decode())

    assert raw[:8] == b"\x93NUMPY\x01\x00"
    assert (10 + size) % 64 == 0
    assert header == {"descr": "<i4", "fortran_order": False, "shape": (2, LAYERS, EXPERTS_PER_TOKEN)}
    assert raw[10 + size :] == b64decode(as_int32(IDS))


def test_the_last_token_is_routed_nowhere():
    """A token has experts if another came after it, and they depend on what came before it."""
    size = 4 * LAYERS * EXPERTS_PER_TOKEN
    raw = b64decode(as_int32(IDS))

    assert len(raw) == 2 * size
    assert raw[:size] == b64decode(as_int32([5, 9]))
    assert as_int32([]) == as_int32([5]) == ""
