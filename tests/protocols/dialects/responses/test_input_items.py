"""Items as chat messages."""

import pytest
from responses_drawn import TOLD

from proxy.errors import BadRequest, UnprocessableRequest
from proxy.protocols.dialects.responses.input_items import call_ids_from, item_ids_from, read_items
from proxy.protocols.dialects.translation import ResolvedReferences, TranslationOptions

OTHER = TOLD.step_id[:-1] + "W"
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
PATCH = {"type": "custom_tool_call", "call_id": "p", "name": "patch", "input": "a"}


def call(call_id, **fields):
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{ }", **fields}


def output(call_id):
    return {"type": "function_call_output", "call_id": call_id, "output": "o"}


def said(text, **fields):
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}], **fields}


def read(*items, options=None, resolved=None):
    return read_items(list(items), options or TranslationOptions(), resolved or ResolvedReferences())


def outline(messages):
    """Each message in short: who, what, its thoughts and its calls."""
    return [
        (
            message["role"],
            message["content"],
            message.get("reasoning"),
            [made["id"] for made in message.get("tool_calls", ())] or message.get("tool_call_id"),
        )
        for message in messages
    ]


def test_every_role_and_output_is_a_message():
    """A text alone is the user's; outputs are a tool's, whatever kind of call they answer."""
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "http://x"}]

    assert [{"role": "user", "content": "hi"}] == read_items("hi", TranslationOptions(), ResolvedReferences())
    assert [("system", "s", None, None), ("developer", "d", None, None), ("user", "u", None, None)] == outline(
        read(*({"role": role, "content": role[0]} for role in ("system", "developer", "user")))
    )
    custom = {"type": "custom_tool_call_output", "call_id": "p", "output": parts}
    assert [("tool", "o", None, "c"), ("tool", "text image_url", None, "p")] == [
        (*one[:1], one[1] if isinstance(one[1], str) else " ".join(part["type"] for part in one[1]), *one[2:])
        for one in outline(read(output("c"), custom))
    ]


def test_the_items_of_an_answer_are_one_message():
    """Thoughts, text and calls; the next thoughts, or text where there is some, begin the next one."""
    first = [THOUGHT, said("a"), call("1"), PATCH, output("1"), output("p")]

    assert [
        ("assistant", "a", "hm", ["1", "p"]), ("tool", "o", None, "1"), ("tool", "o", None, "p"),
        ("assistant", "b", "hm", None), ("assistant", None, "hm", ["2"]), ("tool", "o", None, "2"),
    ] == outline(read(*first, THOUGHT, said("b"), THOUGHT, call("2"), output("2")))  # fmt: skip
    assert [("assistant", "b", None, None), ("assistant", "c", None, None)] == outline(read(said("b"), said("c")))


def test_nothing_but_an_answer_stands_between_a_call_and_its_output():
    """vLLM's hermes parser tells text between two calls: it is of the same message, and stands in front, as chat has it."""
    custom = {"type": "custom_tool_call_output", "call_id": "p", "output": "o"}
    items = [said("a"), call("1"), said("b"), THOUGHT, PATCH, output("1"), custom]

    assert ["assistant", "tool", "tool"] == [message["role"] for message in read(*items)]
    assert ("assistant", "ab", "hm", ["1", "p"]) == outline(read(*items))[0]


def test_items_find_their_message_by_name():
    """Whatever stands between: outputs beside their calls, or answers side by side."""
    first = [
        said("a", id=f"msg_{TOLD.step_id}_0"),
        call("1", id=f"fc_{TOLD.step_id}_0"),
        call("2", id=f"fc_{TOLD.step_id}_1"),
    ]
    other = call("3", id=f"fc_{OTHER}_0")

    assert [("assistant", "a", None, ["1", "2"]), ("tool", "o", None, "1"), ("tool", "o", None, "2")] == outline(
        read(first[0], first[1], output("1"), first[2], output("2"))
    )
    assert [("assistant", "a", None, ["1"]), ("assistant", None, None, ["3"])] == outline(read(*first[:2], other))


