"""Messages of a conversation, translated to chat."""

import pytest

from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects.base import TranslationOptions
from proxy.protocols.dialects.messages.request import read_conversation, tool_call_ids


def text(value, **extra):
    return {"type": "text", "text": value, **extra}


def thinking(thought):
    return {"type": "thinking", "thinking": thought, "signature": "sig_1"}


def tool_use(call_id="c1", arguments=None):
    return {"type": "tool_use", "id": call_id, "name": "f", "input": {"a": 1} if arguments is None else arguments}


def tool_result(call_id="c1", content="r"):
    return {"type": "tool_result", "tool_use_id": call_id, "content": content}


def chat_messages(*messages, options=TranslationOptions(), sampled=(), **fields):  # noqa: B008 - frozen
    turns = [{"role": role, "content": content} for role, content in messages]
    return read_conversation({"messages": turns, **fields}, options, dict(sampled))


HI = {"role": "user", "content": "hi"}
BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=0a1b2;"
IMAGE = {"type": "image", "source": {"type": "url", "url": "u"}}
PICTURE = {"type": "image_url", "image_url": {"url": "u"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {"role": "tool", "tool_call_id": "c1", "content": "r"}


@pytest.mark.parametrize(
    ("value", "expected"),
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
def test_system_blocks_become_one_system_message(value, expected):
    """Concatenated, without Claude Code's billing header, which differs in each call."""
    assert chat_messages(("user", "hi"), system=value) == [
        *([] if expected is None else [{"role": "system", "content": expected}]),
        HI,
    ]


def test_system_blocks_are_joined_as_the_engine_joins_them():
    """SGLang's endpoint inserts a line break."""
    assert (
        chat_messages(("user", "hi"), system=[text("S"), text("T")], options=TranslationOptions(system_joint="\n"))[0][
            "content"
        ]
        == "S\nT"
    )


def test_a_single_text_block_becomes_a_string():
    """Agents turn strings into blocks when they move their cache breakpoints; the prompt is the same."""
    assert chat_messages(("user", "hi")) == [{"role": "user", "content": "hi"}]
    assert chat_messages(("user", "hi")) == chat_messages(("user", [text("hi", cache_control={"type": "ephemeral"})]))


def test_several_blocks_become_content_parts_in_order():
    """Only the engine's template knows how texts are joined. Empty texts are dropped."""
    assert [{"role": "user", "content": [text("a"), text("b")]}] == chat_messages(
        ("user", [text("a"), text(""), text("b")])
    )
    assert [{"role": "user", "content": [text("a"), PICTURE, text("b")]}] == chat_messages(
        ("user", [text("a"), IMAGE, text("b")])
    )


def test_a_user_message_without_blocks_is_dropped_and_an_empty_string_is_kept():
    assert chat_messages(("user", []), ("user", [text("")]), ("user", "hi")) == [HI]
    assert chat_messages(("user", "")) == [{"role": "user", "content": ""}]


def test_consecutive_messages_of_one_role_are_not_merged():
    """Anthropic merges them; vLLM's endpoint does not."""
    assert chat_messages(("user", "hi"), ("user", [text("b")])) == [HI, {"role": "user", "content": "b"}]
    assert [
        turn["role"] for turn in chat_messages(("user", "?"), ("assistant", [thinking("t")]), ("assistant", "a"))
    ] == ["user", "assistant", "assistant"]


def test_a_system_message_within_the_conversation_keeps_its_position():
    """Moved to the front, it would change the prompt's prefix. An empty one is dropped."""
    value = (("user", "a"), ("system", [text("s"), text("t")]), ("system", BILLING), ("user", "b"))

    assert [(turn["role"], turn["content"]) for turn in chat_messages(*value)] == [
        ("user", "a"),
        ("system", "st"),
        ("user", "b"),
    ]


def test_system_messages_are_merged_for_templates_that_accept_only_a_leading_one():
    """vLLM's endpoint does the same."""
    value = (("user", "a"), ("system", "T"), ("user", "b"), ("system", [text("U")]))
    merging = TranslationOptions(merges_systems=True)

    assert [(turn["role"], turn["content"]) for turn in chat_messages(*value, system="S", options=merging)] == [
        ("system", "STU"),
        ("user", "a"),
        ("user", "b"),
    ]
    assert [(turn["role"], turn["content"]) for turn in chat_messages(*value, options=merging)] == [
        ("system", "TU"),
        ("user", "a"),
        ("user", "b"),
    ]
    assert chat_messages(("user", "hi"), options=merging) == [HI]


def test_tool_results_become_messages_before_the_rest_of_the_users_message():
    """Each is followed by its images and the tools that it references."""
    reference = {"type": "tool_reference", "tool_name": "g"}
    named = {"type": "tool_reference", "name": "g"}
    value = [text("so"), tool_result(content=[text("r"), IMAGE, reference]), text("go"), tool_result("c2"), IMAGE]

    assert [
        TOOL,
        {"role": "user", "content": [PICTURE]},
        TOOL | {"content": [named]},
        TOOL | {"tool_call_id": "c2"},
        {"role": "user", "content": [text("so"), text("go"), PICTURE]},
    ] == chat_messages(("user", value))
    assert chat_messages(("user", [tool_result()])) == [TOOL]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("hi", {"content": "hi"}),
        ([], {"content": None}),
        ("", {"content": ""}),
        ([text("")], {"content": ""}),
        ([tool_use()], {"content": None, "tool_calls": [CALL]}),
        ([text("a"), tool_use(), text("b")], {"content": "ab", "tool_calls": [CALL]}),
        ([text("a"), thinking("t"), text(""), text("b")], {"content": "ab", "thought": "t"}),
        ([thinking("t"), {"type": "redacted_thinking", "data": "x"}, text("a")], {"content": "a", "thought": "t"}),
        ([thinking("t"), text("a"), thinking("u")], {"content": "a", "thought": "tu"}),
        ([text("a"), text("b")], {"content": [text("a"), text("b")]}),
        ([text(""), text("b"), tool_use()], {"content": "b", "tool_calls": [CALL]}),
    ],
)
def test_an_assistant_message_becomes_the_chat_message_that_was_sampled(content, expected):
    """Empty text is ""; without text, content is null; texts around a tool call are joined. Reasoning has the engine's name."""
    assert chat_messages(("assistant", content), options=TranslationOptions(thought="thought")) == [
        {"role": "assistant", **expected}
    ]


def test_sampled_arguments_are_restored_unless_the_agent_changed_them():
    sampled = {"c1": {"name": "f", "arguments": '{"a":1}'}}

    def arguments(value):
        (message,) = chat_messages(("assistant", [tool_use(arguments=value)]), sampled=sampled)
        return message["tool_calls"][0]["function"]["arguments"]

    assert arguments({"a": 1}) == '{"a":1}'
    assert arguments({"a": 2}) == '{"a": 2}'


@pytest.mark.parametrize(
    ("messages", "path"),
    [
        (None, "messages"),
        ({}, "messages"),
        ([], "messages"),
        ([1], "messages.0"),
        ([{}], "messages.0.role"),
        ([{"role": "tool", "content": "x"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": [1]}], "messages.1.content.0"),
        ([{"role": "user", "content": [thinking("t")]}], "messages.0.content.0.type"),
        ([{"role": "system", "content": [IMAGE]}], "messages.0.content.0.type"),
        ([{"role": "assistant", "content": [IMAGE]}], "messages.0.content.0.type"),
        ([{"role": "assistant", "content": [{"type": "server_tool_use"}]}], "messages.0.content.0.type"),
        ([{"role": "assistant", "content": [{}]}], "messages.0.content.0.type"),
        ([{"role": "assistant", "content": [{"type": "thinking"}]}], "messages.0.content.0.thinking"),
        ([{"role": "assistant", "content": [tool_use() | {"input": "x"}]}], "messages.0.content.0.input"),
        ([{"role": "assistant", "content": [tool_use() | {"name": None}]}], "messages.0.content.0.name"),
        ([{"role": "assistant", "content": [tool_use() | {"id": 1}]}], "messages.0.content.0.id"),
    ],
)
def test_an_invalid_message_raises_with_its_path(messages, path):
    with pytest.raises(UnprocessableRequest) as raised:
        read_conversation({"messages": messages}, TranslationOptions(), {})
    assert raised.value.param == path


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": 1},
        {"messages": [1, {}, {"content": "x"}, {"content": [1, {"type": "text"}, {"type": "tool_use", "id": 7}]}]},
    ],
)
def test_an_invalid_body_references_no_calls(body):
    """It is not validated yet."""
    assert tool_call_ids(body) == frozenset()


def test_the_calls_of_assistant_messages_are_referenced():
    """They are looked up before the body is read."""
    blocks = [
        {"type": "tool_use", "id": "a"},
        {"type": "tool_result", "tool_use_id": "b"},
        {"type": "tool_use", "id": "c"},
    ]

    assert tool_call_ids({"messages": [{"role": "assistant", "content": blocks}]}) == {"a", "c"}
