"""Rewards and advantages: finite, within the range of float32, on every route that takes one."""

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, ValidationError

from proxy.api.reward_values import LARGEST, Signal, Signals, read_object
from proxy.errors import BadRequest, UnprocessableRequest


class Given(BaseModel):
    model_config = ConfigDict(strict=True)

    one: Signal | None = None
    many: Signals = {}


@given(st.floats() | st.integers(-(2**63), 2**64 - 1))
def test_a_signal_is_a_number_that_float32_can_hold(value):
    """Alone and at any depth, all others are refused."""
    fits = -LARGEST <= value <= LARGEST
    for body in ({"one": value}, {"many": {"s": value}}, {"many": {"s": [0, {"t": [value]}]}}):
        if fits:
            assert Given.model_validate(body)
        else:
            with pytest.raises(ValidationError):
                Given.model_validate(body)


@pytest.mark.parametrize("number", ["NaN", "-NaN", "Infinity", "-Infinity", "1e400", "-1e400"])
def test_a_number_that_json_cannot_express_is_not_valid(number):
    """Whatever stands before it."""
    with pytest.raises(UnprocessableRequest):
        read_object(f'{{"é": "NaN", "reward": [0, {number}]}}'.encode())


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"a": Nan}', b"\xff"])
def test_another_body_that_cannot_be_read_is_malformed(text):
    """Its refusal is the usual one."""
    with pytest.raises(BadRequest) as refused:
        read_object(text)

    assert 400 == refused.value.status


@pytest.mark.parametrize("value", [nan, inf, 1e39, "1", None, True])
def test_what_is_no_such_number_is_refused(value):
    """Strings and booleans are none."""
    with pytest.raises(ValidationError):
        Given.model_validate({"one": value if value is not None else []})
