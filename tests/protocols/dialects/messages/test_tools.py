"""What a call offers to its model."""

import pytest

from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects.messages.tools import tools_from

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "Tells it.", "input_schema": SCHEMA}
FUNCTION = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": SCHEMA}}


@pytest.mark.parametrize("extra", [{}, {"type": "custom"}, {"type": None}, {"cache_control": {"type": "ephemeral"}}])
def test_a_custom_tool_is_a_function(extra):
    """What changes nothing for the model is left out."""
    assert {"tools": [FUNCTION]} == tools_from({"tools": [WEATHER | extra]})


def test_what_templates_show_of_a_tool_is_kept():
    """A description may be missing; a schema without a type is an object's, as vLLM completes it."""
    shown = {"strict": True, "defer_loading": True}
    tool = {"name": "f", "input_schema": {"properties": {}}, **shown}

    assert [{"name": "f", "parameters": {"properties": {}, "type": "object"}, **shown}] == [
        each["function"] for each in tools_from({"tools": [tool]})["tools"]
    ]


def change(kind, tool):
    return {"type": f"tool_{kind}", "tool": tool}


def named(name):
    return {"type": "tool_reference", "name": name}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ([], ["weather", "late"]),
        ([change("removal", named("weather"))], ["late"]),
        ([change("removal", named("weather")), change("addition", named("weather"))], ["weather", "late"]),
        (
            [change("addition", {"type": "tool_definition", "definition": WEATHER | {"name": "new"}})],
            ["weather", "late", "new"],
        ),
    ],
)
def test_the_tools_are_those_at_the_end_of_the_conversation(changes, names):
    """Blocks of systems add and remove some."""
    said = [{"role": "user", "content": "hi"}, {"role": "system", "content": [*changes, {"type": "text", "text": "a"}]}]
    body = {"messages": said, "tools": [WEATHER, WEATHER | {"name": "late", "defer_loading": True}]}

    assert names == [tool["function"]["name"] for tool in tools_from(body)["tools"]]


def test_a_tool_that_is_added_is_no_longer_deferred():
    """It is shown as if it had been there from the beginning."""
    said = [{"role": "system", "content": [change("addition", named("weather"))]}]

    assert {"tools": [FUNCTION]} == tools_from({"messages": said, "tools": [WEATHER | {"defer_loading": True}]})


@pytest.mark.parametrize(
    ("tool", "at"),
    [
        (None, ""),
        ({"type": "odd"}, ".type"),
        (named("nobody"), ".name"),
        (named(1), ".name"),
        ({"type": "tool_definition", "definition": {"name": "f"}}, ".definition.input_schema"),
    ],
)
def test_a_change_that_cannot_be_read_is_refused_by_its_place(tool, at):
    """As any other value."""
    with pytest.raises(UnprocessableRequest) as refused:
        tools_from({"messages": [{"role": "system", "content": [change("addition", tool)]}]})
    assert f"messages.0.content.0.tool{at}" == refused.value.param


@pytest.mark.parametrize(
    ("tool", "named"),
    [
        ({"type": "web_search_20250305", "name": "web_search"}, "web_search"),
        ({"type": "code_execution_20250825", "name": "code_execution"}, "code_execution"),
        ({"type": "bash_20250124", "name": "bash"}, "bash"),
        ({"type": "mcp_toolset", "mcp_server_name": "files"}, "files"),
        ({"type": "odd"}, "odd"),
    ],
)
def test_tools_of_servers_are_refused_by_name(tool, named):
    """Nobody here could run them, or knows their schema."""
    with pytest.raises(UnprocessableRequest, match=rf"^tools\.1: tool '{named}' ") as refused:
        tools_from({"tools": [WEATHER, tool]})
    assert "tools.1" == refused.value.param


def test_tools_of_servers_are_left_out_where_the_configuration_says_so():
    """The others stay; a tool that cannot be read is refused all the same."""
    hosted = {"type": "web_search_20250305", "name": "web_search"}

    assert {"tools": [FUNCTION]} == tools_from({"tools": [hosted, WEATHER]}, ignore_hosted=True)
    assert {} == tools_from(
        {"tools": [hosted], "mcp_servers": [{}], "tool_choice": {"type": "auto"}}, ignore_hosted=True
    )
    with pytest.raises(UnprocessableRequest, match="^tools.0.name: "):
        tools_from({"tools": [{"type": "custom"}]}, ignore_hosted=True)


def test_servers_of_tools_are_refused():
    """Anthropic's servers would call them."""
    with pytest.raises(UnprocessableRequest, match="^mcp_servers: "):
        tools_from({"mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}]})
    assert {} == tools_from({"mcp_servers": []})


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "f"}, {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
        (
            {"type": "auto", "disable_parallel_tool_use": True},
            {"tool_choice": "auto", "parallel_tool_calls": False},
        ),
        ({"type": "auto", "disable_parallel_tool_use": False}, {"tool_choice": "auto"}),
    ],
)
def test_which_tools_may_be_called(choice, expected):
    """Chat has another word for each."""
    assert {"tools": [FUNCTION], **expected} == tools_from({"tools": [WEATHER], "tool_choice": choice})


def test_a_choice_among_no_tools():
    """What is so anyway is not said, as engines refuse it; what is impossible is the engine's to refuse."""
    assert {} == tools_from({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}})
    assert {} == tools_from({"tools": [], "tool_choice": {"type": "none"}})
    assert {"tool_choice": "required"} == tools_from({"tool_choice": {"type": "any"}})


@pytest.mark.parametrize(
    ("body", "at"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": {"a": 1}}, "tools"),
        ({"tools": [1]}, "tools.0"),
        ({"tools": [{"name": 1, "input_schema": {}}]}, "tools.0.name"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
        ({"tools": [{"name": "f", "input_schema": {}, "description": 1}]}, "tools.0.description"),
        ({"tools": [{"name": "f", "input_schema": {}, "strict": 1}]}, "tools.0.strict"),
        ({"tools": [{"type": 1}]}, "tools.0.type"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {}}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any", "disable_parallel_tool_use": 1}}, "tool_choice.disable_parallel_tool_use"),
    ],
)
def test_a_wrong_type_is_refused_by_its_place(body, at):
    """However deep it stands."""
    with pytest.raises(UnprocessableRequest) as refused:
        tools_from(body)
    assert at == refused.value.param
