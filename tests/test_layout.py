"""The house: its tree, its import rules and its sizes, read off the source."""

import ast
import sys
from functools import cache
from pathlib import Path

import pytest

import proxy
import storage
import tokentape

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*ROOT.glob("proxy/**/*.py"), *ROOT.glob("storage/**/*.py"), *ROOT.glob("tokentape/*.py")])
PURE = ("wire", "dialects", "engines", "trajectory", "export")
IO = {
    "aiohttp", "asyncio", "os", "redis", "rich", "socket", "storage", "subprocess", "threading", "time", "typer", "valkey",
}  # fmt: skip
SHELLS = {
    "admission", "app", "attempts", "audit", "by_chat", "callers", "calls", "check", "clientside", "clock",
    "compat", "config", "connections", "control", "counting", "download", "drift_watch", "drifting", "earlier", "fleet",
    "lifetimes", "logs", "metrics", "page", "parts", "passthrough", "pause", "places", "pressure", "probes", "push",
    "reading", "recorder", "refusals", "relay", "remembered", "rollouts", "sections", "server", "settling", "signals",
    "simulator", "spool", "standin", "standing", "stopping", "stored_responses", "systems", "terminal", "token_replies",
    "token_texts", "tokenizers", "totals", "upstream", "window", "worker", "workers",
}  # fmt: skip
STORAGE_ROWS = (("types", "errors"), ("queue", "options"), ("store",), ("redis", "embedded"))

# A file without a test file is a decision, and decisions are listed here, each with its reason.
UNTESTED = {
    "proxy/api/context.py": "a record of what app makes, and no code",
    "proxy/config/sections.py": "values; tests/config/test_settings.py and tests/test_docs.py read them through the settings",
    "proxy/errors.py": "a tree of names; docs/errors.md is made from it, and every status is asserted where it is raised",
    "proxy/clock.py": "the machine's clock; new_id is asserted through every step id",
    "proxy/trajectory/step.py": "frozen values; tests/trajectory/test_codec.py draws them all",
    "proxy/protocols/engines/base.py": "a protocol",
    "proxy/protocols/dialects/translation.py": "protocols, and values without code",
    "tokentape/types.py": "types; tests/tokentape/test_requests.py asserts them against the proxy's answers",
    "proxy/cli/check/finding.py": "a frozen value",
    "proxy/cli/runner.py": "values; tests/cli/test_main.py asserts what each command ends with, docs/cli.md is made of them",
    "proxy/cli/options.py": "types; tests/cli/test_main.py and docs/cli.md read them through the commands",
    "storage/store.py": "a protocol; tests/storage/test_store.py is its contract suite",
    "storage/types.py": "frozen values; tests/storage/test_store.py reads them all",
    "storage/errors.py": "the kinds of one error; each is asserted where it is raised",
    "storage/redis/listing.py": "asserted by the contract suite, on every kind of server",
    "storage/redis/announcements.py": "asserted by the contract suite, on every kind of server",
    "storage/queue.py": "a protocol; tests/storage/redis/test_queue.py is its contract suite",
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


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, *, whole: bool) -> set[str]:
    """The modules a file imports: at its top level, or anywhere (`whole`)."""
    tree = tree_of(path)
    found = set()
    for node in ast.walk(tree) if whole else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_the_packages_are_ours():
    """`proxy` and `storage` are common names: what is imported is this checkout's."""
    assert ROOT / "proxy" / "__init__.py" == Path(proxy.__file__)
    assert ROOT / "storage" / "__init__.py" == Path(storage.__file__)
    assert ROOT / "tokentape" / "__init__.py" == Path(tokentape.__file__)


def test_each_source_file_has_its_test_file():
    """proxy/protocols/sse.py is tested by tests/protocols/test_sse.py; exceptions are listed, and none is listed in vain."""
    without = set()
    for path in SOURCES:
        own = path.relative_to(ROOT)
        inner = Path(*own.parts[1:]) if own.parts[0] == "proxy" else own
        test = ROOT / "tests" / inner.with_name(f"test_{path.stem.strip('_')}.py")
        if path.name != "__init__.py" and not test.exists():
            without.add(name_of(path))

    assert UNTESTED.keys() & set(map(name_of, SOURCES)) | set() >= without
    assert without >= UNTESTED.keys() - {"storage/store.py"}


