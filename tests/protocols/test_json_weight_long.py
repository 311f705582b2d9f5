"""Long texts: the digest and the weight of a text do not depend on the text before."""

from hashlib import blake2b
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.protocols.json_weight import fresh_bytes, most_weight, read_long

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
