"""Fields of the right type."""

import pytest

from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects.responses.validation import objects, optional, required, strings


def test_a_field_is_of_its_type_or_absent():
    """Null is absent; an integer is a number."""
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
def test_what_is_wrong_is_named(read, message):
    """Where it stands, what it must be and what it is"""
    with pytest.raises(UnprocessableRequest) as refusal:
        read()

    assert message == refusal.value.message
    assert message.split()[0] == refusal.value.param
