"""Turns of a conversation."""

import pytest

from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects.messages.messages import read_conversation
from proxy.protocols.dialects.translation import TranslationOptions


def text(said, **extra):
    return {"type": "text", "text": said, **extra}


def thinks(thought):
    return {"type": "thinking", "thinking": thought, "signature": "sig_1"}


def uses(told="c1", given=None):
    return {"type": "tool_use", "id": told, "name": "f", "input": {"a": 1} if given is None else given}


def result(told="c1", content="r"):
    return {"type": "tool_result", "tool_use_id": told, "content": content}


def said(*messages, options=TranslationOptions(), sampled=(), **fields):  # noqa: B008 - frozen
    turns = [{"role": role, "content": content} for role, content in messages]
    return read_conversation({"messages": turns, **fields}, options, dict(sampled))


HI = {"role": "user", "content": "hi"}
BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=0a1b2;"
IMAGE = {"type": "image", "source": {"type": "url", "url": "u"}}
PICTURE = {"type": "image_url", "image_url": {"url": "u"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {"role": "tool", "tool_call_id": "c1", "content": "r"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        ("S", "S"),
        ("", None),
        ([], None),
        ([text("")], None),
        ([text("S")], "S"),
        ([text("S", cache_control={"type": "ephemeral"}), text(""), text("T")], "ST"),
        ([text(BILLING), text("S")], "S"),
        ([text(BILLING)], None),
    ],
)
def test_the_system_message(given, expected):
    """One message of all blocks, with nothing between, and without Claude Code's attribution, which differs in each call."""
    assert [*([] if expected is None else [{"role": "system", "content": expected}]), HI] == said(
        ("user", "hi"), system=given
    )


def test_what_stands_between_the_texts_of_systems_is_the_engines():
    """SGLang's endpoint has a line break there."""
    assert (
        "S\nT"
        == said(("user", "hi"), system=[text("S"), text("T")], options=TranslationOptions(system_joint="\n"))[0][
            "content"
        ]
    )


def test_a_single_block_is_said_as_its_text():
    """Agents turn strings into blocks as they move their cache marks: the prompt stays the same."""
    assert [{"role": "user", "content": "hi"}] == said(("user", "hi"))
    assert said(("user", "hi")) == said(("user", [text("hi", cache_control={"type": "ephemeral"})]))


def test_several_blocks_are_parts_in_their_order():
    """How a template's texts are joined only the engine knows. Empty texts are left out."""
    assert [{"role": "user", "content": [text("a"), text("b")]}] == said(("user", [text("a"), text(""), text("b")]))
    assert [{"role": "user", "content": [text("a"), PICTURE, text("b")]}] == said(
        ("user", [text("a"), IMAGE, text("b")])
    )


def test_nothing_at_all_is_no_message_and_an_empty_string_is_one():
    """Of a user; a reply always is one."""
    assert [HI] == said(("user", []), ("user", [text("")]), ("user", "hi"))
    assert [{"role": "user", "content": ""}] == said(("user", ""))


def test_each_turn_is_a_message_though_its_role_is_that_of_the_turn_before():
    """Anthropic would take them for one turn; vLLM's endpoint does not."""
    assert [HI, {"role": "user", "content": "b"}] == said(("user", "hi"), ("user", [text("b")]))
    assert ["user", "assistant", "assistant"] == [
        turn["role"] for turn in said(("user", "?"), ("assistant", [thinks("t")]), ("assistant", "a"))
    ]


def test_a_system_message_within_the_conversation_stays_where_it_is():
    """Moved to the front, it would change every prompt before it. One that says nothing is none."""
    given = (("user", "a"), ("system", [text("s"), text("t")]), ("system", BILLING), ("user", "b"))

    assert [("user", "a"), ("system", "st"), ("user", "b")] == [
        (turn["role"], turn["content"]) for turn in said(*given)
    ]


def test_systems_are_one_where_the_template_takes_them_at_the_beginning_alone():
    """As the engine's endpoint does it, which would be refused otherwise."""
    given = (("user", "a"), ("system", "T"), ("user", "b"), ("system", [text("U")]))
    merging = TranslationOptions(merges_systems=True)

    assert [("system", "STU"), ("user", "a"), ("user", "b")] == [
        (turn["role"], turn["content"]) for turn in said(*given, system="S", options=merging)
    ]
    assert [("system", "TU"), ("user", "a"), ("user", "b")] == [
        (turn["role"], turn["content"]) for turn in said(*given, options=merging)
    ]
    assert [HI] == said(("user", "hi"), options=merging)


def test_results_are_messages_of_their_own_before_what_else_the_user_says():
    """Each followed by its images and by the tools that it names."""
    reference = {"type": "tool_reference", "tool_name": "g"}
    named = {"type": "tool_reference", "name": "g"}
    given = [text("so"), result(content=[text("r"), IMAGE, reference]), text("go"), result("c2"), IMAGE]

    assert [
        TOOL,
        {"role": "user", "content": [PICTURE]},
        TOOL | {"content": [named]},
        TOOL | {"tool_call_id": "c2"},
        {"role": "user", "content": [text("so"), text("go"), PICTURE]},
    ] == said(("user", given))
    assert [TOOL] == said(("user", [result()]))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("hi", {"content": "hi"}),
        ([], {"content": None}),
        ("", {"content": ""}),
        ([text("")], {"content": ""}),
        ([uses()], {"content": None, "tool_calls": [CALL]}),
        ([text("a"), uses(), text("b")], {"content": "ab", "tool_calls": [CALL]}),
        ([text("a"), thinks("t"), text(""), text("b")], {"content": "ab", "thought": "t"}),
        ([thinks("t"), {"type": "redacted_thinking", "data": "x"}, text("a")], {"content": "a", "thought": "t"}),
        ([thinks("t"), text("a"), thinks("u")], {"content": "a", "thought": "tu"}),
        ([text("a"), text("b")], {"content": [text("a"), text("b")]}),
        ([text(""), text("b"), uses()], {"content": "b", "tool_calls": [CALL]}),
    ],
)
def test_a_reply_that_comes_back_is_the_chat_message_it_was(content, expected):
    """Text that is empty is text; no text is none; text around a call was one. Reasoning stands in the engine's own field."""
    assert [{"role": "assistant", **expected}] == said(
        ("assistant", content), options=TranslationOptions(thought="thought")
    )


