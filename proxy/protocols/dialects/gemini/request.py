"""A Gemini request, read as a chat call: its configuration, its functions and their schemas.

Fields without an equivalent in chat (`safetySettings`, `labels`, `serviceTier`, …) are recorded with the client's body, and not
sent.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from proxy.protocols.dialects.base import NO_REFERENCES, Json, ResolvedReferences, TranslationOptions
from proxy.protocols.dialects.gemini.contents import objects, read_contents, system_message
from proxy.protocols.dialects.translation import (
    a_count,
    a_flag,
    a_list,
    a_number,
    a_text,
    add_configured,
    an_object,
    at,
    chat_function,
    continue_last,
    optional,
    passed_fields,
    refusal,
    required,
    schema_format,
    snake_case,
    texts,
)

T = TypeVar("T")

# Sampling fields that are fields of `generationConfig`, or of other objects. Google's SDKs send the others as `extra_body`.
TRANSLATED: Final = frozenset({
    "temperature", "top_p", "top_k", "n", "seed", "max_tokens", "max_completion_tokens", "stop", "presence_penalty",
    "frequency_penalty", "response_format", "tool_choice",
})  # fmt: skip
_CONFIG: Final = "generationConfig"
_NUMBERS: Final = {
    "temperature": "temperature", "topP": "top_p", "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
}  # fmt: skip
_INTEGERS: Final = {"topK": "top_k", "maxOutputTokens": "max_tokens", "candidateCount": "n", "seed": "seed"}
_STORED: Final = {
    "cachedContent": "contents are not stored; send all of them with each call",
    "continuationToken": "responses are not continued by a token; send the contents of the model instead",
}
_LIMIT: Final = 2**63  # of integers in JSON for an engine
_LEVELS: Final = {
    "THINKING_LEVEL_UNSPECIFIED": None, "MINIMAL": "minimal", "LOW": "low", "MEDIUM": "medium", "HIGH": "high",
    "XHIGH": "xhigh",
}  # fmt: skip


def read(body: Mapping[str, Any], options: TranslationOptions, resolved: ResolvedReferences = NO_REFERENCES) -> Json:
    """Return the chat body of a request. Raises UnprocessableRequest, naming the field."""
    for name, reason in _STORED.items():
        if at(body, name)[0] is not None:
            raise refusal(name, reason)
    config = optional(an_object, body, _CONFIG) or {}
    chat: Json = {"model": body["model"]} if body.get("model") else {}
    chat["messages"] = [*system_message(body), *read_contents(body, options.thought, resolved.calls)]
    chat |= passed_fields(body, TRANSLATED)
    if body.get("chat_template_kwargs") is not None:
        chat["chat_template_kwargs"] = body["chat_template_kwargs"]
    chat |= {**_sampling(config), **_response_format(config), **_logprobs(config)}
    chat |= tools_from(body, ignore_hosted=options.ignore_hosted_tools)
    if chat["messages"][-1]["role"] == "assistant":
        continue_last(chat, options.thought)
    if not chat["messages"]:
        raise refusal("contents", "at least one content must have text")
    _set_reasoning(chat, config, options)
    if body.get("stream"):
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    return chat


def shows_thoughts(body: Mapping[str, Any]) -> bool:
    """Return whether the client requests reasoning; Google returns none otherwise."""
    thinking = optional(an_object, optional(an_object, body, _CONFIG) or {}, "thinkingConfig") or {}
    return at(thinking, "includeThoughts")[0] is True


def an_integer(value: Any, path: str) -> int:
    """Return the value if it is an integer, also if it is written as a float (`topK: 40.0`)."""
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < _LIMIT
    return int(value) if is_whole else a_count(value, path)


def one_of_names(value: Any, path: str, known: Mapping[str, T]) -> T:
    """Return what belongs to the name of an enum, which has any case."""
    name = a_text(value, path).upper()
    if name not in known:
        raise refusal(path, f"must be one of {', '.join(known)}, not {name[:64]!r}")
    return known[name]


def _sampling(config: Json) -> Json:
    fields: Json = {field: optional(a_number, config, name, _CONFIG) for name, field in _NUMBERS.items()}
    fields |= {field: optional(an_integer, config, name, _CONFIG) for name, field in _INTEGERS.items()}
    fields["stop"] = optional(texts, config, "stopSequences", _CONFIG) or None
    for modality in optional(texts, config, "responseModalities", _CONFIG) or ():
        if modality.upper() not in {"TEXT", "MODALITY_UNSPECIFIED"}:
            raise refusal(f"{_CONFIG}.responseModalities", f"must be TEXT, not {modality[:64]!r}")
    return {field: value for field, value in fields.items() if value is not None}


def _logprobs(config: Json) -> Json:
    count = optional(an_integer, config, "logprobs", _CONFIG)
    if optional(a_flag, config, "responseLogprobs", _CONFIG):
        return {"logprobs": True, "top_logprobs": count} if count else {"logprobs": True}
    if count is not None:
        raise refusal(f"{_CONFIG}.logprobs", "requires responseLogprobs")
    return {}


def _response_format(config: Json) -> Json:
    """Return `response_format` of a MIME type and a schema in one of its two formats."""
    if at(config, "responseFormat")[0] is not None:
        raise refusal(f"{_CONFIG}.responseFormat", "is not supported; use responseMimeType and responseJsonSchema")
    kind = optional(a_text, config, "responseMimeType", _CONFIG) or "text/plain"
    schema = _either_schema(config, "responseSchema", "responseJsonSchema", _CONFIG)
    if kind == "text/plain" and schema is None:
        return {}
    if kind != "application/json":
        known = "application/json" if schema is not None else "text/plain or application/json"
        raise refusal(f"{_CONFIG}.responseMimeType", f"must be {known}, not {kind[:64]!r}")
    if schema is None:
        return {"response_format": {"type": "json_object"}}
    return schema_format({"name": "response", "schema": schema, "strict": True})


def _set_reasoning(chat: Json, config: Json, options: TranslationOptions) -> None:
    """Set the fields of reasoning: a level is the effort, and a budget of 0 disables reasoning (the effort "none")."""
    path = f"{_CONFIG}.thinkingConfig"
    thinking = optional(an_object, config, "thinkingConfig", _CONFIG) or {}
    optional(a_flag, thinking, "includeThoughts", path)
    budget = optional(an_integer, thinking, "thinkingBudget", path)
    level, level_path = at(thinking, "thinkingLevel", path)
    effort = None if level is None else one_of_names(level, level_path, _LEVELS)
    if effort is not None and budget is not None:
        raise refusal(level_path, "must not be present together with thinkingBudget")
    if effort is None and budget is None:
        return
    if effort is not None:
        add_configured(chat, {**options.thinking, "reasoning_effort": effort})
    else:
        add_configured(chat, {"reasoning_effort": "none", **options.not_thinking} if budget == 0 else options.thinking)


_DECLARATIONS: Final = "functionDeclarations"
_MODES: Final = {"MODE_UNSPECIFIED": "auto", "AUTO": "auto", "VALIDATED": "auto", "ANY": "required", "NONE": "none"}


def tools_from(body: Mapping[str, Any], *, ignore_hosted: bool = False) -> Json:
    """Return the chat fields with the functions and the tool choice. Raises UnprocessableRequest.

    Tools that Google runs are refused, or removed with `ignore_hosted`: neither their results nor their schemas are available.
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
            name = required(a_text, declaration, "name", declared_path)
            description = optional(a_text, declaration, "description", declared_path)
            # The schema of its result is not sent: chat has no field for it.
            parameters = _either_schema(declaration, "parameters", "parametersJsonSchema", declared_path)
            parameters = parameters or {"type": "object", "properties": {}}
            if name in functions:
                raise refusal(f"{declared_path}.name", f"{name[:64]!r} is declared twice")
            functions[name] = chat_function(name, description=description, parameters=parameters)
    return _chosen(body, functions)


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
    choice: Any = None
    if given is not None:
        choice = one_of_names(given, mode_path, _MODES)
        if choice == "required" and not functions:
            raise refusal(mode_path, "ANY requires functionDeclarations")
        if choice == "required" and len(names) == 1:
            choice = chat_function(*names)
        elif names:
            functions = {name: function for name, function in functions.items() if name in names}
    if not functions:
        return {}
    fields: Json = {"tools": list(functions.values())}
    return fields if choice is None else {**fields, "tool_choice": choice}


