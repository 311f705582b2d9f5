"""The layout of the sources: layers and import order, read from the syntax trees."""

import ast
import importlib
import re
import sys
from functools import cache
from pathlib import Path

import pytest

import proxy
import storage
import tokentape

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*ROOT.glob("proxy/**/*.py"), *ROOT.glob("storage/**/*.py"), *ROOT.glob("tokentape/*.py")])
PURE = ("protocols", "trajectory", "export")
IO = {
    "aiohttp", "asyncio", "os", "redis", "rich", "socket", "storage", "subprocess", "threading", "time", "typer", "valkey",
}  # fmt: skip

# The layers that each layer may import, besides itself. A new layer at proxy's root needs an entry here.
LAYERS: dict[str, tuple[str, ...] | None] = {
    "storage": (),
    "tokentape": (),
    "errors": (),
    "clock": (),
    "config": ("storage",),
    "trajectory": (),
    "continuation": ("trajectory",),
    "protocols": ("errors", "trajectory"),
    "export": ("trajectory",),
    "simulator": ("clock",),
    "telemetry": ("errors", "trajectory", "continuation", "protocols"),
    "upstream": ("errors", "config", "trajectory", "continuation", "protocols", "telemetry", "storage"),
    "rollouts": ("errors", "clock", "trajectory", "continuation", "protocols", "telemetry", "upstream", "storage"),
    "api": (
        "errors", "clock", "config", "trajectory", "continuation", "protocols", "export", "telemetry", "upstream", "rollouts",
        "storage",
    ),
    "server": (
        "errors", "clock", "config", "trajectory", "continuation", "protocols", "export", "simulator", "telemetry", "upstream",
        "rollouts", "api", "storage",
    ),
    "cli": None,  # everything
}  # fmt: skip

# The order of modules and folders within a layer, lowest first: a module imports its own row and the rows before it.
ORDERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "protocols": (
        ("json_texts", "accumulators", "sampling"),
        ("dialects",),
        ("engines",),
        ("parts",),
        ("response", "whole_response"),
        ("plan",),
        ("exchange", "resume"),
    ),
    "api": (
        ("api_keys", "in_flight"),
        ("context",),
        ("auth", "requests", "health", "failures", "body"),
        ("model", "control", "ui"),
        ("compat",),
        ("openapi",),
    ),
    "storage": (("types", "errors"), ("options",), ("redis", "embedded"), ("opening",)),
}
INDEPENDENT = {"model", "control", "ui"}  # in one row of `api`, and they never import each other
SERVERS = ("api", "server", "simulator")  # layers that may import aiohttp.web
# Modules that may open an HTTP client session.
CLIENTS = ("proxy/upstream/client.py", "proxy/api/compat/osmosis.py", "proxy/telemetry/", "proxy/cli/")

# Source files without a test file, each with its reason.
UNTESTED = {
    "proxy/api/context.py": "a record of what app makes, and no code",
    "proxy/__main__.py": "one call; tests/cli/test_main.py runs the command",
    "proxy/clock.py": "the machine's clock; new_id is asserted through every step id",
    "tokentape/types.py": "types; tests/tokentape/test_control_api.py asserts them against the proxy's answers",
    "storage/types.py": "frozen values; tests/storage/test_store.py reads them all",
    "storage/errors.py": "the kinds of one error; each is asserted where it is raised",
}
BANNED = {
    "utils",
    "util",
    "helpers",
    "helper",
    "common",
    "misc",
    "manager",
    "managers",
    "handler",
    "handlers",
    "data",
    "info",
    "process",
}


def relative_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def syntax_tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imported_modules(path: Path, *, whole: bool) -> frozenset[str]:
    """The modules a file imports: at its top level, or anywhere (`whole`)."""
    tree = syntax_tree(path)
    found = set()
    for node in ast.walk(tree) if whole else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def test_the_imported_packages_are_in_this_checkout():
    """`proxy` and `storage` are common names of packages."""
    assert Path(proxy.__file__) == ROOT / "proxy" / "__init__.py"
    assert Path(storage.__file__) == ROOT / "storage" / "__init__.py"
    assert Path(tokentape.__file__) == ROOT / "tokentape" / "__init__.py"


