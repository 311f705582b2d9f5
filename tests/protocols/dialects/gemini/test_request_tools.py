"""Function declarations and the function calling mode."""

import pytest

from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects.gemini.request import tools_from

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
DECLARED = {"name": "weather", "description": "d", "parametersJsonSchema": SCHEMA}
TOOLS = [{"functionDeclarations": [DECLARED, {"name": "now"}]}]


def mode(name, *names):
    return {"functionCallingConfig": {"mode": name, **({"allowedFunctionNames": list(names)} if names else {})}}


def names_of(fields):
    return [tool["function"]["name"] for tool in fields["tools"]]


def test_declarations_become_functions():
    """In both formats of schemas; a function without parameters has an empty object."""
    google = {
        "name": "weather",
        "description": "d",
        "parameters": {"type": "OBJECT", "properties": {"city": {"type": "STRING"}}},
    }
    expected = [
        {"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
    ]

    assert tools_from({"tools": TOOLS}) == {"tools": expected}
    assert tools_from({"tools": {"function_declarations": [google, {"name": "now"}]}}) == {"tools": expected}
    assert tools_from({"tools": [{"functionDeclarations": [one]} for one in (google, {"name": "now"})]}) == {
        "tools": expected
    }


@pytest.mark.parametrize(
    ("config", "choice"),
    [
        (mode("AUTO"), "auto"),
        (mode("auto"), "auto"),
        (mode("VALIDATED"), "auto"),
        (mode("MODE_UNSPECIFIED"), "auto"),
        (mode("NONE"), "none"),
        (mode("ANY"), "required"),
        (mode("ANY", "now"), {"type": "function", "function": {"name": "now"}}),
    ],
)
def test_the_mode_becomes_the_tool_choice(config, choice):
    """With all tools in the prompt."""
    fields = tools_from({"tools": TOOLS, "toolConfig": config})

    assert fields["tool_choice"] == choice
    assert names_of(fields) == ["weather", "now"]


@pytest.mark.parametrize("config", [mode("ANY", "now", "weather"), mode("VALIDATED", "now")])
def test_several_allowed_functions_are_the_offered_ones(config):
    tools = [{"functionDeclarations": [DECLARED, {"name": "now"}, {"name": "other"}]}]

    offered = names_of(tools_from({"tools": tools, "tool_config": config}))

    assert [
        name for name in ("weather", "now") if name in config["functionCallingConfig"]["allowedFunctionNames"]
    ] == offered


@pytest.mark.parametrize(
    "config", [{}, {"functionCallingConfig": {}}, mode("AUTO"), mode("NONE"), {"retrievalConfig": {}}]
)
def test_without_functions_there_is_no_tool_choice(config):
    assert tools_from({"toolConfig": config}) == tools_from({"toolConfig": config, "tools": [{}]}) == {}


@pytest.mark.parametrize(
    "name", ["googleSearch", "google_search", "codeExecution", "urlContext", "mcpServers", "newTool"]
)
def test_a_tool_that_google_runs_is_rejected_by_name_or_removed(name):
    body = {"tools": [{name: {}}, *TOOLS]}

    with pytest.raises(UnprocessableRequest, match=rf"tools\[0\].{name}: is a tool that Google runs"):
        tools_from(body)
    assert names_of(tools_from(body, ignore_hosted=True)) == ["weather", "now"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"tools": 1}, "tools: must be a list"),
        ({"tools": [{"functionDeclarations": 1}]}, r"tools\[0\].functionDeclarations: must be a list"),
        ({"tools": [{"functionDeclarations": [{}]}]}, r"functionDeclarations\[0\].name: must be a string"),
        ({"tools": [*TOOLS, *TOOLS]}, r"tools\[1\].functionDeclarations\[0\].name: 'weather' is declared twice"),
        (
            {"tools": [{"functionDeclarations": [{**DECLARED, "parameters": SCHEMA}]}]},
            "parametersJsonSchema: must not be present together with parameters",
        ),
        ({"tools": [{"functionDeclarations": [{"name": "f", "parametersJsonSchema": 1}]}]}, "must be an object"),
        ({"toolConfig": mode("ANY")}, "mode: ANY requires functionDeclarations"),
        ({"tools": TOOLS, "toolConfig": mode("SOME")}, "mode: must be one of"),
        ({"tools": TOOLS, "toolConfig": mode(1, "now")}, "may be set only with mode ANY or VALIDATED"),
        ({"tools": TOOLS, "toolConfig": mode("AUTO", "now")}, "may be set only with mode ANY or VALIDATED"),
        ({"tools": TOOLS, "toolConfig": mode("ANY", "unknown")}, "'unknown' is not one of the declared functions"),
    ],
)
def test_invalid_tools_are_rejected_by_their_field(body, message):
    with pytest.raises(UnprocessableRequest, match=message):
        tools_from(body)
