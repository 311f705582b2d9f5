"""Reasoning, content and tool calls in generated text."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.simulator.parser import CallDelta, Delta, ParsedReply, StreamParser, ToolCall, parse
from proxy.simulator.template import call_text

CALL = call_text("f", {"a": '}"{', "b": [1, {}]})
OTHER = '<tool_call>{"name":"f", "arguments":3, "id":1}</tool_call>'
PARSED = ToolCall("f", '{"a": "}\\"{", "b": [1, {}]}')


def joined(pieces: list[Delta]) -> ParsedReply:
    calls: list[ToolCall] = []
    for delta in [call for piece in pieces for call in piece.calls]:
        if delta.name is not None:
            calls.append(ToolCall(delta.name, ""))
        calls[delta.index] = ToolCall(calls[delta.index].name, calls[delta.index].arguments + delta.arguments)
    content = "".join(piece.content for piece in pieces)
    return ParsedReply(content or None, "".join(piece.reasoning for piece in pieces) or None, calls)


def fed(text: str, cuts: list[int], *, reasoning: bool = True, tools: bool = True) -> list[Delta]:
    parser = StreamParser(reasoning=reasoning, tools=tools)
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    parts = [text[a:b] for a, b in pairwise(edges)] or [""]
    return [parser.feed(part, ended=index == len(parts) - 1) for index, part in enumerate(parts)]


REPLIES = [
    "Yes.",
    "",
    "a < b",
    CALL,
    f"Look: {CALL}",
    f"{CALL}\n{CALL}",
    f"{CALL} and {CALL}.",
    OTHER,
    "<tool",
    "</think>",
]
REPLIES.append(call_text("f", 3))


@given(st.sampled_from(["Hm.", "", "a<b </thin"]), st.sampled_from(REPLIES), st.lists(st.integers(0, 200)))
def test_streaming_gives_the_same_reply(reasoning, reply, cuts):
    """However a reply is split into pieces, the joined deltas are the reply that is parsed as a whole."""
    text = f"<think>{reasoning}</think>{reply}"
    parsed = parse(text, reasoning=True, tools=True)

    assert ParsedReply(parsed.content, parsed.reasoning, list(parsed.calls)) == joined(fed(text, cuts))


def test_a_reply_has_three_parts():
    """A reply is split into reasoning, content and tool calls; without an end of its reasoning it has no content."""
    text = f"<think>Hm.</think>Look: {CALL}"

    assert ParsedReply("Look: ", "Hm.", [PARSED]) == parse(text, reasoning=True, tools=True)
    assert ParsedReply(None, "Hm") == parse("<think>Hm", reasoning=True, tools=True)


def test_without_tools_a_call_is_content():
    """Without tools, the text of a call is content, streamed or not."""
    assert ParsedReply(CALL) == parse(CALL, reasoning=False, tools=False)
    assert ParsedReply(CALL, None, []) == joined(fed(CALL, [5, 20], reasoning=False, tools=False))


@pytest.mark.parametrize(
    "text",
    [CALL[:-5], "<tool_call>f()</tool_call>", "<tool_call>[]</tool_call>", "<tool_call>{}</tool_call>"],
)
def test_a_malformed_call_is_content(text):
    """In a complete text, a truncated or malformed call stays content."""
    assert ParsedReply(text) == parse(text, reasoning=False, tools=True)


def test_a_truncated_call_is_streamed():
    """In a stream, the name and the arguments so far of a truncated call are sent as a call."""
    pieces = fed('<tool_call>\n{"name": "f", "arguments": {"a": ', [], reasoning=False)

    assert [Delta(calls=[CallDelta(0, "f", '{"a":')])] == pieces


def test_the_name_comes_first():
    """The name of a call is sent once it is complete, then its arguments piece by piece."""
    parser = StreamParser(reasoning=False, tools=True)
    pieces = [
        ("<tool_call>", []),
        ('{"name": "f', []),
        ('"', [("f", "")]),
        (', "arguments": ', []),
        ("{", [(None, "{")]),
    ]
    pieces += [('"a"', [(None, '"a"')]), (": ", [(None, ":")]), ("1", [(None, " 1")]), ("}", [(None, "}")])]
    pieces += [("}", []), ("</tool_call>", [])]
    deltas = [[(call.name, call.arguments) for call in parser.feed(text, ended=False).calls] for text, _ in pieces]

    assert deltas == [expected for _, expected in pieces]
