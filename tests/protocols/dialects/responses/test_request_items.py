"""Input items, their parts and their reasoning, translated to chat messages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.responses_drawn import IDENTITY

from proxy.errors import BadRequest, InvalidValue, UnprocessableRequest
from proxy.protocols.dialects.base import ResolvedReferences, TranslationOptions
from proxy.protocols.dialects.responses.request import (
    call_ids_from,
    item_ids_from,
    item_name,
    read_assistant_content,
    read_content,
    read_items,
    reasoning_from,
    response_name,
    seal,
    step_of,
    unseal,
)

OTHER = IDENTITY.step_id[:-1] + "W"
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
PATCH = {"type": "custom_tool_call", "call_id": "p", "name": "patch", "input": "a"}


def call(call_id, **fields):
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{ }", **fields}


def output(call_id):
    return {"type": "function_call_output", "call_id": call_id, "output": "o"}


def assistant_message(text, **fields):
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}], **fields}


def read(*items, options=None, resolved=None):
    return read_items(list(items), options or TranslationOptions(), resolved or ResolvedReferences())


def outline(messages):
    """Return each message as its role, content, reasoning and tool call ids."""
    return [
        (
            message["role"],
            message["content"],
            message.get("reasoning"),
            [made["id"] for made in message.get("tool_calls", ())] or message.get("tool_call_id"),
        )
        for message in messages
    ]


def test_every_role_and_tool_output_becomes_a_message():
    """A string is a user message; all kinds of tool output become tool messages."""
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "http://x"}]

    assert read_items("hi", TranslationOptions(), ResolvedReferences()) == [{"role": "user", "content": "hi"}]
    assert outline(read(*({"role": role, "content": role[0]} for role in ("system", "developer", "user")))) == [
        ("system", "s", None, None),
        ("developer", "d", None, None),
        ("user", "u", None, None),
    ]
    custom = {"type": "custom_tool_call_output", "call_id": "p", "output": parts}
    assert [
        (*row[:1], row[1] if isinstance(row[1], str) else " ".join(part["type"] for part in row[1]), *row[2:])
        for row in outline(read(output("c"), custom))
    ] == [("tool", "o", None, "c"), ("tool", "text image_url", None, "p")]


def test_the_items_of_a_response_become_one_message():
    """Reasoning, text and calls; further reasoning, or text after text, begins the next message."""
    first = [THOUGHT, assistant_message("a"), call("1"), PATCH, output("1"), output("p")]

    assert outline(read(*first, THOUGHT, assistant_message("b"), THOUGHT, call("2"), output("2"))) == [
        ("assistant", "a", "hm", ["1", "p"]), ("tool", "o", None, "1"), ("tool", "o", None, "p"),
        ("assistant", "b", "hm", None), ("assistant", None, "hm", ["2"]), ("tool", "o", None, "2"),
    ]  # fmt: skip
    assert outline(read(assistant_message("b"), assistant_message("c"))) == [
        ("assistant", "b", None, None),
        ("assistant", "c", None, None),
    ]


def test_only_items_of_the_same_response_may_be_between_a_call_and_its_output():
    """vLLM's hermes parser emits text between two calls: it belongs to the same message, before the calls, as in chat."""
    custom = {"type": "custom_tool_call_output", "call_id": "p", "output": "o"}
    items = [assistant_message("a"), call("1"), assistant_message("b"), THOUGHT, PATCH, output("1"), custom]

    assert [message["role"] for message in read(*items)] == ["assistant", "tool", "tool"]
    assert outline(read(*items))[0] == ("assistant", "ab", "hm", ["1", "p"])


