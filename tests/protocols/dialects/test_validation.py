"""Values of a request are validated by their JSON type."""

import pytest

from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects import validation as checked
from proxy.protocols.dialects.validation import a_text, an_object, at, objects, optional, required, snake_case, texts

VALUES = {"null": None, "a boolean": True, "a number": 1.5, "a string": "x", "a list": [], "an object": {}}
ACCEPTED = {
    checked.a_text: {"a string"},
    checked.a_list: {"a list"},
    checked.an_object: {"an object"},
    checked.a_number: {"a number"},
    checked.a_count: set(),
    checked.a_flag: {"a boolean"},
}


@pytest.mark.parametrize("reading", ACCEPTED, ids=["text", "list", "object", "number", "count", "flag"])
@pytest.mark.parametrize("kind", VALUES)
def test_a_value_of_another_type_raises_with_its_path(reading, kind):
    if kind in ACCEPTED[reading]:
        assert VALUES[kind] is reading(VALUES[kind], "here.0")
        return
    with pytest.raises(UnprocessableRequest, match=rf"^here\.0: must be .*, not {kind}$") as raised:
        reading(VALUES[kind], "here.0")
    assert raised.value.param == "here.0"


def test_an_integer_is_not_a_boolean():
    """In Python, True == 1."""
    assert checked.a_count(3, "n") == 3
    with pytest.raises(UnprocessableRequest):
        checked.a_count(True, "n")


def test_a_value_outside_an_enumeration_raises_with_the_allowed_values():
    """The value in the message is truncated."""
    assert checked.one_of("b", "x", ("a", "b")) == "b"
    with pytest.raises(UnprocessableRequest, match=r"^x: must be one of a, b, not 'c{64}'$"):
        checked.one_of("c" * 999, "x", ("a", "b"))


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
    assert at({name: 1}, name) == at({other: 1, name: None}, name) == (1, name)
    assert at({name: None}, name, "a") == (None, f"a.{name}")


def test_a_field_with_both_names_is_rejected():
    with pytest.raises(UnprocessableRequest, match="a.topK: is present twice, also as top_k"):
        at({"topK": 1, "top_k": 1}, "topK", "a")


def test_an_optional_field_may_be_absent_and_a_required_one_may_not():
    """Both are checked if they are present."""
    assert (optional(a_text, {}, "a"), optional(a_text, {"a": "x"}, "a")) == (None, "x")
    with pytest.raises(UnprocessableRequest, match="b.a: must be a string, not a number"):
        optional(a_text, {"a": 1}, "a", "b")
    with pytest.raises(UnprocessableRequest, match="b.a: must be a string, not null"):
        required(a_text, {}, "a", "b")


def test_the_entries_of_a_list_have_its_path():
    assert objects([{"a": 1}], "p") == [({"a": 1}, "p[0]")]
    assert texts(["", "x"], "p") == ["", "x"]


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda: optional(checked.a_count, {"a": True}, "a"), "a: must be an integer, not a boolean"),
        (lambda: optional(checked.a_count, {"a": 1.5}, "a", "b[0]"), "b[0].a: must be an integer, not a number"),
        (lambda: required(an_object, {"a": None}, "a"), "a: must be an object, not null"),
        (lambda: objects([{}, []], "a"), "a[1]: must be an object, not a list"),
        (lambda: texts(["", {}], "a"), "a[1]: must be a string, not an object"),
        (lambda: objects({}, "a"), "a: must be a list, not an object"),
    ],
)
def test_the_error_names_the_path_the_expected_and_the_actual_type(read, message):
    with pytest.raises(UnprocessableRequest) as raised:
        read()

    assert message == raised.value.message
    assert message.partition(":")[0] == raised.value.param
