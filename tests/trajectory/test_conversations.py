"""The index of replies, and the comparison of messages by what agents send back."""

from hashlib import blake2b
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.trajectory.conversations import (
    Digests,
    NewestMessages,
    Replies,
    Reply,
    calls_tools,
    text_of,
    thinks,
    thoughts_of,
)

REPLY = {"role": "assistant", "content": "It is 4."}
LOOK = {"name": "look", "arguments": '{"a": 1, "b": [2]}'}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "x", "function": LOOK}]}


def test_replies_are_found_by_their_places_and_keys():
    """The last place first, and of each key the oldest reply first."""
    replies = Replies()
    for place, key, reply in [("a", 1, "r1"), ("b", 1, "r2"), ("b", 2, "r3"), ("b", 1, "r4")]:
        replies.add(place, key, reply)

    assert list(replies.follow(["a", "c", "b"])) == [(2, {1: ["r2", "r4"], 2: ["r3"]}), (0, {1: ["r1"]})]
    assert (replies.at("a"), replies.at("c")) == ({1: ["r1"]}, {})


def called(**function) -> dict:
    return {**CALL, "content": "", "tool_calls": [{"id": "y", "type": "function", "function": {**LOOK, **function}}]}


@pytest.mark.parametrize(
    "other",
    [
        {**REPLY, "role": "user"},
        {**REPLY, "content": "It is 5."},
        {**REPLY, "tool_call_id": "x"},
        {**REPLY, "tool_calls": [{"function": LOOK}]},
        {**REPLY, "function_call": LOOK},
        "no message",
    ],
)
def test_role_content_tool_calls_and_call_id_distinguish_messages(other):
    digests = Digests()

    assert digests.of(REPLY) != digests.of(other)
    assert digests.of(CALL) != digests.of(called(name="touch"))
    assert digests.of(CALL) != digests.of(called(arguments="{}"))


def test_names_distinguish_messages_but_not_replies():
    """Engines return replies without one, and some agents name them."""
    digests, user = Digests(), {"role": "user", "content": "Hi"}

    assert len({digests.of(message) for message in (user, {**user, "name": "a"}, {**user, "name": "b"})}) == 3
    assert digests.of(user) == digests.of({**user, "name": None})
    assert digests.of(REPLY) == digests.of({**REPLY, "name": "helper"})


def test_nulls_reasoning_and_tool_call_ids_do_not_distinguish_messages():
    digests = Digests()

    assert digests.of(REPLY) == digests.of({**REPLY, "reasoning": "hm", "refusal": None, "tool_calls": []})
    assert digests.of(CALL) == digests.of(called())


def test_text_parts_are_the_text_that_the_engine_makes_of_them():
    """Their other fields make no difference; SGLang joins them with a space. Other parts are compared as they are."""
    digests, newest = Digests(), NewestMessages()
    parts = [
        {"type": "text", "text": "Seven", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "birds"},
    ]
    user = {"role": "user", "content": parts}

    assert digests.of(user) == digests.of({"role": "user", "content": "Seven\nbirds"})
    assert digests.of({"role": "user", "content": parts[:1]}) == digests.of({"role": "user", "content": "Seven"})
    image = {"type": "image_url", "image_url": {"url": "data:a"}}
    assert digests.of(user) != digests.of({"role": "user", "content": [*parts, image]})
    newest.joint = " "
    assert newest.chain([user]) == newest.chain([{"role": "user", "content": "Seven birds"}])


def test_equal_prefixes_have_equal_digests():
    digests = Digests()
    first, second = digests.chain([REPLY, CALL]), digests.chain([REPLY, REPLY])

    assert first[0] == second[0]
    assert first[1] != second[1]
    assert digests.chain("no list") == []


@given(
    st.lists(
        st.lists(
            st.sampled_from(
                [REPLY, CALL, {**REPLY, "content": [1]}, {**REPLY, "content": [1.0]}, {**REPLY, "x": 2**70}]
            ),
            max_size=5,
        )
    )
)
def test_messages_have_the_same_digests_after_any_others(lists):
    """Also where Python's values are equal and their JSON is not, and with numbers that orjson does not write."""
    newest, digests = NewestMessages(), Digests()
    for messages in lists:
        assert Digests().chain(messages) == newest.chain(messages) == digests.chain(messages)


def test_the_text_of_parts_depends_on_what_the_engine_writes_between_them():
    """Also if the messages are those before."""
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    newest = NewestMessages()
    before = newest.chain([parts])
    newest.joint = " "

    assert Digests().chain([parts]) == before != newest.chain([parts]) == Digests().chain([{**parts, "content": "a b"}])


def test_messages_are_digested_once():
    newest, long = NewestMessages(), {**REPLY, "content": "a" * 70_000}
    first = newest.chain([long, REPLY])
    with patch("proxy.trajectory.conversations.blake2b", side_effect=blake2b) as hashed:
        second = newest.chain([long, REPLY, CALL])

    assert (second[:2], hashed.call_count) == (first, 2)
    assert 70_000 < newest.size < 71_000
    newest.chain([REPLY])
    assert newest.size < 1000


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
        (CALL, called(arguments='{"a": 1.0, "b": [2]}'), "edited"),
        (CALL, called(arguments={"a": True, "b": [2]}), "edited"),
        (called(arguments={"a": 1}), called(arguments={"a": True}), "edited"),
        (CALL, called(arguments="{odd"), "edited"),
        (CALL, {**called(arguments='{"b":[2],"a":1}'), "content": "more"}, "edited"),
    ],
)
def test_a_change_is_a_rewritten_call_an_edit_or_dropped_reasoning(reply, sent_back, changed):
    """Whitespace of arguments is distinguished from their value."""
    assert changed == Reply(reply).change(sent_back)


def test_reasoning_tool_calls_and_text_of_a_reply_are_found():
    """Reasoning in either field or in think tags; text in content parts."""
    assert thinks({**REPLY, "reasoning_content": "hm"})
    assert thinks({**REPLY, "content": "hm</think>4"})
    assert not thinks(REPLY)
    assert not thinks(None)
    assert [
        thoughts_of(message)
        for message in ({"reasoning": "hm"}, {"reasoning_content": "hm"}, {"reasoning": ["odd"]}, REPLY)
    ] == ["hm", "hm", "", ""]
    assert calls_tools(CALL)
    assert not calls_tools(REPLY)
    assert text_of({"content": [{"text": "a"}, {"image_url": {}}, {"text": "b"}, "odd"]}) == "ab"
