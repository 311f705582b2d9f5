"""Thought signatures, which clients return unchanged."""

from base64 import b64decode, b64encode, urlsafe_b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects.gemini.contents import NONE, Signature, read_signature, sign

TEXTS = st.none() | st.text(min_size=1, max_size=20)


@given(TEXTS, TEXTS)
def test_a_signature_is_read_as_it_was_written(call_id, thoughts):
    """Also in the alphabet for URLs and without padding, as Google's Python SDK and others encode it again."""
    signature = sign(call_id=call_id, thoughts=thoughts)
    again = urlsafe_b64encode(b64decode(signature)).decode()

    assert (
        Signature(call_id, thoughts)
        == read_signature(signature, "p")
        == read_signature(again, "p")
        == read_signature(again.rstrip("="), "p")
    )


@pytest.mark.parametrize(
    "foreign",
    [
        "",
        "skip_thought_signature_validator",
        "EjQKMgEMOdbHVGd2h5mKkQ==",
        sign(thoughts="x")[:-5],
        sign(thoughts="x") + "é",
        b64encode(b"tokentape[1]").decode(),
        b64encode(b'tokentape{"id": 1, "thoughts": []}').decode(),
    ],
)
def test_a_signature_of_others_is_empty(foreign):
    """Google's, a placeholder, a truncated one."""
    assert NONE == read_signature(foreign, "p")


def test_a_signature_must_be_a_string():
    with pytest.raises(UnprocessableRequest, match="p: must be a string"):
        read_signature(1, "p")