def test_items_are_grouped_by_the_step_in_their_ids():
    """Even with tool outputs between the calls, or with adjacent responses."""
    first = [
        assistant_message("a", id=f"msg_{IDENTITY.step_id}_0"),
        call("1", id=f"fc_{IDENTITY.step_id}_0"),
        call("2", id=f"fc_{IDENTITY.step_id}_1"),
    ]
    other = call("3", id=f"fc_{OTHER}_0")

    assert outline(read(first[0], first[1], output("1"), first[2], output("2"))) == [
        ("assistant", "a", None, ["1", "2"]),
        ("tool", "o", None, "1"),
        ("tool", "o", None, "2"),
    ]
    assert outline(read(*first[:2], other)) == [("assistant", "a", None, ["1"]), ("assistant", None, None, ["3"])]


def test_argument_text_is_restored():
    """From the item for functions, and from the recorded call for custom tools, unless the agent changed the input."""
    sampled = '{"input":"a"}'

    def arguments(*items, **calls):
        functions = {name: {"name": "f", "arguments": text} for name, text in calls.items()}
        return [
            tool_call["function"]["arguments"]
            for tool_call in read(*items, resolved=ResolvedReferences(calls=functions))[0]["tool_calls"]
        ]

    assert arguments(call("1")) == ["{ }"]
    assert arguments(PATCH, p=sampled) == [sampled]
    assert arguments(PATCH) == arguments(PATCH, p='{"input":"b"}') == ['{"input": "a"}']
    assert call_ids_from([PATCH, call("1"), {"type": "custom_tool_call", "call_id": 1}, 7]) == ["p", "1"]
    assert call_ids_from("hi") == []


@pytest.mark.parametrize(
    ("sampled", "returned", "expected"),
    [
        ('{ "a": 1, "b": "é"}', '{"b":"\\u00e9","a":1}', '{ "a": 1, "b": "é"}'),
        ('{"a": 1}', '{"a": 1.0}', '{"a": 1.0}'),
        ('{"a": 1}', '{"a": true}', '{"a": true}'),
        ('{"a": 1', '{"a": 1}', '{"a": 1}'),
        ('{"a": 1}', "", ""),
        ("[" * 300 + "]" * 300, "[ " + "[" * 299 + "]" * 300, "[" * 300 + "]" * 300),
        ("[" * 3000 + "]" * 3000, "[ " + "[" * 2999 + "]" * 3000, "[ " + "[" * 2999 + "]" * 3000),
        ("[36893488147419103232]", "[36893488147419103233]", "[36893488147419103233]"),
    ],
)
def test_equal_arguments_get_their_sampled_text(sampled, returned, expected):
    """Arguments that the agent changed do not."""
    (message,) = read(
        call("1", arguments=returned), resolved=ResolvedReferences(calls={"1": {"name": "f", "arguments": sampled}})
    )

    assert message["tool_calls"][0]["function"]["arguments"] == expected


def test_reasoning_without_text_is_looked_up_by_id():
    """LangChain returns it like this after a stream."""
    empty = {"type": "reasoning", "id": "rs_1", "summary": [], "content": []}

    assert outline(read(empty, assistant_message("a"), resolved=ResolvedReferences(items={"rs_1": THOUGHT}))) == [
        ("assistant", "a", "hm", None)
    ]
    assert outline(read(empty, assistant_message("a"))) == [("assistant", "a", None, None)]
    assert item_ids_from(
        [empty, {"id": "x"}, assistant_message("a", id="y"), 1, {"type": "reasoning"}, THOUGHT | {"id": "rs_2"}]
    ) == ["rs_1", "x"]


def test_a_message_between_agents_is_a_user_message():
    """Its payload is the argument of a call, which Codex expects to be encrypted: a part of its own."""
    content = [
        {"type": "input_text", "text": "Payload:\n"},
        {"type": "encrypted_content", "encrypted_content": "Count."},
    ]
    sent = {"type": "agent_message", "author": "/root", "recipient": "/root/count", "content": content}

    (message,) = read(sent)

    assert message == {
        "role": "user", "content": [{"type": "text", "text": "Payload:\n"}, {"type": "text", "text": "Count."}],
    }  # fmt: skip


