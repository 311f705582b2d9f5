"""The names in texts of settings, routes, commands, environment variables, metrics and fields, and what the code defines."""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

import typer
import yaml
from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from tests.support.pages import ROOT

from proxy.api.health import STORE_GAUGES, make_info_metrics
from proxy.api.openapi import ROUTES
from proxy.cli.main import app
from proxy.config.settings import Settings
from proxy.simulator.sglang import SglangRoutes
from proxy.simulator.vllm import VllmRoutes
from proxy.telemetry.metrics import make_metrics

CODE = ("proxy/", "storage/", "tokentape/", "examples/", "benchmarks/", "docs/", "deploy/")
_PICTURES = (".png", ".svg", ".html")
_HISTORY = "CHANGELOG.md"  # has names of earlier versions
_PLANTED = "tests/test_names.py"  # has names that do not exist
_WORD = re.compile(r"[A-Za-z0-9_]+")
_CODE_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_CODE_BLOCK = re.compile(r"^( *)```(?!text|console)\w+[^\n]*\n.*?^\1```$", re.DOTALL | re.MULTILINE)


class Text(NamedTuple):
    """A text for readers: a page, or a docstring, a comment or a message of a program."""

    path: str
    text: str

    @property
    def is_page(self) -> bool:
        """Return whether it is a page of the documentation."""
        return self.path.endswith(".md")


