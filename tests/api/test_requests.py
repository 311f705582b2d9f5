"""Rewards and advantages are finite and within the range of float32."""

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, ValidationError

from proxy.api.requests import LARGEST, Signal, Signals, read_object
from proxy.errors import BadRequest, UnprocessableRequest


class Body(BaseModel):
    model_config = ConfigDict(strict=True)

    single: Signal | None = None
    many: Signals = {}


@given(st.floats() | st.integers(-(2**63), 2**64 - 1))
def test_a_signal_is_a_number_within_the_range_of_float32(value):
    """Other numbers are rejected at any depth."""
    fits = -LARGEST <= value <= LARGEST
    for body in ({"single": value}, {"many": {"s": value}}, {"many": {"s": [0, {"t": [value]}]}}):
        if fits:
            assert Body.model_validate(body)
        else:
            with pytest.raises(ValidationError):
                Body.model_validate(body)


@pytest.mark.parametrize("number", ["NaN", "-NaN", "Infinity", "-Infinity", "1e400", "-1e400"])
def test_nan_and_infinity_are_422(number):
    """They are found at any position in the body."""
    with pytest.raises(UnprocessableRequest):
        read_object(f'{{"é": "NaN", "reward": [0, {number}]}}'.encode())


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"a": Nan}', b"\xff"])
def test_a_malformed_body_is_400(text):
    with pytest.raises(BadRequest) as refused:
        read_object(text)

    assert 400 == refused.value.status


@pytest.mark.parametrize("value", [nan, inf, 1e39, "1", None, True])
def test_nan_strings_and_booleans_are_not_signals(value):
    with pytest.raises(ValidationError):
        Body.model_validate({"single": value if value is not None else []})
