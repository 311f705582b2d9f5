"""The spellings of fields that Google's API accepts, all of which are in its documentation."""

import pytest

from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects.gemini.fields import (
    an_integer,
    at,
    objects,
    one_of_names,
    optional,
    required,
    snake_case,
    texts,
)
from proxy.protocols.dialects.validation import a_text


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("systemInstruction", "system_instruction"),
        ("topK", "top_k"),
        ("parametersJsonSchema", "parameters_json_schema"),
    ],
)
def test_a_field_is_found_by_either_name(name, other):
    """A null is an absent field."""
    assert other == snake_case(name)
    assert (1, name) == at({name: 1}, name) == at({other: 1, name: None}, name)
    assert (None, f"a.{name}") == at({name: None}, name, "a")


def test_a_field_with_both_names_is_rejected():
    with pytest.raises(UnprocessableRequest, match="a.topK: is present twice, also as top_k"):
        at({"topK": 1, "top_k": 1}, "topK", "a")


def test_an_optional_field_may_be_absent_and_a_required_one_may_not():
    """Both are checked if they are present."""
    assert (None, "x") == (optional(a_text, {}, "a"), optional(a_text, {"a": "x"}, "a"))
    with pytest.raises(UnprocessableRequest, match="b.a: must be a string, not a number"):
        optional(a_text, {"a": 1}, "a", "b")
    with pytest.raises(UnprocessableRequest, match="b.a: must be a string, not null"):
        required(a_text, {}, "a", "b")


def test_an_object_may_be_in_place_of_a_list():
    """Google's examples with curl have `"parts": {"text": …}`."""
    assert [({"a": 1}, "p[0]")] == objects({"a": 1}, "p") == objects([{"a": 1}], "p")
    with pytest.raises(UnprocessableRequest, match=r"p\[1\]: must be an object"):
        objects([{}, 1], "p")
    with pytest.raises(UnprocessableRequest, match=r"p\[0\]: must be a string"):
        texts([1], "p")


def test_an_integer_may_be_a_float_without_a_fraction():
    """The SDKs send `topK: 40.0`; one beyond 64 bits could not be sent to an engine."""
    assert (40, int) == (an_integer(40.0, "a"), type(an_integer(40.0, "a")))
    for value in (1.5, True, "1", float("inf"), 1e300, -(2.0**63)):
        with pytest.raises(UnprocessableRequest, match="a: must be an integer"):
            an_integer(value, "a")


def test_an_enum_has_any_case():
    assert 1 == one_of_names("any", "m", {"ANY": 1, "NONE": 2}) == one_of_names("ANY", "m", {"ANY": 1})
    with pytest.raises(UnprocessableRequest, match="m: must be one of ANY, NONE, not 'SOME'"):
        one_of_names("some", "m", {"ANY": 1, "NONE": 2})