_MAX_PATH: Final = 200  # characters; clients choose the names in a path
_COUNTS: Final = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")


def json_schema(value: Any, path: str) -> Json:
    """Return one of Google's schemas, an OpenAPI dialect with uppercase types, as JSON Schema.

    Fields that are unknown here are unchanged. Raises UnprocessableRequest.
    """
    schema: Json = {}
    given = {_NAMES.get(name, name): inner for name, inner in an_object(value, path).items() if inner is not None}
    for name, inner in given.items():
        if name in _READERS:
            field, read = _READERS[name]
            schema[field] = read(inner, _within(path, name))
        elif name == "example":
            schema["examples"] = [inner]
        elif name not in {"nullable", "propertyOrdering"} and (name, inner) != _ENUM_FORMAT:
            schema[name] = inner
    if schema.get("type") == "type_unspecified":
        del schema["type"]
    if given.get("nullable") is not None and a_flag(given["nullable"], f"{path}.nullable"):
        _allow_null(schema)
    if given.get("propertyOrdering") is not None and "properties" in schema:
        order = texts(given["propertyOrdering"], f"{path}.propertyOrdering")
        properties = schema["properties"]
        first = {name: properties[name] for name in order if name in properties}
        schema["properties"] = {**first, **properties}
    return schema


def _either_schema(value: Json, google: str, plain: str, path: str) -> Json | None:
    """Return the schema of an object with a field for each of its two formats; None if both are absent."""
    schema, given = optional(json_schema, value, google, path), optional(an_object, value, plain, path)
    if schema is not None and given is not None:
        raise refusal(f"{path}.{plain}", f"must not be present together with {google}")
    return schema if given is None else given