@cache
def tracked() -> tuple[str, ...]:
    """Return the files of the repository."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    return tuple(path for path in listed.stdout.splitlines() if (ROOT / path).exists())


def texts() -> Iterator[Text]:
    """Yield what readers read: pages, files of deploy/, docstrings, comments and strings of Python, and other programs."""
    for path in tracked():
        if path.endswith(_PICTURES) or path == _HISTORY or "/vendor/" in path:
            continue
        if path.endswith(".py"):
            if path.startswith(CODE):
                yield Text(path, "\n".join(program(path).strings))
        elif (
            path.startswith(("docs/", "deploy/", "examples/"))
            or re.fullmatch(r"[A-Z]+\.md|[\w.]+\.yaml", path)
            or path.endswith((".js", ".lua"))
        ):
            yield Text(path, (ROOT / path).read_text())


class Program(NamedTuple):
    """What a Python file contains: comments and strings, and the words of identifiers and of strings but docstrings."""

    strings: tuple[str, ...]
    words: frozenset[str]


@cache
def program(path: str) -> Program:
    """Read a Python file."""
    source = (ROOT / path).read_text()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    strings = [token.string for token in tokens if token.type == tokenize.COMMENT]
    words: set[str] = set()
    described: set[int] = set()
    for node in ast.walk(ast.parse(source)):  # a definition comes before its docstring
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            described.add(id(getattr(node.body[0], "value", None)))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings.append(node.value)
            if id(node) not in described:
                words.update(_WORD.findall(node.value))
        for attribute in ("id", "attr", "name", "arg", "module"):
            if isinstance(named := getattr(node, attribute, None), str):
                words.update(_WORD.findall(named))
    return Program(tuple(strings), frozenset(words))


# Settings.


def settings_in(text: Text) -> Iterator[str]:
    """Yield the dotted names that begin with a section of the settings."""
    sections = "|".join(name for name, field in Settings.model_fields.items() if _models(field.annotation))
    part = r"\.(?!md\b|py\b|js\b|yaml\b)(?:\w+|\*(?!\*))(?:\[\w*\])?"
    if not text.path.endswith((".js", ".lua")):  # there they are expressions
        yield from re.findall(rf"(?<![\w./~-])(?:{sections})(?:{part})+(?![\w(/])", text.text)


def is_setting(name: str) -> bool:
    """Return whether a dotted name is a setting or a section; `*` is any setting, a key of a mapping is any name."""
    return _is_in(re.sub(r"\[\w*\]", "", name).split("."), Settings)


def _is_in(parts: list[str], model: type[BaseModel]) -> bool:
    if not parts or parts == ["*"]:
        return True
    field = model.model_fields.get(parts[0])
    if field is None:
        return False
    rest = parts[1:]
    if get_origin(field.annotation) is dict:
        rest = rest[1:]
    models = _models(field.annotation)
    return (
        not rest or (get_origin(field.annotation) is dict and not models) or any(_is_in(rest, each) for each in models)
    )


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models(argument)]


# Routes.


def routes_in(text: Text) -> Iterator[str]:
    """Yield methods with paths; in pages, also a path that is all of a code span, without a method."""
    for method, path in re.findall(r"\b(GET|POST|PUT|PATCH|DELETE) (/[^\s`,;()\"'<>\\|]*)", text.text):
        yield f"{method} {path.partition('?')[0].rstrip('.:')}"
    for span in _CODE_SPAN.findall(text.text) if text.is_page else ():
        if re.fullmatch(r"/[\w{}./:*…-]+(?:\?.*)?", span):
            yield span.partition("?")[0]


def is_route(name: str) -> bool:
    """Return whether the proxy or the simulator serves a route; a path without a method may be a part of one.

    Names of parameters, and IDs in their place, are any.
    """
    method, _, path = name.rpartition(" ")
    wanted = path.removesuffix("…").strip("/").split("/")
    for served, of_route in _routes():
        parts = of_route.strip("/").split("/")
        starts = range(len(parts) - len(wanted) + 1)
        if method and (served != method or len(parts) != len(wanted)):
            continue
        if any(
            all(_is_part(*pair, at) for at, pair in enumerate(zip(wanted, parts[start:], strict=False)))
            for start in starts
        ):
            return True
    return False


def _is_part(wanted: str, own: str, at: int) -> bool:
    """Return whether a part of a path is one of a route. A parameter at its beginning is not any word, as all are then."""
    name, is_called, method = own.partition("}:")
    if not name.startswith("{"):
        return wanted == own
    return wanted.endswith(f":{method}") if is_called else at > 0 or wanted.startswith("{")


@cache
def _routes() -> frozenset[tuple[str, str]]:
    engines = [(route.method, route.path) for kind in (VllmRoutes, SglangRoutes) for route in kind(None).table()]  # type: ignore[arg-type]
    return frozenset({*engines, *((route.method.upper(), route.path) for route in ROUTES)})


# Commands.


def commands_in(text: Text) -> Iterator[str]:
    """Yield command lines of `tokentape`: its words up to the first argument, and its options."""
    for found in re.finditer(
        r"(?<![\w./@:={-])(?<!--namespace )tokentape ((?:(?!`|\"|'|#|\||;|&&|\n|\]).)+)", text.text
    ):
        words = found[1].split()
        leading = next((at for at, word in enumerate(words) if not re.fullmatch(r"[a-z][a-z-]*", word)), len(words))
        options = [word.partition("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)]
        if (leading or options) and not re.search(r"(?:from|install|python -m) $", text.text[: found.start()][-12:]):
            yield " ".join(["tokentape", *words[:leading], *options])


def is_command(line: str) -> bool:
    """Return whether a command exists and has these options."""
    command: Any = _command_line()
    words = line.split()[1:]
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        if words[0] not in command.commands:
            return False
        command = command.commands[words.pop(0)]
    known = {"--help", *(name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts))}
    return all(word in known for word in words if word.startswith("-"))


def options_in(text: Text) -> Iterator[str]:
    """Yield options in code spans of pages, and in the strings of the proxy, for our commands and for other programs."""
    if text.is_page:
        for span in _CODE_SPAN.findall(text.text):
            yield from re.findall(r"(?<![\w-])--[a-z][\w-]*", span)
    elif text.path.startswith("proxy/") and text.path.endswith(".py"):
        yield from re.findall(r"(?<![\w-])--[a-z][\w-]*", text.text)


def is_option(name: str) -> bool:
    """Return whether a command has this option, or a program that is started, tested or defined here."""
    return name in _options()


@cache
def _options() -> frozenset[str]:
    found = {name for command in _commands() for each in command.params for name in (*each.opts, *each.secondary_opts)}
    for path in tracked():
        if path.endswith(".py") and not path.startswith("proxy/") and path != _PLANTED:
            found.update(name for text in program(path).strings for name in re.findall(r"^--[a-z][a-z-]*(?==|$)", text))
    return frozenset({"--help", *found})


@cache
def _commands() -> tuple[Any, ...]:
    found = [_command_line()]
    for command in found:  # grows meanwhile
        found += getattr(command, "commands", {}).values()
    return tuple(found)


@cache
def _command_line() -> Any:
    return typer.main.get_command(app)


# Environment variables.


def variables_in(text: Text) -> Iterator[str]:
    """Yield our environment variables."""
    yield from re.findall(r"\bTOKENTAPE_[A-Z_]*[A-Z]", text.text)


def is_variable(name: str) -> bool:
    """Return whether a variable sets a setting, is read by a command or the fixture, or is one of deploy/compose.yaml."""
    if is_setting(name.removeprefix("TOKENTAPE_").lower().replace("__", ".")):
        return True
    return name in _variables()


@cache
def _variables() -> frozenset[str]:
    of_compose = re.findall(r"\$\{(\w+)", (ROOT / "deploy" / "compose.yaml").read_text())
    envvars = [each.envvar for command in _commands() for each in command.params if isinstance(each.envvar, str)]
    of_fixture = re.findall(r'environ.get\("(\w+)', (ROOT / "tokentape" / "testing.py").read_text())
    return frozenset([*of_compose, *envvars, *of_fixture])


# Metrics.


def metrics_in(text: Text) -> Iterator[str]:
    """Yield names of metrics and of recording rules; one that ends with an underscore is the beginning of several."""
    yield from re.findall(r"(?<![\w/])(?:[a-z_]+:)?tokentape_[a-z0-9_]+(?::[a-z0-9_]+)?", text.text)


def is_metric(name: str) -> bool:
    """Return whether /metrics has a metric or a series, or metrics that begin with this, or a recording rule exists."""
    return any(known.startswith(name) for known in _metrics()) if name.endswith("_") else name in _metrics()


@cache
def _metrics() -> frozenset[str]:
    collectors = [
        *make_metrics(CollectorRegistry()).all(),
        *make_info_metrics(CollectorRegistry(), (), dict.fromkeys(STORE_GAUGES, "0"), {}),
    ]
    endings = {
        "counter": ("_total",),
        "histogram": ("", "_bucket", "_sum", "_count"),
        "summary": ("", "_sum", "_count"),
    }
    series = {
        metric.name + ending
        for collector in collectors
        for metric in collector.describe()
        for ending in endings.get(metric.type, ("",))
    }
    groups = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yml").read_text())["groups"]
    return frozenset(series | {rule["record"] for group in groups for rule in group["rules"] if "record" in rule})


# Fields.


def fields_in(text: Text) -> Iterator[str]:
    """Yield words with underscores, which name settings, fields, formats and the like: of pages, and in code spans.

    In pages, also those in blocks of output; code in other blocks is run or parsed by tests/test_pages.py.
    """
    read = _CODE_BLOCK.sub("", text.text) if text.is_page else "\n".join(_CODE_SPAN.findall(text.text))
    if text.is_page or text.path.endswith(".py"):
        yield from re.findall(r"(?<![\w.$/])(?!tokentape_)[a-z][a-z0-9]*(?:_[a-z0-9]+)+(?![\w(/]|\.\w)", read)


def is_field(name: str) -> bool:
    """Return whether a word is one of the code: of its identifiers and strings, docstrings excluded, or of its data."""
    return name in _fields()


@cache
def _fields() -> frozenset[str]:
    found: set[str] = set()
    for path in tracked():
        found.add(Path(path).stem)
        if path.endswith(".py") and path != _PLANTED:
            found |= program(path).words
        elif path.endswith((".lua", ".js", ".json", ".toml", ".yaml", ".yml", "Makefile")):
            found.update(_WORD.findall((ROOT / path).read_text()))
        elif path.endswith(".md"):
            for block in _CODE_BLOCK.finditer((ROOT / path).read_text()):
                found.update(_WORD.findall(block[0]))
    return frozenset(found)
