"""Thoughts in items."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects.responses.response_object import reasoning_from, seal, unseal


@given(thoughts=st.text())
def test_sealed_thoughts_are_opened_again(thoughts):
    """The same text, byte for byte."""
    assert thoughts == unseal(seal(thoughts))


@pytest.mark.parametrize("sealed", ["", "gAAAA", "tokentape-1.é", "tokentape-1.AAA", "tokentape-1./w=="])
def test_other_seals_stay_closed(sealed):
    """Somebody else's, and broken ones."""
    assert unseal(sealed) is None


def test_what_an_item_thinks():
    """Its text goes before its seal, and the seal before its summary; an item with neither carries nothing."""
    text = {"content": [{"type": "reasoning_text", "text": "a"}, {"type": "text", "text": "b"}]}
    sealed = {"encrypted_content": seal("c")}
    summary = {"summary": [{"type": "summary_text", "text": "d"}, {"type": "summary_text", "text": "e"}]}
    foreign = {"encrypted_content": "gAAAA", "summary": [], "content": None}

    assert ["ab", "c", "d\n\ne", None] == [
        reasoning_from(item, "input[0]") for item in (text | sealed | summary, sealed | summary, summary, foreign)
    ]
    with pytest.raises(UnprocessableRequest, match=r"input\[0\].content\[0\].type"):
        reasoning_from({"content": [{"type": "output_text", "text": ""}]}, "input[0]")