def test_arguments_come_back_as_they_were_sampled():
    """If somebody knows how that was; the agent's own change of them counts."""
    sampled = {"c1": {"function": {"name": "f", "arguments": '{"a":1}'}}}

    def arguments(given):
        (message,) = said(("assistant", [uses(given=given)]), sampled=sampled)
        return message["tool_calls"][0]["function"]["arguments"]

    assert '{"a":1}' == arguments({"a": 1})
    assert '{"a": 2}' == arguments({"a": 2})


@pytest.mark.parametrize(
    ("messages", "at"),
    [
        (None, "messages"),
        ({}, "messages"),
        ([], "messages"),
        ([1], "messages.0"),
        ([{}], "messages.0.role"),
        ([{"role": "tool", "content": "x"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": [1]}], "messages.1.content.0"),
        ([{"role": "user", "content": [thinks("t")]}], "messages.0.content.0.type"),
        ([{"role": "system", "content": [IMAGE]}], "messages.0.content.0.type"),
        ([{"role": "assistant", "content": [IMAGE]}], "messages.0.content.0.type"),
        ([{"role": "assistant", "content": [{"type": "server_tool_use"}]}], "messages.0.content.0.type"),
        ([{"role": "assistant", "content": [{}]}], "messages.0.content.0.type"),
        ([{"role": "assistant", "content": [{"type": "thinking"}]}], "messages.0.content.0.thinking"),
        ([{"role": "assistant", "content": [uses() | {"input": "x"}]}], "messages.0.content.0.input"),
        ([{"role": "assistant", "content": [uses() | {"name": None}]}], "messages.0.content.0.name"),
        ([{"role": "assistant", "content": [uses() | {"id": 1}]}], "messages.0.content.0.id"),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_place(messages, at):
    """Never by a failure of ours."""
    with pytest.raises(UnprocessableRequest) as refused:
        read_conversation({"messages": messages}, TranslationOptions(), {})
    assert at == refused.value.param
