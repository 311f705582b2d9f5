"""Ids of responses and items contain the id of their step."""

import pytest

from proxy.protocols.dialects.responses.item_ids import (
    CUSTOM_CALL,
    FUNCTION_CALL,
    INPUT,
    MESSAGE,
    REASONING,
    item_name,
    response_name,
    step_of,
)

STEP = "01ARZ3NDEKTSV4RRFFQ69G5FAV"


def test_the_step_id_is_read_from_each_kind_of_id():
    kinds = (MESSAGE, REASONING, FUNCTION_CALL, CUSTOM_CALL, INPUT)

    assert {step_of(name) for name in [response_name(STEP), *(item_name(kind, STEP, 12) for kind in kinds)]} == {STEP}


@pytest.mark.parametrize(
    "name",
    [None, 7, "", "resp_", f"resp_{STEP}x", f"msg_{STEP}", f"x_{STEP}_0", f"resp_{STEP}_0", f"msg_{STEP}_", "msg_68f0"],
)
def test_other_ids_have_no_step(name):
    """Other servers', and values that are not ids."""
    assert step_of(name) is None
