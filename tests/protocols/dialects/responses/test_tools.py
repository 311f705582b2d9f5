"""Tools in chat's shape."""

import pytest

from proxy.errors import BadRequest, UnprocessableRequest
from proxy.protocols.dialects.responses import RESPONSES
from proxy.protocols.dialects.responses.tools import Tool, choose, read_tools
from proxy.protocols.dialects.translation import TranslationOptions

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


def choice_of(choice, tools=(LOOK, PATCH, CRM), **more):
    """What chat is told of a choice."""
    body = {"tools": list(tools), "tool_choice": choice, **more}
    return choose(body, read_tools(body, ignore_hosted=True), ignore_hosted=True)


def test_tools_are_functions_of_chat():
    """The same fields, one level down; a custom tool takes one string, and is told its grammar in words."""
    tools = read_tools({"tools": [LOOK, PATCH, CRM]}, ignore_hosted=False)
    look, patch, find = (tool["function"] for tool in tools.chat_tools)

    assert {"name": "look", "description": "d", "parameters": {"type": "object"}, "strict": True} == look
    assert ("patch", "Patches.", ["input"]) == (patch["name"], patch["description"], patch["parameters"]["required"])
    assert "lark grammar:\nstart: /a/" in patch["parameters"]["properties"]["input"]["description"]
    assert {"name": "crm__find"} == find
    assert Tool("crm__find", "function", "find", "crm") == tools.of("crm__find")
    assert Tool("x", "function", "x") == tools.of("x")


def test_what_templates_show_of_a_tool_is_what_vllm_shows():
    """Of a custom tool without a grammar, its words; that a tool is deferred."""
    tools = read_tools(
        {"tools": [LOOK | {"defer_loading": True}, {"type": "custom", "name": "c"}]}, ignore_hosted=False
    )
    look, custom = (tool["function"] for tool in tools.chat_tools)

    assert look["defer_loading"] is True
    assert {
        "type": "object",
        "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
        "required": ["input"],
        "additionalProperties": False,
    } == custom["parameters"]


def test_hosted_tools_are_refused_by_name_or_left_out():
    """400; with the setting they are not told to the engine, nor can they be chosen."""
    with pytest.raises(BadRequest, match="'web_search' is a hosted tool of OpenAI") as refusal:
        read_tools({"tools": [LOOK, SEARCH]}, ignore_hosted=False)

    assert (400, "tools[1].type") == (refusal.value.status, refusal.value.param)
    assert 1 == len(read_tools({"tools": [LOOK, SEARCH]}, ignore_hosted=True).chat_tools)
    assert "tool_choice" not in choice_of({"type": "web_search"})
    with pytest.raises(BadRequest, match="'web_search'"):
        choose({"tool_choice": SEARCH}, read_tools({}, ignore_hosted=False), ignore_hosted=False)


@pytest.mark.parametrize(
    ("choice", "told"),
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
def test_choices_in_the_shape_of_chat(choice, told):
    """Those that name a tool as well."""
    assert told == choice_of(choice)["tool_choice"]


def test_allowed_tools_are_the_only_ones_told():
    """Chat cannot forbid a tool but by leaving it out."""
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}, CRM]}

    assert ["look", "crm__find"] == [tool["function"]["name"] for tool in choice_of(allowed)["tools"]]


def test_choices_among_nothing():
    """`auto` says nothing then, and neither does `parallel_tool_calls`; `none` may still matter to a rollout's tools."""
    assert {} == choice_of("auto", (), parallel_tool_calls=True)
    assert {"tool_choice": "none"} == choice_of("none", ())
    assert choice_of(None, parallel_tool_calls=False)["parallel_tool_calls"] is False


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
def test_what_is_no_tool_is_named(body, param):
    """Where it stands."""
    with pytest.raises(UnprocessableRequest) as refusal:
        choose(body, read_tools(body, ignore_hosted=False), ignore_hosted=False)

    assert param == refusal.value.param


def test_items_may_offer_more_tools():
    """Codex sends its own so with some models; the item itself says nothing, nor does one of the agent's settings."""
    more = {"type": "additional_tools", "tools": [{"type": "function", "name": "g"}, {"type": "custom", "name": "p"}]}
    update = {"type": "configuration_update", "reasoning": {"effort": "low"}}
    body = {"tools": [{"type": "function", "name": "f"}], "input": [more, update, {"role": "user", "content": "hi"}]}
    chat = RESPONSES.read(body, TranslationOptions())

    assert ["f", "g", "p"] == [tool["function"]["name"] for tool in chat["tools"]]
    assert [{"role": "user", "content": "hi"}] == chat["messages"]