def test_argument_text_is_carried_as_it_is():
    """Of functions in the item; of custom tools by the earlier call, if it says the same input, and else written anew."""
    sampled = '{"input":"a"}'

    def arguments(*items, **calls):
        return [
            made["function"]["arguments"]
            for made in read(*items, resolved=ResolvedReferences(calls=calls))[0]["tool_calls"]
        ]

    assert ["{ }"] == arguments(call("1"))
    assert [sampled] == arguments(PATCH, p=sampled)
    assert ['{"input": "a"}'] == arguments(PATCH) == arguments(PATCH, p='{"input":"b"}')
    assert ["p", "1"] == call_ids_from([PATCH, call("1"), {"type": "custom_tool_call", "call_id": 1}, 7])
    assert [] == call_ids_from("hi")


@pytest.mark.parametrize(
    ("sampled", "said", "told"),
    [
        ('{ "a": 1, "b": "é"}', '{"b":"\\u00e9","a":1}', '{ "a": 1, "b": "é"}'),
        ('{"a": 1}', '{"a": 1.0}', '{"a": 1.0}'),
        ('{"a": 1}', '{"a": true}', '{"a": true}'),
        ('{"a": 1', '{"a": 1}', '{"a": 1}'),
        ('{"a": 1}', "", ""),
        ("[" * 300 + "]" * 300, "[ " + "[" * 299 + "]" * 300, "[ " + "[" * 299 + "]" * 300),
    ],
)
def test_arguments_that_are_spelt_anew_are_told_as_they_were_sampled(sampled, said, told):
    """If they say the same; what an agent changed stays changed."""
    (message,) = read(call("1", arguments=said), resolved=ResolvedReferences(calls={"1": sampled}))

    assert told == message["tool_calls"][0]["function"]["arguments"]


def test_thoughts_that_are_only_named_are_those_that_were_told():
    """As LangChain sends them back after a stream: by their id, without a text."""
    empty = {"type": "reasoning", "id": "rs_1", "summary": [], "content": []}

    assert [("assistant", "a", "hm", None)] == outline(
        read(empty, said("a"), resolved=ResolvedReferences(items={"rs_1": THOUGHT}))
    )
    assert [("assistant", "a", None, None)] == outline(read(empty, said("a")))
    assert ["rs_1", "x"] == item_ids_from(
        [empty, {"id": "x"}, said("a", id="y"), 1, {"type": "reasoning"}, THOUGHT | {"id": "rs_2"}]
    )


def test_a_reference_stands_for_its_item():
    """By its type or by an id alone; one that nobody knows is refused by name."""
    resolved = ResolvedReferences(items={"a": said("x"), "b": THOUGHT})

    assert [("assistant", "x", "hm", None)] == outline(
        read({"type": "item_reference", "id": "b"}, {"id": "a"}, resolved=resolved)
    )
    with pytest.raises(UnprocessableRequest, match="'c', which is not in any recorded response"):
        read({"type": "item_reference", "id": "c"}, resolved=resolved)


def test_thoughts_stand_in_the_field_of_the_engine():
    """`reasoning` to vLLM, `reasoning_content` to others; what nobody can read is left out."""
    opaque = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}

    assert {"role": "assistant", "content": None, "reasoning_content": "hm"} == read(
        THOUGHT, options=TranslationOptions(thought="reasoning_content")
    )[0]
    assert [] == read(opaque)


def test_items_of_hosted_tools_are_refused_by_name_or_left_out():
    """As the tools are."""
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed"}

    with pytest.raises(BadRequest, match="'web_search_call' is a hosted tool of OpenAI"):
        read(search)
    assert [] == read(search, options=TranslationOptions(ignore_hosted_tools=True))


def test_a_call_of_a_namespace_has_its_name_in_chat():
    """The one that its tool was told by."""
    assert "crm__f" == read(call("1", namespace="crm"))[0]["tool_calls"][0]["function"]["name"]


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
        ([said("a", id=1)], "input[0].id"),
    ],
)
def test_what_is_no_item_is_named(items, param):
    """Where it stands."""
    with pytest.raises(UnprocessableRequest) as refusal:
        read_items(items, TranslationOptions(), ResolvedReferences())

    assert param == refusal.value.param
