"""Fields of a request are validated by type."""

import pytest

from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects.responses.validation import objects, optional, required, strings


def test_a_field_has_its_type_or_is_absent():
    """Null counts as absent; an integer is a number."""
    body = {"a": 1, "b": None, "c": True}

    assert (1, 1, None, None, True) == (
        optional(body, "a", int), optional(body, "a", float), optional(body, "b", str), optional(body, "x", str),
        required(body, "c", bool),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda: optional({"a": True}, "a", int), "a must be an integer, not true or false"),
        (lambda: optional({"a": 1.5}, "a", int, "b[0]"), "b[0].a must be an integer, not a number"),
        (lambda: required({"a": None}, "a", dict), "a must be an object, not null"),
        (lambda: objects([{}, []], "a"), "a[1] must be an object, not a list"),
        (lambda: strings(["", {}], "a"), "a[1] must be a string, not an object"),
    ],
)
def test_the_error_names_the_path_the_expected_and_the_actual_type(read, message):
    with pytest.raises(UnprocessableRequest) as raised:
        read()

    assert message == raised.value.message
    assert message.split()[0] == raised.value.param
