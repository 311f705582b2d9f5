"""Values by their type."""

import pytest

from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects import validation as checked

VALUES = {"null": None, "a boolean": True, "a number": 1.5, "a string": "x", "a list": [], "an object": {}}
TAKES = {
    checked.a_text: {"a string"},
    checked.a_list: {"a list"},
    checked.an_object: {"an object"},
    checked.a_number: {"a number"},
    checked.a_count: set(),
    checked.a_flag: {"a boolean"},
}


@pytest.mark.parametrize("reading", TAKES, ids=lambda reading: reading.__name__)
@pytest.mark.parametrize("kind", VALUES)
def test_what_has_not_the_type_is_refused_by_its_place(reading, kind):
    """And what has it is given back as it is."""
    if kind in TAKES[reading]:
        assert VALUES[kind] is reading(VALUES[kind], "here.0")
        return
    with pytest.raises(UnprocessableRequest, match=rf"^here\.0: must be .*, not {kind}$") as refused:
        reading(VALUES[kind], "here.0")
    assert "here.0" == refused.value.param


def test_a_whole_number_is_no_boolean():
    """Python's True is 1; JSON's is not."""
    assert 3 == checked.a_count(3, "n")
    with pytest.raises(UnprocessableRequest):
        checked.a_count(True, "n")


def test_one_of_a_few_words():
    """Any other is refused with the list of them, and not in full length."""
    assert "b" == checked.one_of("b", "x", ("a", "b"))
    with pytest.raises(UnprocessableRequest, match=r"^x: must be one of a, b, not 'c{64}'$"):
        checked.one_of("c" * 999, "x", ("a", "b"))
