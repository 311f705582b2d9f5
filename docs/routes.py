"""docs/api.md: every route with its parameters, its body and its answers, out of the description at /openapi.json."""

from collections.abc import Iterator
from typing import Any

from proxy.api.control.openapi import describe

_OPENING = """Every route of both APIs, as `GET /openapi.json` describes them; [http-api.md](http-api.md) has them in
examples. A body is JSON. A route of the control API wants a key of `control.api_keys`, where there are any, as
`Authorization: Bearer …`; one of the model API a key of `agents.api_keys`, or the rollout's own. Errors have the shapes of
[errors.md](errors.md).

Routes of the model API are there below `/rollouts/{rollout_id}` and `/sessions/{rollout_id}` too, but for those of Atropos'
proxy: a base URL then names the rollout.
"""
_PREFIXES = ("/rollouts/{rollout_id}", "/sessions/{rollout_id}")
_SECTIONS = {
    "Rollouts": ("/rollouts", "/export"),
    "Groups": ("/groups",),
    "Batches": ("/batches",),
    "Policy": ("/policy",),
    "Engines and the process": ("/engines", "/health", "/ready", "/metrics", "/openapi.json", "/events", "/ui"),
    "The model API": ("/v1", "/inference", "/generate"),
    "Atropos' proxy": ("/setup", "/servers", "/sessions", "/{uuid}"),
}


def api_page(made: str) -> str:
    """The page."""
    described = describe()
    paths = {
        path: routes for path, routes in described["paths"].items() if not _is_told_already(path, described["paths"])
    }
    placed: set[str] = set()
    parts = [f"# Routes\n\n{made}{_OPENING}"]
    for section, starts in _SECTIONS.items():
        found = [path for path in paths if any(path == start or path.startswith(f"{start}/") for start in starts)]
        placed |= set(found)
        parts.append(f"## {section}\n\n" + "\n".join(text for path in found for text in _path(path, paths[path])))
    if missing := paths.keys() - placed:
        raise ValueError(f"docs/routes.py has no section for {sorted(missing)}")
    return "\n".join(parts) + "\n" + _bodies(described["components"]["schemas"])


def _is_told_already(path: str, paths: dict[str, Any]) -> bool:
    """Whether it is a route of the model API with a rollout before it."""
    return any(path.startswith(prefix) and path.removeprefix(prefix) in paths for prefix in _PREFIXES)


def _path(path: str, routes: dict[str, Any]) -> Iterator[str]:
    for method, route in routes.items():
        yield f"### `{method.upper()} {path}`\n\n{route['summary']}\n"
        query = [one for one in route["parameters"] if one["in"] == "query"]
        if query:
            rows = [f"| `{one['name']}` | {_kind(one['schema'])} |" for one in query]
            yield "| query | |\n|---|---|\n" + "\n".join(rows) + "\n"
        if "requestBody" in route:
            name = route["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            yield f"Body: [{name}](#{name.lower()})\n"
        answers = (f"{status} {said['description']}" for status, said in route["responses"].items())
        yield f"Answers: {'; '.join(answers)}.\n"


def _bodies(schemas: dict[str, Any]) -> str:
    parts = ["## Bodies\n\nA field without a default must be there; fields that are not listed are refused with 422.\n"]
    for name, schema in sorted(schemas.items()):
        rows = [
            f"| `{field}` | {_kind(told)} | {_default(field, told, schema)} | {told.get('description', '')} |"
            for field, told in schema.get("properties", {}).items()
        ]
        table = "| field | type | default | |\n|---|---|---|---|\n" + "\n".join(rows) + "\n" if rows else ""
        parts.append(f"### {name}\n\n{_first(schema.get('description', ''))}{table}")
    return "\n".join(parts)


def _first(text: str) -> str:
    return " ".join(text.split()) + "\n\n" if text else ""


def _default(field: str, told: dict[str, Any], schema: dict[str, Any]) -> str:
    return "—" if field in schema.get("required", ()) else f"`{told.get('default')!r}`" if "default" in told else ""


def _kind(schema: dict[str, Any]) -> str:
    """A schema in a few words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_kind(schema['additionalProperties'])}"
    return " ".join([kind, *_bounds(schema)]) + (f": {schema['description']}" if "description" in schema else "")


def _bounds(schema: dict[str, Any]) -> Iterator[str]:
    for name, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<")):
        if name in schema:
            yield f"{sign} {schema[name]:,}"
