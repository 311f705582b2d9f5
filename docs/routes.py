"""Generates docs/api.md: every route with its parameters, body and responses, from the description at /openapi.json."""

from collections.abc import Iterator
from typing import Any

from proxy.api.control.openapi import describe

_OPENING = """Look up here the parameters, the body and the responses of a route; [the HTTP API](http-api.md) has examples.

Bodies are JSON. The control API requires a key of `control.api_keys`, if any are configured, as `Authorization: Bearer …`.
The model API requires a key of `agents.api_keys`, or the rollout's own. [Errors](errors.md) have a common format.

Routes of the model API, except those of Atropos' proxy, are also available below `/rollouts/{rollout_id}` and
`/sessions/{rollout_id}`, so a base URL can contain the rollout ID.
"""
_PREFIXES = ("/rollouts/{rollout_id}", "/sessions/{rollout_id}")
_SECTIONS = {
    "Rollouts": ("/rollouts", "/export", "/search"),
    "Groups": ("/groups",),
    "Batches": ("/batches",),
    "Policies": ("/policy", "/policies", "/training"),
    "Engines and the process": (
        "/engines",
        "/health",
        "/healthz",
        "/ready",
        "/readyz",
        "/metrics",
        "/openapi.json",
        "/events",
        "/ui",
        "/",
    ),
    "The model API": ("/v1", "/v1beta", "/inference", "/generate"),
    "Atropos' proxy": ("/setup", "/servers", "/sessions", "/{uuid}"),
}


def api_page(made: str) -> str:
    """Return the page."""
    described = describe()
    paths = {path: routes for path, routes in described["paths"].items() if not _is_duplicate(path, described["paths"])}
    placed: set[str] = set()
    parts = [f"# Routes\n\n{made}{_OPENING}"]
    for section, starts in _SECTIONS.items():
        found = [path for path in paths if any(path == start or path.startswith(f"{start}/") for start in starts)]
        placed |= set(found)
        parts.append(f"## {section}\n\n" + "\n".join(text for path in found for text in _path(path, paths[path])))
    if missing := paths.keys() - placed:
        raise ValueError(f"docs/routes.py has no section for {sorted(missing)}")
    return "\n".join(parts) + "\n" + _bodies(described["components"]["schemas"])


def _is_duplicate(path: str, paths: dict[str, Any]) -> bool:
    """Return whether it is a route of the model API with a rollout in the path."""
    return any(path.startswith(prefix) and path.removeprefix(prefix) in paths for prefix in _PREFIXES)


def _path(path: str, routes: dict[str, Any]) -> Iterator[str]:
    for method, route in routes.items():
        yield f"### `{method.upper()} {path}`\n\n{route['summary']}\n"
        query = [parameter for parameter in route["parameters"] if parameter["in"] == "query"]
        if query:
            rows = [f"| `{parameter['name']}` | {_kind(parameter['schema'])} |" for parameter in query]
            yield "| query | |\n|---|---|\n" + "\n".join(rows) + "\n"
        if "requestBody" in route:
            name = route["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            yield f"Body: [{name}](#{name.lower()})\n"
        responses = (f"{status} {response['description']}" for status, response in route["responses"].items())
        yield f"Responses: {'; '.join(responses)}.\n"


def _bodies(schemas: dict[str, Any]) -> str:
    parts = ["## Bodies\n\nFields without a default are required. Fields that are not listed get 422.\n"]
    for name, schema in sorted(schemas.items()):
        rows = [
            f"| `{field}` | {_kind(value)} | {_default(field, value, schema)} | {value.get('description', '')} |"
            for field, value in schema.get("properties", {}).items()
        ]
        table = "| field | type | default | |\n|---|---|---|---|\n" + "\n".join(rows) + "\n" if rows else ""
        parts.append(f"### {name}\n\n{_first(schema.get('description', ''))}{table}")
    return "\n".join(parts)


def _first(text: str) -> str:
    return " ".join(text.split()) + "\n\n" if text else ""


def _default(field: str, value: dict[str, Any], schema: dict[str, Any]) -> str:
    return "—" if field in schema.get("required", ()) else f"`{value.get('default')!r}`" if "default" in value else ""


def _kind(schema: dict[str, Any]) -> str:
    """Return a schema in a few words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_kind(option) for option in schema["anyOf"])
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
