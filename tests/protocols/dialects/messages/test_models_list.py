"""The models list in Anthropic's shape."""

import pytest
from anthropic.types import ModelInfo

from proxy.protocols.dialects.messages.models_list import model, models


def test_models_are_one_page_that_the_sdk_reads():
    page = models(
        {"object": "list", "data": [{"id": "policy", "created": 1795229441, "max_model_len": 2048}, {"id": "b"}]}
    )

    assert (False, "policy", "b") == (page["has_more"], page["first_id"], page["last_id"])
    first = ModelInfo.model_validate(page["data"][0])
    assert ("policy", 2048, 2026) == (first.id, first.max_input_tokens, first.created_at.year)


@pytest.mark.parametrize("listing", [{}, {"data": None}, {"data": []}, {"data": [1]}])
def test_a_listing_without_models_is_an_empty_page(listing):
    assert {"data": [], "has_more": False, "first_id": None, "last_id": None} == models(listing)


@pytest.mark.parametrize("created", [None, "x", -1, 1 << 60, True])
def test_a_model_without_a_valid_date_has_the_epochs(created):
    """Anthropic's API documents this."""
    assert "1970-01-01T00:00:00Z" == model({"id": "m", "created": created})["created_at"]
