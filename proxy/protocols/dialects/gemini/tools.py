"""The function declarations of a Gemini request and its function calling mode, as chat functions.

Tools that Google runs are refused: neither their results nor their schemas are available.
"""

from collections.abc import Mapping
from typing import Any, Final

from proxy.protocols.dialects.gemini.fields import at, objects, one_of_names, optional, required, snake_case, texts
from proxy.protocols.dialects.gemini.schemas import json_schema
from proxy.protocols.dialects.translation import Json
from proxy.protocols.dialects.validation import a_text, an_object, refusal

_DECLARATIONS: Final = "functionDeclarations"
_MODES: Final = {"MODE_UNSPECIFIED": "auto", "AUTO": "auto", "VALIDATED": "auto", "ANY": "required", "NONE": "none"}


def tools_from(body: Mapping[str, Any], *, ignore_hosted: bool = False) -> Json:
    """Return the chat fields with the functions and the tool choice. Raises UnprocessableRequest.

    `ignore_hosted`: tools that Google runs are removed instead of refused.
    """
    functions: dict[str, Json] = {}
    for tool, path in optional(objects, body, "tools") or ():
        hosted = [
            name
            for name, value in tool.items()
            if value is not None and name not in (_DECLARATIONS, snake_case(_DECLARATIONS))
        ]
        if hosted and not ignore_hosted:
            raise refusal(
                f"{path}.{hosted[0][:64]}",
                "is a tool that Google runs, which is not supported; use functionDeclarations, or set "
                "dialects.ignore_hosted_tools to remove such tools",
            )
        for declaration, declared_path in optional(objects, tool, _DECLARATIONS, path) or ():
            function = _function(declaration, declared_path)
            if function["name"] in functions:
                raise refusal(f"{declared_path}.name", f"{function['name'][:64]!r} is declared twice")
            functions[function["name"]] = function
    return _chosen(body, functions)


def _function(declaration: Json, path: str) -> Json:
    """Return a declaration as a chat function. Its result's schema is not sent: chat has no field for it."""
    function: Json = {"name": required(a_text, declaration, "name", path)}
    description = optional(a_text, declaration, "description", path)
    if description is not None:
        function["description"] = description
    parameters = optional(json_schema, declaration, "parameters", path)
    plain, plain_path = at(declaration, "parametersJsonSchema", path)
    if plain is not None:
        if parameters is not None:
            raise refusal(plain_path, "must not be present together with parameters")
        parameters = an_object(plain, plain_path)
    function["parameters"] = parameters or {"type": "object", "properties": {}}
    return function


def _chosen(body: Mapping[str, Any], functions: Mapping[str, Json]) -> Json:
    """Return the fields of the tools and the tool choice; without tools, defaults are omitted, since vLLM 0.32 refuses them.

    One allowed function is the tool choice; of several, only these are offered.
    """
    config = optional(an_object, body, "toolConfig") or {}
    path = "toolConfig.functionCallingConfig"
    calling = optional(an_object, config, "functionCallingConfig", "toolConfig") or {}
    given, mode_path = at(calling, "mode", path)
    names = dict.fromkeys(optional(texts, calling, "allowedFunctionNames", path) or ())
    if names and (not isinstance(given, str) or given.upper() not in {"ANY", "VALIDATED"}):
        raise refusal(f"{path}.allowedFunctionNames", "may be set only with mode ANY or VALIDATED")
    for name in names:
        if name not in functions:
            raise refusal(f"{path}.allowedFunctionNames", f"{name[:64]!r} is not one of the declared functions")
    if given is None:
        return _fields(functions.values(), None)
    choice: Any = one_of_names(given, mode_path, _MODES)
    if choice == "required" and not functions:
        raise refusal(mode_path, "ANY requires functionDeclarations")
    if choice == "required" and len(names) == 1:
        return _fields(functions.values(), {"type": "function", "function": {"name": next(iter(names))}})
    return _fields([function for name, function in functions.items() if not names or name in names], choice)


def _fields(functions: Any, choice: Any) -> Json:
    tools = [{"type": "function", "function": function} for function in functions]
    if not tools:
        return {}
    return {"tools": tools} if choice is None else {"tools": tools, "tool_choice": choice}
