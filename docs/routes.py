"""Generates the lists of routes in docs/http-api.md, from the description at /openapi.json."""

import re
from collections.abc import Iterator
from typing import Any

from proxy.api.openapi import describe

_BLOCK = re.compile(r"(<!-- routes of ([^>]*?) -->\n).*?(?=<!-- end -->)", re.DOTALL)
_PREFIXES = ("/rollouts/{rollout_id}", "/sessions/{rollout_id}")
_MODEL_API = ("v1", "inference", "generate", "health")  # also below a rollout
_CALL = re.compile(r"Make a recorded call in the (\w+) dialect(?:, translated to chat)?\.")
_SECTIONS = {  # a route is in the first section with a pattern that its path begins with
    "steps and exports": r"/rollouts/\{rollout_id\}/(steps|tree|branches|values|export|images)|/export|/search",
    "rollouts": "/rollouts",
    "groups": "/groups",
    "batches": "/batches",
    "policies": "/polic|/training",
    "the model API": "/v1|/inference|/generate",
    "the process": "/",
}
_DESCRIBED = {  # bodies within bodies that another text describes
    "EndpointSettings": "`engines.endpoints[]` of the [settings](settings.md)",
    "Terms": "the fields of `POST /rollouts` but its IDs",
}
_FLOAT32 = 3.4028234663852886e38  # the bounds of rewards, which the page's text has


def api_page(page: str) -> str:
    """Return docs/http-api.md with its lists of routes."""
    described = describe()
    paths, schemas = described["paths"], described["components"]["schemas"]
    options = {"GET /export": {option["name"] for option in paths["/export"]["get"]["parameters"]}}
    options["POST /groups"] = set(_body(paths["/groups"]["post"], schemas)["properties"])
    routes: dict[str, dict[str, list[str]]] = {section: {} for section in _SECTIONS}  # the names by their text
    for path, methods in paths.items():
        if not _is_described_elsewhere(path, paths):
            section = next(name for name, start in _SECTIONS.items() if re.match(start, path))
            for method, route in methods.items():
                others = {name: names for name, names in options.items() if name != f"{method.upper()} {path}"}
                text = " ".join(_parts(route, schemas, others))
                call, name = _CALL.fullmatch(text), f"`{method.upper()} {path}`"
                if call:
                    text, name = "Make a recorded call in the dialect.", f"{name} ({call[1]})"
                routes[section].setdefault(text, []).append(name)
    if missing := _SECTIONS.keys() - {found[2] for found in _BLOCK.finditer(page)}:
        raise ValueError(f"docs/http-api.md has no list of the routes of {sorted(missing)}")
    lists = {
        section: "".join(f"- {', '.join(names)}: {text}\n" for text, names in listed.items())
        for section, listed in routes.items()
    }
    return _BLOCK.sub(lambda found: f"{found[1]}{lists[found[2]]}\n", page)


def _is_described_elsewhere(path: str, paths: dict[str, Any]) -> bool:
    """Return whether the page has the route below another path, or it is of the web UI or of Atropos' proxy."""
    if path == "/" or re.match(r"/(ui|setup|servers|sessions|\{uuid\})", path):
        return True
    if path.startswith("/policies/{policy}"):
        return path.replace("/policies/{policy}", "/policy") in paths
    return any(path.startswith(f"{prefix}/{start}") for prefix in _PREFIXES for start in _MODEL_API)


def _body(route: dict[str, Any], schemas: dict[str, Any]) -> Any:
    return schemas[_name(route["requestBody"]["content"]["application/json"]["schema"])]


def _parts(route: dict[str, Any], schemas: dict[str, Any], others: dict[str, set[str]]) -> Iterator[str]:
    """Yield the summary of a route, its query and its body."""
    yield route["summary"]
    query = {option["name"]: option["schema"] for option in route["parameters"] if option["in"] == "query"}
    if query:
        yield f"Query: {_fields(query, (), schemas, others)}."
    if "requestBody" in route:
        schema = _body(route, schemas)
        if properties := schema.get("properties"):
            yield f"Body: {_fields(properties, schema.get('required', ()), schemas, others)}."


def _fields(fields: dict[str, Any], required: Any, schemas: dict[str, Any], others: dict[str, set[str]]) -> str:
    """Return fields with types and defaults; the options of another route in one word, if there are many."""
    found = [(name, names) for name, names in others.items() if len(names & fields.keys()) > 7]
    shared = {field for _, names in found for field in names & fields.keys()}
    texts = [
        f"{f'**`{name}`**' if name in required else f'`{name}`'}{_of(name, schema, schemas)}{_default(schema)}"
        for name, schema in fields.items()
        if name not in shared
    ]
    for name, names in found:
        missing = ", ".join(f"`{field}`" for field in sorted(names - shared))
        texts.insert(0, f"the options of `{name}` (not {missing})")
    return ", ".join(texts)


def _of(name: str, schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    """Return the kind of a field; the page's introduction has the kind of numbers of seconds."""
    kind = _kind(schema, schemas)
    return kind.replace(" number > 0", "").replace(" number", "") if name.endswith("_s") else kind


def _default(schema: dict[str, Any]) -> str:
    default = schema.get("default")
    return f" = {default}" if isinstance(default, int | float | str) and not isinstance(default, bool) else ""


def _name(schema: dict[str, Any]) -> str:
    name: str = schema["$ref"].rpartition("/")[2]
    return name


def _kind(schema: dict[str, Any], schemas: dict[str, Any]) -> str:
    """Return a schema in a few words after a space; nothing for texts."""
    if "$ref" in schema:
        name = _name(schema)
        return f" ({_DESCRIBED.get(name) or _fields(schemas[name]['properties'], (), schemas, {})})"
    if "anyOf" in schema:
        kinds = dict.fromkeys(_kind(option, schemas) for option in schema["anyOf"] if option.get("type") != "null")
        return " or".join(kind or " text" for kind in kinds) if len(kinds) > 1 else "".join(kinds)
    if len(schema.get("enum", ())) > 10:
        return ""  # the formats: docs/formats.md has them
    if "enum" in schema or "const" in schema:
        return f" ({'|'.join(schema.get('enum') or [schema['const']])})"
    kind = schema.get("type", "any")
    if kind == "array":
        kind = _kind(schema.get("items", {}), schemas) or " text"
        return f" list of{kind}" if kind.endswith(")") else f"{kind}s"
    note = f" ({schema['description']})" if "description" in schema else ""
    return (f" {kind}" if kind != "string" else "") + _bounds(schema) + note


def _bounds(schema: dict[str, Any]) -> str:
    """Return the range of a number after a space; nothing for a minimum of 0, or of the least float above it."""
    low, high = schema.get("minimum", 0), schema.get("maximum", _FLOAT32)
    if high < _FLOAT32:
        return f" {low}-{high:,.10g}"
    if schema.get("exclusiveMinimum") == 0:
        return " > 0"
    return f" ≥ {low}" if low > 0 else ""
