"""Thoughts, content and tool calls in generated text."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.simulator.parser import Call, CallPiece, Parsed, Piece, PieceParser, parse
from proxy.simulator.template import call_text

CALL = call_text("f", {"a": '}"{', "b": [1, {}]})
OTHER = '<tool_call>{"name":"f", "arguments":3, "id":1}</tool_call>'
PARSED = Call("f", '{"a": "}\\"{", "b": [1, {}]}')


def fold(pieces: list[Piece]) -> Parsed:
    calls: list[Call] = []
    for told in [call for piece in pieces for call in piece.calls]:
        if told.name is not None:
            calls.append(Call(told.name, ""))
        calls[told.place] = Call(calls[told.place].name, calls[told.place].arguments + told.arguments)
    content = "".join(piece.content for piece in pieces)
    return Parsed(content or None, "".join(piece.reasoning for piece in pieces) or None, calls)


def fed(text: str, cuts: list[int], *, thinking: bool = True, tools: bool = True) -> list[Piece]:
    parser = PieceParser(thinking=thinking, tools=tools)
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    parts = [text[a:b] for a, b in pairwise(edges)] or [""]
    return [parser.feed(part, ended=place == len(parts) - 1) for place, part in enumerate(parts)]


REPLIES = [
    "Yes.",
    "",
    "a < b",
    CALL,
    f"Look: {CALL}",
    f"{CALL}\n{CALL}",
    f"{CALL} and {CALL}.",
    call_text("f", 3),
    OTHER,
    "<tool",
    "</think>",
]


@given(st.sampled_from(["Hm.", "", "a<b </thin"]), st.sampled_from(REPLIES), st.lists(st.integers(0, 200)))
def test_pieces_folded_are_the_whole(thought, reply, cuts):
    """However a reply is cut into pieces, folded they are what the whole is understood as."""
    text = f"<think>{thought}</think>{reply}"
    whole = parse(text, thinking=True, tools=True)

    assert Parsed(whole.content, whole.reasoning, list(whole.calls)) == fold(fed(text, cuts))


def test_a_reply_has_three_parts():
    """A thought, content and tool calls are told apart."""
    text = f"<think>Hm.</think>Look: {CALL}"

    assert Parsed("Look: ", "Hm.", [PARSED]) == parse(text, thinking=True, tools=True)


def test_a_thought_may_never_end():
    """A reply that ends while thinking has no content."""
    assert Parsed(None, "Hm") == parse("<think>Hm", thinking=True, tools=True)


def test_a_call_that_was_not_offered_is_content():
    """Without tools, the text of a call is content, whole and in pieces."""
    assert Parsed(CALL) == parse(CALL, thinking=False, tools=False)
    assert Parsed(CALL, None, []) == fold(fed(CALL, [5, 20], thinking=False, tools=False))


@pytest.mark.parametrize(
    "text",
    [CALL[:-5], "<tool_call>f()</tool_call>", "<tool_call>[]</tool_call>", "<tool_call>{}</tool_call>"],
)
def test_a_broken_call_is_content(text):
    """Understood whole, a call that was cut off or is malformed stays text."""
    assert Parsed(text) == parse(text, thinking=False, tools=True)


def test_a_call_that_was_cut_off_was_told_in_pieces():
    """In pieces, the name and the arguments so far have been told when a call is cut off."""
    pieces = fed('<tool_call>\n{"name": "f", "arguments": {"a": ', [], thinking=False)

    assert [Piece(calls=[CallPiece(0, "f", '{"a":')])] == pieces


def test_the_name_is_told_first():
    """The name of a call is told as soon as it is whole, then its arguments piece by piece."""
    parser = PieceParser(thinking=False, tools=True)
    texts = [
        "<tool_call>",
        '{"name": "f',
        '"',
        ', "arguments": ',
        "{",
        '"a"',
        ": ",
        "1",
        "}",
        "}",
        "</tool_call>",
    ]
    told = [[(call.name, call.arguments) for call in parser.feed(text, ended=False).calls] for text in texts]

    assert told == [
        [],
        [],
        [("f", "")],
        [],
        [(None, "{")],
        [(None, '"a"')],
        [(None, ":")],
        [(None, " 1")],
        [(None, "}")],
        [],
        [],
    ]