@pytest.mark.parametrize("path", [path for path in SOURCES if path.relative_to(ROOT).parts[1] in PURE], ids=name_of)
def test_pure_packages_import_no_io(path):
    """The core stays a core: no sockets, no clock, no store, and none of the shells."""
    imported = imports_of(path, whole=True)
    shells = {name.split(".")[1] for name in imported if name.startswith("proxy.")} & SHELLS

    assert set() == {name.split(".")[0] for name in imported} & IO
    assert set() == shells


def test_storage_knows_nothing_of_the_proxy():
    """Below everything, bytes and names only."""
    guilty = [
        name_of(path)
        for path in SOURCES
        if path.is_relative_to(ROOT / "storage")
        and any(name.split(".")[0] == "proxy" for name in imports_of(path, whole=True))
    ]

    assert [] == guilty


def test_storage_is_imported_in_one_order():
    """Within storage, a module imports its own row and the rows above it; the packages `redis` and `embedded` do not meet."""
    rows = {name: row for row, names in enumerate(STORAGE_ROWS) for name in names}
    guilty = []
    for path in (
        path for path in SOURCES if path.is_relative_to(ROOT / "storage") and path != ROOT / "storage/__init__.py"
    ):
        room = module_of(path).split(".")[1]
        rooms = {name.split(".")[1] for name in imports_of(path, whole=True) if name.startswith("storage.")}
        guilty += [(name_of(path), other) for other in rooms - {room} if rows[other] >= max(1, rows[room])]

    assert [] == guilty


def test_the_client_imports_nothing_of_the_rest():
    """`tokentape` works with nothing of the server installed; only its command imports the server, by name."""
    imported = {
        name.split(".")[0]
        for path in SOURCES
        if path.is_relative_to(ROOT / "tokentape")
        for name in imports_of(path, whole=True)
    }

    assert {"httpx2", "openai", "tokentape"} == imported - sys.stdlib_module_names


def test_there_is_no_import_cycle():
    """Modules can be read in one order."""
    modules = {module_of(path): path for path in SOURCES}
    edges = {
        name: {imported for imported in imports_of(path, whole=False) if imported in modules and imported != name}
        for name, path in modules.items()
    }
    # A package's __init__ gathers its modules; that a module imports its own package's base is no cycle.
    for name, path in modules.items():
        if path.name == "__init__.py":
            edges[name] = {inner for inner in edges[name] if not inner.startswith(f"{name}.")}
    while leaves := {name for name, inner in edges.items() if not inner}:
        edges = {name: inner - leaves for name, inner in edges.items() if name not in leaves}

    assert {} == edges


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_and_functions_are_short(path):
    """A file has at most 400 lines and a function at most 50."""
    functions = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]

    assert len(path.read_text().splitlines()) <= 400
    assert [] == [node.name for node in functions if node.end_lineno - node.lineno >= 50]


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_modules_and_public_names_say_what_they_are(path):
    """A module opens with a paragraph; everything public has a docstring."""
    tree = tree_of(path)
    bare = [
        node.name
        for scope in [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_")]
        for node in scope.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and ast.get_docstring(node) is None
    ]

    assert ast.get_docstring(tree)
    assert [] == bare


def test_nothing_is_called_by_a_word_that_says_nothing():
    """A thing that is hard to name is a noun that is missing."""
    assert [] == [name_of(path) for path in SOURCES if path.stem in BANNED or path.parent.name in BANNED]


def test_catching_everything_happens_in_three_places():
    """The outermost middleware, the relay of a call, and around the programs that chat templates are; nowhere else."""
    places = [
        name_of(path)
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ExceptHandler) and isinstance(node.type, ast.Name) and node.type.id == "Exception"
    ]

    assert ["proxy/server/app.py", "proxy/api/model/relay.py", "proxy/upstream/tokenizers.py"] == sorted(places)


def test_the_environment_is_read_in_one_place():
    """By the settings; the command line's own options aside."""
    guilty = [
        name_of(path)
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    ]

    assert [] == guilty
    assert sys.version_info >= (3, 11)
