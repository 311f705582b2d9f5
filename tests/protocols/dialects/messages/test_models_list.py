"""Models in the dialect's shape."""

import pytest
from anthropic.types import ModelInfo

from proxy.protocols.dialects.messages.models_list import model, models


def test_a_list_of_models():
    """One page, as the SDK reads it."""
    told = models(
        {"object": "list", "data": [{"id": "policy", "created": 1795229441, "max_model_len": 2048}, {"id": "b"}]}
    )

    assert (False, "policy", "b") == (told["has_more"], told["first_id"], told["last_id"])
    first = ModelInfo.model_validate(told["data"][0])
    assert ("policy", 2048, 2026) == (first.id, first.max_input_tokens, first.created_at.year)


@pytest.mark.parametrize("listing", [{}, {"data": None}, {"data": []}, {"data": [1]}])
def test_no_models(listing):
    """Whatever the engine answered."""
    assert {"data": [], "has_more": False, "first_id": None, "last_id": None} == models(listing)


@pytest.mark.parametrize("created", [None, "x", -1, 1 << 60, True])
def test_a_model_that_nobody_dates_is_of_the_epoch(created):
    """As the API has it."""
    assert "1970-01-01T00:00:00Z" == model({"id": "m", "created": created})["created_at"]
