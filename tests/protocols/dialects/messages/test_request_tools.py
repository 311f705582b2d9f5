"""Tools of a Messages request, translated to chat."""

import pytest

from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects.messages.request import tools_from

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "weather", "description": "Tells it.", "input_schema": SCHEMA}
FUNCTION = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": SCHEMA}}


@pytest.mark.parametrize("extra", [{}, {"type": "custom"}, {"type": None}, {"cache_control": {"type": "ephemeral"}}])
def test_a_custom_tool_becomes_a_function(extra):
    """Fields that the model does not see are dropped."""
    assert {"tools": [FUNCTION]} == tools_from({"tools": [WEATHER | extra]})


def test_fields_that_chat_templates_show_are_kept():
    """The description is optional; a schema without a type gets `object`, as in vLLM."""
    extra_fields = {"strict": True, "defer_loading": True}
    tool = {"name": "f", "input_schema": {"properties": {}}, **extra_fields}

    assert [{"name": "f", "parameters": {"properties": {}, "type": "object"}, **extra_fields}] == [
        function["function"] for function in tools_from({"tools": [tool]})["tools"]
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
def test_tools_are_those_at_the_end_of_the_conversation(changes, names):
    """System messages may add and remove tools."""
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "system", "content": [*changes, {"type": "text", "text": "a"}]},
    ]
    body = {"messages": messages, "tools": [WEATHER, WEATHER | {"name": "late", "defer_loading": True}]}

    assert names == [tool["function"]["name"] for tool in tools_from(body)["tools"]]


def test_a_tool_that_is_added_is_no_longer_deferred():
    messages = [{"role": "system", "content": [change("addition", named("weather"))]}]

    assert {"tools": [FUNCTION]} == tools_from({"messages": messages, "tools": [WEATHER | {"defer_loading": True}]})


@pytest.mark.parametrize(
    ("tool", "path"),
    [
        (None, ""),
        ({"type": "odd"}, ".type"),
        (named("unknown"), ".name"),
        (named(1), ".name"),
        ({"type": "tool_definition", "definition": {"name": "f"}}, ".definition.input_schema"),
    ],
)
def test_an_invalid_tool_change_is_rejected_with_its_path(tool, path):
    with pytest.raises(UnprocessableRequest) as raised:
        tools_from({"messages": [{"role": "system", "content": [change("addition", tool)]}]})
    assert f"messages.0.content.0.tool{path}" == raised.value.param


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
def test_hosted_tools_are_rejected_by_name(tool, named):
    """Only Anthropic can run them."""
    with pytest.raises(UnprocessableRequest, match=rf"^tools\.1: tool '{named}' ") as raised:
        tools_from({"tools": [WEATHER, tool]})
    assert "tools.1" == raised.value.param


def test_hosted_tools_are_dropped_if_configured():
    """Other tools are kept, and invalid ones are still rejected."""
    hosted = {"type": "web_search_20250305", "name": "web_search"}

    assert {"tools": [FUNCTION]} == tools_from({"tools": [hosted, WEATHER]}, ignore_hosted=True)
    assert {} == tools_from(
        {"tools": [hosted], "mcp_servers": [{}], "tool_choice": {"type": "auto"}}, ignore_hosted=True
    )
    with pytest.raises(UnprocessableRequest, match="^tools.0.name: "):
        tools_from({"tools": [{"type": "custom"}]}, ignore_hosted=True)


def test_mcp_servers_are_rejected():
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
def test_tool_choice_is_translated(choice, expected):
    assert {"tools": [FUNCTION], **expected} == tools_from({"tools": [WEATHER], "tool_choice": choice})


def test_tool_choice_without_tools():
    """`auto` and `none` are dropped, as engines reject them; the engine rejects `required`."""
    assert {} == tools_from({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}})
    assert {} == tools_from({"tools": [], "tool_choice": {"type": "none"}})
    assert {"tool_choice": "required"} == tools_from({"tool_choice": {"type": "any"}})


@pytest.mark.parametrize(
    ("body", "path"),
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
def test_a_value_of_a_wrong_type_is_rejected_with_its_path(body, path):
    with pytest.raises(UnprocessableRequest) as raised:
        tools_from(body)
    assert path == raised.value.param
