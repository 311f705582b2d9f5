"""The estimate of the memory that parsing takes, and the digests of long texts, which do not depend on the text before."""

import tracemalloc
from hashlib import blake2b
from unittest.mock import patch

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.protocols.json_weight import fresh_bytes, most_weight, read_long, stream_weight
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


TEXTS = st.text('a"{[,\\', max_size=60).map(str.encode)


def digest_of(text):
    """The digest of a request body."""
    return blake2b(text, digest_size=16).hexdigest()


@given(st.lists(TEXTS, min_size=1, max_size=4), st.integers(1, 20))
def test_a_text_has_the_same_digest_and_weight_after_any_other(texts, size):
    """However it is cut into pieces."""
    before = None
    with patch("proxy.protocols.json_weight._PIECE_BYTES", size):
        for text in (*texts, texts[0] + texts[-1]):
            before = read_long(text, before)

            assert (digest_of(text), most_weight(text)) == (before.digest, before.weight)
            assert text.startswith(b"".join(piece.text for piece in before.pieces))


@pytest.mark.parametrize(
    ("text", "hashed"), [(b"aabbcc", 0), (b"aabbccd", 1), (b"aabbc", 1), (b"aabbxxd", 3), (b"xa", 2)]
)
def test_only_what_follows_the_common_beginning_is_hashed(text, hashed):
    with patch("proxy.protocols.json_weight._PIECE_BYTES", 2):
        before = read_long(b"aabbcc", None)
        with patch("proxy.protocols.json_weight.most_weight", side_effect=most_weight) as counted:
            read_long(text, before)

    assert hashed == sum(len(call.args[0]) for call in counted.call_args_list)


@pytest.mark.parametrize(
    ("text", "fresh"), [(b"aabbccdd", 2), (b"aabbcc", 0), (b"aabbxxdd", 8), (b"aabb", 4), (b"aabbccddddd", 11)]
)
def test_a_text_is_fresh_after_the_text_before_if_that_is_its_beginning(text, fresh):
    """A text of more than 10 bytes is fresh as a whole here."""
    with (
        patch("proxy.protocols.json_weight._PIECE_BYTES", 2),
        patch("proxy.protocols.json_weight._LIGHT_BYTES", 10),
    ):
        assert fresh == fresh_bytes(text, read_long(b"aabbcc", None))


def test_a_text_after_one_of_many_values_is_fresh_as_a_whole():
    """Parsing it takes as long as parsing a longer text, even if its beginning is known."""
    before = b"[" * 2**16

    assert len(before) + 1 == fresh_bytes(before + b"[", read_long(before, None))
