"""The tools of a Messages request and the tool choice, as chat functions.

Hosted tools (Anthropic's own, or those of MCP servers) are refused: neither their results nor their schemas are available.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from proxy.protocols.dialects.messages.messages import TOOL_CHANGES
from proxy.protocols.dialects.translation import Json
from proxy.protocols.dialects.validation import a_flag, a_list, a_text, an_object, one_of, refusal

_CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": None}


def tools_from(body: Mapping[str, Any], *, ignore_hosted: bool = False) -> Json:
    """Return the chat fields with the tools and the tool choice.

    `ignore_hosted`: hosted tools are removed instead of refused.
    """
    if body.get("mcp_servers") and not ignore_hosted:
        raise refusal("mcp_servers", "tools of MCP servers are not supported; let the agent call them")
    tools = [] if body.get("tools") is None else a_list(body["tools"], "tools")
    offered = [_function(tool, f"tools.{n}", ignore_hosted=ignore_hosted) for n, tool in enumerate(tools)]
    offered = _changed([tool for tool in offered if tool], body)
    fields: Json = {"tools": offered} if offered else {}
    if body.get("tool_choice") is not None:
        fields |= _choice(an_object(body["tool_choice"], "tool_choice"), offers=bool(fields))
    return fields


def _function(value: Any, path: str, *, ignore_hosted: bool) -> Json:
    """Return one tool as a chat function; an empty object if it is ignored."""
    tool = an_object(value, path)
    kind = tool.get("type")
    if kind is not None and a_text(kind, f"{path}.type") != "custom":
        if ignore_hosted:
            return {}
        name = tool.get("name") or tool.get("mcp_server_name") or kind
        raise refusal(
            path,
            f"tool {str(name)[:64]!r} ({kind[:64]}) is not supported, only custom tools are; offer it with a name and an "
            "input_schema",
        )
    function: Json = {"name": a_text(tool.get("name"), f"{path}.name")}
    if tool.get("description") is not None:
        function["description"] = a_text(tool["description"], f"{path}.description")
    schema = an_object(tool.get("input_schema"), f"{path}.input_schema")
    function["parameters"] = schema if "type" in schema else {**schema, "type": "object"}  # as vLLM 0.32 completes it
    for name in ("strict", "defer_loading"):
        if tool.get(name) is not None:
            function[name] = a_flag(tool[name], f"{path}.{name}")
    return _as_function(function)


def _as_function(function: Json) -> Json:
    return {"type": "function", "function": function}


def _changed(offered: list[Json], body: Mapping[str, Any]) -> list[Json]:
    """Return the tools available at the end of the conversation: templates receive one list.

    Blocks of system messages add and remove tools. As in vLLM 0.32 (entrypoints/anthropic/serving.py:717), a tool that is
    added by its name is no longer deferred.
    """
    changes = list(_changes(body))
    if not changes:
        return offered
    tools = {tool["function"]["name"]: tool for tool in offered}
    removed: set[str] = set()
    for block, path in changes:
        change = an_object(block.get("tool"), path)
        if one_of(change.get("type"), f"{path}.type", ("tool_reference", "tool_definition")) == "tool_definition":
            tool = _function(change.get("definition"), f"{path}.definition", ignore_hosted=False)
            name = tool["function"]["name"]
            tools[name] = tool
        else:
            name = a_text(change.get("name"), f"{path}.name")
            if name not in tools:
                raise refusal(f"{path}.name", f"{name[:64]!r} is not one of the tools of the request")
            if block["type"] == "tool_addition":
                function = tools[name]["function"]
                tools[name] = _as_function({field: function[field] for field in function if field != "defer_loading"})
        (removed.add if block["type"] == "tool_removal" else removed.discard)(name)
    return [tool for name, tool in tools.items() if name not in removed]


def _changes(body: Mapping[str, Any]) -> Iterator[tuple[Json, str]]:
    """Yield the blocks that add or remove tools, each with the path of its tool; the turns are already validated."""
    for n, message in enumerate(body.get("messages") or ()):
        content = message["content"] if message["role"] == "system" else None
        for number, block in enumerate(content if isinstance(content, list) else ()):
            if block["type"] in TOOL_CHANGES:
                yield block, f"messages.{n}.content.{number}.tool"


def _choice(choice: Json, *, offers: bool) -> Json:
    """Return the fields of the tool choice; without tools, defaults are omitted, since vLLM 0.32 refuses them."""
    kind = one_of(choice.get("type"), "tool_choice.type", _CHOICES)
    fields: Json = {}
    if kind == "tool":
        name = a_text(choice.get("name"), "tool_choice.name")
        fields["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif offers or kind == "any":
        fields["tool_choice"] = _CHOICES[kind]
    if choice.get("disable_parallel_tool_use") is not None:
        alone = a_flag(choice["disable_parallel_tool_use"], "tool_choice.disable_parallel_tool_use")
        if alone and offers:
            fields["parallel_tool_calls"] = False
    return fields