def test_an_item_reference_is_replaced_by_its_item():
    """With its type or by id alone; an unknown id is rejected with the id in the message."""
    resolved = ResolvedReferences(items={"a": assistant_message("x"), "b": THOUGHT})

    assert outline(read({"type": "item_reference", "id": "b"}, {"id": "a"}, resolved=resolved)) == [
        ("assistant", "x", "hm", None)
    ]
    with pytest.raises(InvalidValue, match="'c', which is not in any recorded response"):
        read({"type": "item_reference", "id": "c"}, resolved=resolved)


def test_reasoning_is_set_in_the_engines_field():
    """`reasoning` for vLLM, `reasoning_content` for others; encrypted content of other servers is dropped."""
    opaque = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}

    assert read(THOUGHT, options=TranslationOptions(thought="reasoning_content"))[0] == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
    }
    assert read(opaque) == []


def test_items_of_hosted_tools_are_rejected_or_dropped():
    """By the same setting as the tools."""
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed"}

    with pytest.raises(BadRequest, match="'web_search_call' is a hosted tool of OpenAI"):
        read(search)
    assert read(search, options=TranslationOptions(ignore_hosted_tools=True)) == []


def test_a_call_in_a_namespace_gets_the_tools_chat_name():
    assert read(call("1", namespace="crm"))[0]["tool_calls"][0]["function"]["name"] == "crm__f"


@pytest.mark.parametrize(
    ("items", "param"),
    [
        (None, "input"),
        ([1], "input[0]"),
        ([{}], "input[0].role"),
        ([{"role": "critic", "content": ""}], "input[0].role"),
        ([{"role": "user"}], "input[0].content"),
        ([{"type": "compaction"}], "input[0].type"),
        ([call(None)], "input[0].call_id"),
        ([call("1", arguments={})], "input[0].arguments"),
        ([output("1") | {"output": 1}], "input[0].output"),
        ([THOUGHT | {"summary": "x"}], "input[0].summary"),
        ([assistant_message("a", id=1)], "input[0].id"),
        ([{"type": "agent_message"}], "input[0].content"),
        ([{"type": "agent_message", "content": "a"}], "input[0].content"),
        (
            [{"type": "agent_message", "content": [{"type": "encrypted_content"}]}],
            "input[0].content[0].encrypted_content",
        ),
        ([{"type": "agent_message", "content": [{"type": "a"}]}], "input[0].content[0].type"),
    ],
)
def test_an_invalid_item_is_rejected_with_its_path(items, param):
    with pytest.raises(InvalidValue) as raised:
        read_items(items, TranslationOptions(), ResolvedReferences())

    assert raised.value.param == param


@pytest.mark.parametrize("item", [{"type": "item_reference", "id": "a"}, {"type": "reasoning", "id": "a"}])
def test_an_item_is_referred_to_once(item):
    """As at OpenAI: otherwise a short call becomes a very long prompt."""
    resolved = ResolvedReferences(items={"a": {"id": "a", **THOUGHT}})

    assert read(item, resolved=resolved)[0]["reasoning"] == "hm"
    with pytest.raises(InvalidValue, match=r"^input\[1\].id names 'a' twice"):
        read(item, item, resolved=resolved)


URL = "data:text/plain;base64,w6k="


