"""Values of a request are validated by their JSON type."""

import pytest

from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects import validation as checked

VALUES = {"null": None, "a boolean": True, "a number": 1.5, "a string": "x", "a list": [], "an object": {}}
ACCEPTED = {
    checked.a_text: {"a string"},
    checked.a_list: {"a list"},
    checked.an_object: {"an object"},
    checked.a_number: {"a number"},
    checked.a_count: set(),
    checked.a_flag: {"a boolean"},
}


@pytest.mark.parametrize("reading", ACCEPTED, ids=lambda reading: reading.__name__)
@pytest.mark.parametrize("kind", VALUES)
def test_a_value_of_another_type_raises_with_its_path(reading, kind):
    if kind in ACCEPTED[reading]:
        assert VALUES[kind] is reading(VALUES[kind], "here.0")
        return
    with pytest.raises(UnprocessableRequest, match=rf"^here\.0: must be .*, not {kind}$") as raised:
        reading(VALUES[kind], "here.0")
    assert "here.0" == raised.value.param


def test_an_integer_is_not_a_boolean():
    """In Python, True == 1."""
    assert 3 == checked.a_count(3, "n")
    with pytest.raises(UnprocessableRequest):
        checked.a_count(True, "n")


def test_a_value_outside_an_enumeration_raises_with_the_allowed_values():
    """The value in the message is truncated."""
    assert "b" == checked.one_of("b", "x", ("a", "b"))
    with pytest.raises(UnprocessableRequest, match=r"^x: must be one of a, b, not 'c{64}'$"):
        checked.one_of("c" * 999, "x", ("a", "b"))
