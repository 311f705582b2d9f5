"""Queries as OpenAPI describes them; rewards and advantages that are finite and within the range of float32."""

from math import inf, nan

import pytest
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, ValidationError
from yarl import URL

from proxy.api.control import CONTROL_ROUTES
from proxy.api.control.schemas import ListSteps
from proxy.api.requests import LARGEST, Signal, Signals, parameters, query_from, read_object
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

    assert refused.value.status == 400


@pytest.mark.parametrize("value", [nan, inf, 1e39, "1", None, True])
def test_nan_strings_and_booleans_are_not_signals(value):
    with pytest.raises(ValidationError):
        Body.model_validate({"single": value if value is not None else []})


QUERIES = [
    pytest.param(route.query, name, schema, id=f"{route.path}?{name}")
    for route in CONTROL_ROUTES
    if route.query is not None
    for name, schema in parameters(route.query).items()
]


@pytest.mark.parametrize(("model", "name", "schema"), QUERIES)
def test_a_query_takes_the_values_that_openapi_describes_and_no_others(model, name, schema):
    """Texts are stripped only where their length is limited."""
    valid, invalid = values_of(schema)
    required = {"q": "x"} if name != "q" and "q" in parameters(model) else {}
    for text in valid:
        assert getattr(
            query_from(make_mocked_request("GET", str(URL("/").with_query({**required, name: text}))), model), name
        )
    for text in invalid:
        with pytest.raises(BadRequest) as refused:
            query_from(make_mocked_request("GET", str(URL("/").with_query({**required, name: text}))), model)
        assert refused.value.param == name


def values_of(schema):
    """Return texts that are truthy values of this schema, and texts that are none."""
    kind = schema.get("type")
    if "enum" in schema:
        return schema["enum"], ["", "other", schema["enum"][0].upper()]
    if kind == "boolean":
        return ["true"], ["", "1", "True"]
    if kind == "integer":
        most = schema.get("maximum", 10**12 - 1)
        wrong = [schema["minimum"] - 1, most + 1, "", "x", "1.0", "+1", "1_0", " 1", "9" * 5000]
        return [str(schema["minimum"] or 1), str(most)], list(map(str, wrong))
    if kind == "number":
        most = schema.get("maximum", 1e300)
        return [str(most)], ["", "x", "nan", "inf", *([str(most + 1), "-1"] if "maximum" in schema else [])]
    if "minLength" in schema:
        return ["a", " a ", "a" * schema["maxLength"]], ["", " ", "a" * (schema["maxLength"] + 1)]
    return ["a", " "], []


def test_an_unknown_parameter_is_refused_with_the_known_ones():
    request = make_mocked_request("GET", "/?limits=1")
    with pytest.raises(BadRequest, match=r"^Unknown query parameter 'limits'; use one of after, limit\.$"):
        query_from(request, ListSteps)

    assert query_from(request, ListSteps, takes_others=True) == ListSteps()