def test_each_source_file_has_a_test_file_unless_listed():
    """For example, proxy/protocols/plan.py has tests/protocols/test_plan.py."""
    without = set()
    for path in SOURCES:
        own = path.relative_to(ROOT)
        inner = Path(*own.parts[1:]) if own.parts[0] == "proxy" else own
        test = ROOT / "tests" / inner.with_name(f"test_{path.stem.strip('_')}.py")
        if path.name != "__init__.py" and not test.exists():
            without.add(relative_name(path))

    assert UNTESTED.keys() & set(map(relative_name, SOURCES)) | set() >= without
    assert without >= UNTESTED.keys()


def layer_from(name: str) -> str:
    """Return the layer of a dotted module name: the folder or module at proxy's root, or the top-level package."""
    parts = name.split(".")
    return parts[1] if parts[0] == "proxy" and len(parts) > 1 else parts[0]


MODULES = frozenset(map(module_name, SOURCES))


def own_imports(path: Path) -> frozenset[str]:
    """Return the modules of these packages that a file imports anywhere, without the names imported from them."""
    return imported_modules(path, whole=True) & MODULES


def test_a_module_imports_only_lower_layers():
    """Each layer imports only the layers that LAYERS lists for it."""
    violations = []
    for path in SOURCES:
        layer = layer_from(module_name(path))
        if layer not in ("proxy", "__main__") and LAYERS[layer] is not None:
            imported = {layer_from(name) for name in own_imports(path)} - {layer, "proxy"}
            violations += [(relative_name(path), other) for other in imported - set(LAYERS[layer])]

    assert violations == []


def test_proxys_root_has_exactly_the_layers():
    """At most 16 entries, with `__init__` and `__main__`."""
    entries = {
        Path(relative_name(path)).parts[1].removesuffix(".py")
        for path in SOURCES
        if "proxy" in relative_name(path).split("/")[0]
    }

    assert LAYERS.keys() - {"storage", "tokentape"} == {name for name in entries if not name.startswith("__")}
    assert len(entries) <= 16


@pytest.mark.parametrize("layer", ORDERS)
def test_modules_of_a_layer_import_only_their_own_row_and_the_rows_before_it(layer):
    rows = {name: row for row, names in enumerate(ORDERS[layer]) for name in names}
    base = 1 if layer == "storage" else 2
    violations = []
    for path in SOURCES:
        module = module_name(path).split(".")
        if layer_from(".".join(module)) != layer or len(module) <= base:
            continue  # another layer, or the package's own __init__
        inner = {
            name.split(".")[base] for name in own_imports(path) if layer_from(name) == layer and name.count(".") >= base
        }
        own = module[base]
        violations += [
            (relative_name(path), other)
            for other in inner - {own}
            if rows[other] > rows[own] or {own, other} <= INDEPENDENT or {own, other} == {"redis", "embedded"}
        ]

    assert violations == []


def test_pure_packages_import_no_io():
    """No sockets, no clock, no store."""
    pure = [path for path in SOURCES if path.relative_to(ROOT).parts[1] in PURE]

    assert pure
    assert [
        (relative_name(path), name)
        for path in pure
        for name in imported_modules(path, whole=True)
        if name.split(".")[0] in IO
    ] == []


