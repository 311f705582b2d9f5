"""Tools of a Responses request, translated to chat; custom tools are functions of one string."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.responses_drawn import argument_text

from proxy.errors import BadRequest, UnprocessableRequest
from proxy.protocols.dialects.base import TranslationOptions
from proxy.protocols.dialects.responses import RESPONSES
from proxy.protocols.dialects.responses.tools import FreeformReader, Tool, arguments_for, choose, input_from, read_tools

LOOK = {"type": "function", "name": "look", "description": "d", "parameters": {"type": "object"}, "strict": True}
PATCH = {
    "type": "custom", "name": "patch", "description": "Patches.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"},
}  # fmt: skip
CRM = {
    "type": "namespace",
    "name": "crm",
    "description": "d",
    "tools": [{"type": "function", "name": "find", "parameters": None}],
}
SEARCH = {"type": "web_search"}


def chat_choice(choice, tools=(LOOK, PATCH, CRM), **more):
    """Return the chat fields of a tool choice."""
    body = {"tools": list(tools), "tool_choice": choice, **more}
    return choose(body, read_tools(body, ignore_hosted=True), ignore_hosted=True)


def test_tools_become_functions_of_chat():
    """A custom tool becomes a function of one string, with its grammar in the description."""
    tools = read_tools({"tools": [LOOK, PATCH, CRM]}, ignore_hosted=False)
    look, patch, find = (tool["function"] for tool in tools.chat_tools)

    assert look == {"name": "look", "description": "d", "parameters": {"type": "object"}, "strict": True}
    assert (patch["name"], patch["description"], patch["parameters"]["required"]) == ("patch", "Patches.", ["input"])
    assert "lark grammar:\nstart: /a/" in patch["parameters"]["properties"]["input"]["description"]
    assert find == {"name": "crm__find"}
    assert Tool("crm__find", "function", "find", "crm") == tools.of("crm__find")
    assert Tool("x", "function", "x") == tools.of("x")


def test_chat_templates_show_the_same_fields_as_in_vllm():
    """The description of a custom tool without a grammar, and `defer_loading`."""
    tools = read_tools(
        {"tools": [LOOK | {"defer_loading": True}, {"type": "custom", "name": "c"}]}, ignore_hosted=False
    )
    look, custom = (tool["function"] for tool in tools.chat_tools)

    assert look["defer_loading"] is True
    assert custom["parameters"] == {
        "type": "object",
        "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
        "required": ["input"],
        "additionalProperties": False,
    }


def test_hosted_tools_are_rejected_by_name_or_dropped():
    """With ignore_hosted, they are neither sent nor selectable."""
    with pytest.raises(BadRequest, match="'web_search' is a hosted tool of OpenAI") as raised:
        read_tools({"tools": [LOOK, SEARCH]}, ignore_hosted=False)

    assert (raised.value.status, raised.value.param) == (400, "tools[1].type")
    assert len(read_tools({"tools": [LOOK, SEARCH]}, ignore_hosted=True).chat_tools) == 1
    assert "tool_choice" not in chat_choice({"type": "web_search"})
    with pytest.raises(BadRequest, match="'web_search'"):
        choose({"tool_choice": SEARCH}, read_tools({}, ignore_hosted=False), ignore_hosted=False)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "look"}, {"type": "function", "function": {"name": "look"}}),
        ({"type": "custom", "name": "patch"}, {"type": "function", "function": {"name": "patch"}}),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "patch"}, SEARCH]},
            "required",
        ),
    ],
)
def test_tool_choice_is_translated(choice, expected):
    assert chat_choice(choice)["tool_choice"] == expected


def test_only_allowed_tools_are_sent():
    """Chat has no other way to forbid a tool."""
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}, CRM]}

    assert [tool["function"]["name"] for tool in chat_choice(allowed)["tools"]] == ["look", "crm__find"]


def test_tool_choice_without_tools():
    """`auto` and `parallel_tool_calls` are dropped; `none` is sent, as the rollout may have tools."""
    assert chat_choice("auto", (), parallel_tool_calls=True) == {}
    assert chat_choice("none", ()) == {"tool_choice": "none"}
    assert chat_choice(None, parallel_tool_calls=False)["parallel_tool_calls"] is False


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": [1]}, "tools[0]"),
        ({"tools": [{"name": "x"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{**LOOK, "parameters": "x"}]}, "tools[0].parameters"),
        ({"tools": [{**PATCH, "format": {"type": "grammar"}}]}, "tools[0].format.syntax"),
        ({"tools": [{**CRM, "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
        ({"tool_choice": 1}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "x", "tools": []}}, "tool_choice.mode"),
    ],
)
def test_an_invalid_tool_is_rejected_with_its_path(body, param):
    with pytest.raises(UnprocessableRequest) as raised:
        choose(body, read_tools(body, ignore_hosted=False), ignore_hosted=False)

    assert raised.value.param == param


def test_additional_tools_items_add_tools():
    """Codex sends them with some models; these items and configuration updates become no messages."""
    more = {"type": "additional_tools", "tools": [{"type": "function", "name": "g"}, {"type": "custom", "name": "p"}]}
    update = {"type": "configuration_update", "reasoning": {"effort": "low"}}
    body = {"tools": [{"type": "function", "name": "f"}], "input": [more, update, {"role": "user", "content": "hi"}]}
    chat = RESPONSES.read(body, TranslationOptions())

    assert [tool["function"]["name"] for tool in chat["tools"]] == ["f", "g", "p"]
    assert chat["messages"] == [{"role": "user", "content": "hi"}]


@settings(max_examples=60)
@given(value=st.text(), spaced=st.booleans(), plain=st.booleans())
def test_the_input_is_read_from_any_json_escaping(value, spaced, plain):
    """The reader agrees with Python's json module."""
    assert value == input_from(argument_text(value, spaced=spaced, plain=plain))
    assert value == input_from(arguments_for(value))
    assert json.loads(arguments_for(value)) == {"input": value}


@settings(max_examples=60)
@given(value=st.text(alphabet='ab"\\/u0d8é🙂\n{}:', max_size=90), start=st.booleans(), data=st.data())
@example(value="\\ud83d\\ude42", start=True, data=None)
def test_the_input_does_not_depend_on_the_chunking(value, start, data):
    text = '{"input": "' + value if start else value
    cuts = [1, 12, 15, 18] if data is None else sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    reader = FreeformReader()
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    assert input_from(text) == "".join(map(reader.feed, pieces)) + reader.end()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"input": "a"}, and more', "a"),
        ('{"input": "a", "b": 1}', "a"),
        ('{"input": "cut \\u00', "cut \\u00"),
        ('{"input": "\\ud83d!"}', "\ufffd!"),
        ('{"input": "\\x"}', "\\x"),
        ('{"input": "line\nline"}', "line\nline"),
        ('{"patch": "a"}', '{"patch": "a"}'),
        ('{"input": {"a": 1}}', '{"input": {"a": 1}}'),
        (" " * 70 + '{"input": "a"}', " " * 70 + '{"input": "a"}'),
        ("*** Begin Patch", "*** Begin Patch"),
        ("", ""),
    ],
)
def test_arguments_without_an_input_are_returned_as_they_are(arguments, expected):
    """The agent sees the model's output."""
    assert input_from(arguments) == expected
