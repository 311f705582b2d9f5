"""Reasoning in items: text, encrypted content, summary."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects.responses.request import reasoning_from, seal, unseal


@given(reasoning=st.text())
def test_encrypted_reasoning_is_decoded_to_the_same_text(reasoning):
    assert reasoning == unseal(seal(reasoning))


@pytest.mark.parametrize("sealed", ["", "gAAAA", "tokentape-1.é", "tokentape-1.AAA", "tokentape-1./w=="])
def test_encrypted_content_of_another_server_or_invalid_is_none(sealed):
    assert unseal(sealed) is None


def test_the_reasoning_of_an_item_is_its_text_else_its_encrypted_content_else_its_summary():
    text = {"content": [{"type": "reasoning_text", "text": "a"}, {"type": "text", "text": "b"}]}
    sealed = {"encrypted_content": seal("c")}
    summary = {"summary": [{"type": "summary_text", "text": "d"}, {"type": "summary_text", "text": "e"}]}
    foreign = {"encrypted_content": "gAAAA", "summary": [], "content": None}

    assert ["ab", "c", "d\n\ne", None] == [
        reasoning_from(item, "input[0]") for item in (text | sealed | summary, sealed | summary, summary, foreign)
    ]
    with pytest.raises(UnprocessableRequest, match=r"input\[0\].content\[0\].type"):
        reasoning_from({"content": [{"type": "output_text", "text": ""}]}, "input[0]")