def _allow_null(schema: Json) -> None:
    if isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"], "null"]
    if "enum" in schema and None not in schema["enum"]:
        schema["enum"] = [*schema["enum"], None]
    if "anyOf" in schema and {"type": "null"} not in schema["anyOf"]:
        schema["anyOf"] = [*schema["anyOf"], {"type": "null"}]


def _type(value: Any, path: str) -> str | list[str]:
    if isinstance(value, list):  # JSON Schema's own
        return [name.lower() for name in texts(value, path)]
    return a_text(value, path).lower()


def _schemas(value: Any, path: str) -> list[Json]:
    return [json_schema(inner, f"{path}[{number}]") for number, inner in enumerate(a_list(value, path))]


def _named(value: Any, path: str) -> Json:
    return {name: json_schema(inner, _within(path, name)) for name, inner in an_object(value, path).items()}


def _within(path: str, name: str) -> str:
    """Return the path of a field. Long paths are not extended: the paths of many nested fields would fill the memory."""
    return path if len(path) > _MAX_PATH else f"{path}.{name[:_MAX_PATH]}"


def _additional(value: Any, path: str) -> Any:
    return value if isinstance(value, bool) else json_schema(value, path)


def _number(value: Any, path: str) -> int:
    """Return a number, which the JSON of protocol buffers writes as a string."""
    if type(value) is int or (isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 20):
        return int(value)
    raise refusal(path, "must be an integer")


# By field: the field of JSON Schema and the reader of its value.
_READERS: Final[Mapping[str, tuple[str, Callable[[Any, str], Any]]]] = {
    "type": ("type", _type),
    "properties": ("properties", _named),
    "items": ("items", json_schema),
    "anyOf": ("anyOf", _schemas),
    "enum": ("enum", a_list),
    "additionalProperties": ("additionalProperties", _additional),
    "ref": ("$ref", a_text),
    "defs": ("$defs", _named),
    "$defs": ("$defs", _named),
    **{name: (name, _number) for name in _COUNTS},
}
_ENUM_FORMAT: Final = ("format", "enum")  # of Google's strings with an `enum`; some grammars refuse unknown formats
_NAMES: Final = {snake_case(name): name for name in (*_READERS, "propertyOrdering")}
