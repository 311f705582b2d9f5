"""Text that others wrote, made harmless for a terminal."""

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.cli.console import visible, visible_json, visible_lines


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\x9b2J", r"\x9b2J"),
        ("a\nb\r\tc\x07\x7f", r"a\nb\r\tc\x07\x7f"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("\U000e0041", r"\U000e0041"),
        ("\ud800", r"\ud800"),
        ("plain, ümlaut, 漢字, 👩\u200d🚀", "plain, ümlaut, 漢字, 👩\u200d🚀"),
    ],
)
def test_what_a_terminal_would_obey_is_spelt_out(text, shown):
    """Escapes of both kinds, line ends, marks of direction, tags; what people write in stays as it is."""
    assert shown == visible(text)


@settings(max_examples=50)
@given(st.text(st.characters()))
def test_nothing_that_a_terminal_obeys_comes_through(text):
    """Whatever the text; and it can be written as UTF-8, on one line."""
    shown = visible(text)
    shown.encode()

    assert not [one for one in shown if ord(one) < 0x20 or 0x7F <= ord(one) < 0xA0]
    assert 1 == len(shown.splitlines() or [""])


@given(st.text(st.characters(codec="utf-8")))
@settings(max_examples=50)
def test_json_means_the_same_and_holds_nothing_that_a_terminal_obeys(text):
    """It is for programs, and printed on a terminal all the same."""
    shown = visible_json(orjson.dumps({"a": text}).decode())

    assert {"a": text} == orjson.loads(shown)
    assert shown == visible(shown)


def test_json_has_escapes_of_its_own():
    """Those of C1, direction and tags; letters of any script stay."""
    assert r'"\u009b\u202e\udb40\udc41ü漢"' == visible_json('"\x9b\u202e\U000e0041ü漢"')


def test_a_text_of_lines_keeps_them():
    """Tabs become spaces; a carriage return, which could overwrite its line, does not pass."""
    assert ["a   b", "c\\rd", ""] == visible_lines("a\tb\nc\rd\n")