def test_only_listed_modules_start_http_servers_or_clients():
    """SERVERS may import aiohttp.web; CLIENTS may open client sessions."""
    serving = [
        relative_name(path)
        for path in SOURCES
        if {"aiohttp.web", "aiohttp.web_response"} & imported_modules(path, whole=True)
        and layer_from(module_name(path)) not in SERVERS
    ]
    calling = [
        relative_name(path)
        for path in SOURCES
        for node in ast.walk(syntax_tree(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "ClientSession"
        and not relative_name(path).startswith(CLIENTS)
    ]

    assert (serving, calling) == ([], [])


def test_the_client_package_imports_only_httpx2_openai_and_numpy():
    """`tokentape` works without the server's dependencies; its command imports the server lazily, its fixture pytest, and one
    method numpy."""
    imported = {
        name.split(".")[0]
        for path in SOURCES
        if path.is_relative_to(ROOT / "tokentape")
        for name in imported_modules(path, whole=True)
    }

    assert imported - sys.stdlib_module_names == {"httpx2", "numpy", "openai", "pytest", "tokentape"}


def test_there_is_no_import_cycle():
    modules = {module_name(path): path for path in SOURCES}
    edges = {
        name: {imported for imported in imported_modules(path, whole=False) if imported in modules and imported != name}
        for name, path in modules.items()
    }
    # A package's __init__ imports its modules; a module may import from its own package.
    for name, path in modules.items():
        if path.name == "__init__.py":
            edges[name] = {inner for inner in edges[name] if not inner.startswith(f"{name}.")}
    while leaves := {name for name, inner in edges.items() if not inner}:
        edges = {name: inner - leaves for name, inner in edges.items() if name not in leaves}

    assert edges == {}


def test_every_file_outside_the_packages_imports_names_that_exist():
    """Benchmarks, pages and the tests of `make test-agents` and the like, which no other check imports."""
    missing = [
        (relative_name(path), f"{node.module}.{alias.name}")
        for folder in ("benchmarks", "deploy", "docs", "examples", "tests")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(syntax_tree(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("proxy", "storage", "tokentape")
        for alias in node.names
        if not exists(node.module, alias.name)
    ]

    assert missing == []


def exists(module: str, name: str) -> bool:
    return f"{module}.{name}" in MODULES or (module in MODULES and hasattr(importlib.import_module(module), name))


def test_modules_and_public_names_have_docstrings():
    assert [relative_name(path) for path in SOURCES if not ast.get_docstring(syntax_tree(path))] == []
    assert [(relative_name(path), name) for path in SOURCES for name in undocumented(syntax_tree(path))] == []


def undocumented(tree: ast.Module) -> list[str]:
    """Return the public functions, classes and methods of public classes that have no docstring, own or inherited."""
    return [
        node.name
        for scope in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_")]
        for node in scope.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and ast.get_docstring(node) is None
        and not (isinstance(scope, ast.ClassDef) and inherits_docstring(scope, node.name))
    ]


@cache
def class_definitions() -> dict[str, list[ast.ClassDef]]:
    found: dict[str, list[ast.ClassDef]] = {}
    for node in (node for path in SOURCES for node in syntax_tree(path).body if isinstance(node, ast.ClassDef)):
        found.setdefault(node.name, []).append(node)
    return found


def inherits_docstring(scope: ast.ClassDef, method: str) -> bool:
    """Return whether a base class documents a method, which `help` and editors then show."""
    named = [base.id for base in scope.bases if isinstance(base, ast.Name)]
    bases = [base for name in named for base in class_definitions().get(name, [])]
    return any(
        inherits_docstring(base, method)
        or any(getattr(n, "name", "") == method and ast.get_docstring(n) for n in base.body)
        for base in bases
    )


def test_no_file_or_folder_has_a_meaningless_name():
    """Such as utils, helpers or manager."""
    assert [relative_name(path) for path in SOURCES if path.stem in BANNED or path.parent.name in BANNED] == []


def test_except_exception_is_in_six_kinds_of_places_only():
    """The outermost middleware, the relay of a call, its continuation and trace, and strangers' programs: templates, agents."""
    places = [
        relative_name(path)
        for path in SOURCES
        for node in ast.walk(syntax_tree(path))
        if isinstance(node, ast.ExceptHandler) and isinstance(node.type, ast.Name) and node.type.id == "Exception"
    ]

    programs = ["proxy/simulator/jinja_template.py", "proxy/upstream/tokenizers.py", "tokentape/clients.py"]

    calls = ["proxy/api/model/relay.py", "proxy/api/model/call_trace.py", "proxy/rollouts/prompt_continuation.py"]

    assert {"proxy/api/failures.py", *calls, *programs} == set(places)


def test_only_the_settings_read_the_environment():
    """pydantic-settings does; no module uses os.environ but the fixture, which is part of the tests of agents."""
    violations = [
        relative_name(path)
        for path in SOURCES
        for node in ast.walk(syntax_tree(path))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    ]

    assert {"tokentape/testing.py"} == {*violations}
    assert sys.version_info >= (3, 11)


def test_a_field_of_a_step_is_in_at_most_8_files():
    """One that is recorded as the engine or the plan has it, and that readers see; records and exports read the definition."""
    naming = [relative_name(path) for path in SOURCES if "policy_version_end" in path.read_text()]

    assert len(naming) <= 8, naming


def test_the_makefile_names_existing_paths():
    """pytest runs no test at all if one of its paths is missing."""
    named = set(re.findall(r"(?<![\w/])(?:tests|docs|benchmarks)/[\w/]+(?:\.\w+)?", (ROOT / "Makefile").read_text()))

    assert "tests/cli/test_main.py" in named
    assert sorted(path for path in named if not (ROOT / path).exists()) == []