def test_each_part_is_translated():
    """Text, image, audio and file; a text file becomes its text."""
    parts = [
        {"type": "input_text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}},
        {"type": "input_image", "image_url": "http://x", "detail": "low"},
        {"type": "input_image", "image_url": "http://x", "detail": "original"},
        {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
        {"type": "input_file", "file_data": URL, "filename": "a.txt"},
        {"type": "input_file", "file_data": "data:application/pdf;base64,AA==", "filename": "a.pdf"},
        {"type": "input_file", "file_data": "data:text/plain;base64,/w=="},
    ]

    assert read_content(parts, "x") == [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "http://x", "detail": "low"}},
        {"type": "image_url", "image_url": {"url": "http://x"}},
        {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
        {"type": "text", "text": "é"},
        {"type": "file", "file": {"file_data": "data:application/pdf;base64,AA==", "filename": "a.pdf"}},
        {"type": "file", "file": {"file_data": "data:text/plain;base64,/w=="}},
    ]


def test_a_single_text_part_becomes_a_string():
    assert [read_content(content, "x") for content in ("a", [{"type": "input_text", "text": "a"}])] == ["a", "a"]


def test_assistant_text_parts_are_joined():
    """Without a text part, content is null and not an empty string."""
    text, refusal = {"type": "output_text", "text": "a"}, {"type": "refusal", "refusal": "no"}

    assert read_assistant_content([text, refusal, text], "x") == ("aa", "no")
    assert [read_assistant_content(content, "x") for content in ("", [{"type": "output_text", "text": ""}], [])] == [
        ("", None),
        ("", None),
        (None, None),
    ]


@pytest.mark.parametrize(
    ("read", "value", "param"),
    [
        (read_content, None, "x"),
        (read_content, [{"type": "input_image", "file_id": "f"}], "x[0]"),
        (read_content, [{"type": "input_file", "file_url": "http://x"}], "x[0]"),
        (read_content, [{"type": "video"}], "x[0].type"),
        (read_content, [{"type": "input_text"}], "x[0].text"),
        (read_content, ["a"], "x[0]"),
        (read_assistant_content, 1, "x"),
        (read_assistant_content, [{"type": "input_image", "image_url": "http://x"}], "x[0].type"),
    ],
)
def test_an_invalid_part_raises_with_its_path(read, value, param):
    """So does a file that is given by its id only."""
    with pytest.raises(BadRequest) as refusal:
        read(value, "x")

    assert refusal.value.param == param


@given(reasoning=st.text())
def test_encrypted_reasoning_is_decoded_to_the_same_text(reasoning):
    assert reasoning == unseal(seal(reasoning))


@pytest.mark.parametrize("sealed", ["", "gAAAA", "tokentape-1.é", "tokentape-1.AAA", "tokentape-1./w=="])
def test_encrypted_content_of_another_server_or_invalid_is_none(sealed):
    assert unseal(sealed) is None


def test_the_reasoning_of_an_item_is_its_text_else_its_encrypted_content_else_its_summary():
    text = {"content": [{"type": "reasoning_text", "text": "a"}, {"type": "text", "text": "b"}]}
    sealed = {"encrypted_content": seal("c")}
    summary = {"summary": [{"type": "summary_text", "text": "d"}, {"type": "summary_text", "text": "e"}]}
    foreign = {"encrypted_content": "gAAAA", "summary": [], "content": None}

    assert [
        reasoning_from(item, "input[0]") for item in (text | sealed | summary, sealed | summary, summary, foreign)
    ] == ["ab", "c", "d\n\ne", None]
    with pytest.raises(UnprocessableRequest, match=r"input\[0\].content\[0\].type"):
        reasoning_from({"content": [{"type": "output_text", "text": ""}]}, "input[0]")


STEP = "01ARZ3NDEKTSV4RRFFQ69G5FAV"


def test_the_step_id_is_read_from_each_kind_of_id():
    kinds = ("msg", "rs", "fc", "ctc", "in")

    assert {step_of(name) for name in [response_name(STEP), *(item_name(kind, STEP, 12) for kind in kinds)]} == {STEP}


@pytest.mark.parametrize(
    "name",
    [None, 7, "", "resp_", f"resp_{STEP}x", f"msg_{STEP}", f"x_{STEP}_0", f"resp_{STEP}_0", f"msg_{STEP}_", "msg_68f0"],
)
def test_other_ids_have_no_step(name):
    """Other servers', and values that are not ids."""
    assert step_of(name) is None
