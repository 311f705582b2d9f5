"""Conversations: what makes another message, and what an agent changed of one."""

import pytest

from proxy.trajectory.conversation import Digests, calls_tools, change, text_of, thinks, thoughts_of

REPLY = {"role": "assistant", "content": "It is 4."}
LOOK = {"name": "look", "arguments": '{"a": 1, "b": [2]}'}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "function": LOOK}]}


def called(**function) -> dict:
    return {**CALL, "content": "", "tool_calls": [{"id": "y", "type": "function", "function": {**LOOK, **function}}]}


@pytest.mark.parametrize(
    "other",
    [
        {**REPLY, "role": "user"},
        {**REPLY, "content": "It is 5."},
        {**REPLY, "tool_call_id": "x"},
        {**REPLY, "tool_calls": [{"function": LOOK}]},
        "no message",
    ],
)
def test_what_makes_another_message(other):
    """Role, content, calls, and which call it answers."""
    digests = Digests()

    assert digests.of(REPLY) != digests.of(other)
    assert digests.of(CALL) != digests.of(called(name="touch"))
    assert digests.of(CALL) != digests.of(called(arguments="{}"))


def test_what_makes_none():
    """Nulls, reasoning and ids of calls are the engine's."""
    digests = Digests()

    assert digests.of(REPLY) == digests.of({**REPLY, "reasoning": "hm", "refusal": None, "tool_calls": []})
    assert digests.of(CALL) == digests.of(called())


def test_chains_tell_each_beginning():
    """Lists with the same beginning have the same first links."""
    digests = Digests()
    one, other = digests.chain([REPLY, CALL]), digests.chain([REPLY, REPLY])

    assert one[0] == other[0]
    assert one[1] != other[1]
    assert [] == digests.chain("no list")


@pytest.mark.parametrize(
    ("reply", "sent_back", "changed"),
    [
        (REPLY, REPLY, None),
        (REPLY, "no message", None),
        (REPLY, {**REPLY, "content": [{"type": "text", "text": "It is 4."}]}, None),
        (REPLY, {**REPLY, "content": "It is 5."}, "edited"),
        (REPLY, {**REPLY, "content": "It  is 4.\n"}, "whitespace"),
        ({**REPLY, "content": "<think>hm</think>\nIt is 4."}, REPLY, "reasoning_stripped"),
        ({**REPLY, "content": "<think>hm</think>\nIt is 5."}, REPLY, "edited"),
        (CALL, called(arguments='{"b":[2],"a":1}'), "tool_call_rewritten"),
        (CALL, called(arguments={"a": 1, "b": [2]}), "tool_call_rewritten"),
        (CALL, called(arguments='{"a": 2}'), "edited"),
        (CALL, called(arguments="{odd"), "edited"),
        (CALL, {**called(arguments='{"b":[2],"a":1}'), "content": "more"}, "edited"),
    ],
)
def test_what_an_agent_changed(reply, sent_back, changed):
    """Spelling is told from sense."""
    assert changed == change(reply, sent_back)


def test_what_a_reply_has():
    """Thoughts in either place, calls, and text in parts."""
    assert thinks({**REPLY, "reasoning_content": "hm"})
    assert thinks({**REPLY, "content": "hm</think>4"})
    assert not thinks(REPLY)
    assert not thinks(None)
    assert ["hm", "hm", "", ""] == [
        thoughts_of(message)
        for message in ({"reasoning": "hm"}, {"reasoning_content": "hm"}, {"reasoning": ["odd"]}, REPLY)
    ]
    assert calls_tools(CALL)
    assert not calls_tools(REPLY)
    assert "ab" == text_of({"content": [{"text": "a"}, {"image_url": {}}, {"text": "b"}, "odd"]})
