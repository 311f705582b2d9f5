"""Bodies of the control API."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.api.control.schemas import FinishRollout, OpenRollout, PatchRollout
from proxy.api.requests import read_as
from proxy.errors import BadRequest, UnprocessableRequest


def test_an_empty_body_has_the_default_values():
    assert OpenRollout() == read_as(OpenRollout, b"")


@pytest.mark.parametrize("text", [b'{"status": "open"}', b"{}", b'{"status": "failed", "reward": 1e999}'])
def test_an_invalid_body_is_rejected(text):
    with pytest.raises(BadRequest):
        read_as(FinishRollout, text)


@given(st.binary(max_size=80))
def test_random_bytes_are_parsed_or_rejected(text):
    try:
        read_as(PatchRollout, text)
    except (BadRequest, UnprocessableRequest) as error:
        assert error.status in (400, 422)
