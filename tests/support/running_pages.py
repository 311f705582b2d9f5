"""Blocks of pages, run as a reader would: Python and shell against a served proxy, other languages validated.

There is one function for each language and one for each program of a shell line; an unknown one is an error with the
fix. The test's addresses replace the addresses in pages: 127.0.0.1:8400 is the proxy, 8000 and 8401 are engines.
"""

import contextlib
import io
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import typer
import yaml
from pydantic import BaseModel
from tests.support.pages import ROOT, Block
from typer.testing import CliRunner

from proxy.api.openapi import ROUTES
from proxy.cli.main import app
from proxy.config.settings import load

LASTING = {"serve", "simulate", "tail"}  # their options are parsed, and they do not run
KEY = "CONTROL_KEY"  # a line with this is sent to a proxy with this control key
_TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@dataclass
class Reader:
    """The state of a page's reader: addresses, working directory, and the names defined so far."""

    proxy: str
    keyed: str
    engine: str
    folder: Path
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})

    def here(self, text: str) -> str:
        """Return a text with the addresses that are served."""
        served = self.keyed if KEY in text else self.proxy
        text = re.sub(r"(?:http://)?(127\.0\.0\.1|localhost):8400", lambda found: _like(found, served), text)
        return re.sub(
            r"(?:http://)?(127\.0\.0\.1|localhost):(8000|8401)", lambda found: _like(found, self.engine), text
        )


def _like(found: re.Match[str], url: str) -> str:
    return url if found[0].startswith("http://") else url.removeprefix("http://")


def follow(block: Block, reader: Reader) -> str:
    """Check a block by its language; return what it printed.

    Raises:
        AssertionError: the block is wrong; the message has its location.
    """
    assert block.language in LANGUAGES, (
        f"{block.place}: no check exists for blocks of {block.language or 'no language'!r}. Use one of {sorted(LANGUAGES)} "
        "(`console` and `text` are output and not run), or name its test above it: <!-- checked by tests/… -->"
    )
    try:
        return LANGUAGES[block.language](block.text, reader) or ""
    except (Exception, SystemExit) as error:
        raise AssertionError(f"{block.place}: {error!r}") from error


def _python(text: str, reader: Reader) -> str:
    """Run a block as a reader pastes it: the blocks of a page are one program, without `await` at the top level."""
    code = compile(reader.here(text), "a page", "exec")
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.chdir(reader.folder):
        exec(code, reader.names)
    return printed.getvalue()


def _bash(text: str, reader: Reader) -> str:
    """Run each line by its program; those that are not ours run in bash, together."""
    script, printed = [], []
    for line in _lines(text):
        words = shlex.split(line, comments=True)
        if not words:
            continue
        if (checked := PROGRAMS.get(words[0])) is not None:
            printed.append(checked(shlex.split(reader.here(line), comments=True), reader) or "")
        else:
            _refuse_strangers(line)
            script.append(reader.here(line))
    if script:
        printed.append(_run_bash("\n".join(script), reader))
    return "".join(printed)


def _refuse_strangers(line: str) -> None:
    """Reject programs other than curl and those that every machine has."""
    first = line.split(maxsplit=1)[0]
    known = {
        "curl",
        "cat",
        "cp",
        "echo",
        "export",
        "for",
        "head",
        "mkdir",
        "rm",
        "sleep",
        "sort",
        "tail",
        "wc",
        "while",
    }
    assert first in known or re.match(r"\w+=", first), (
        f"{first!r} is not run by the tests: a line that this machine cannot run belongs in a ```console block, "
        "with `$ ` before it"
    )


def _run_bash(script: str, reader: Reader) -> str:
    (reader.folder / ".curlrc").write_text("fail-with-body\nmax-time = 20\n")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        capture_output=True, text=True, timeout=120, check=False, cwd=reader.folder,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "CURL_HOME": str(reader.folder), "HOME": str(reader.folder)},
    )  # fmt: skip
    assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
    return done.stdout


def _console(text: str, reader: Reader) -> None:
    """Parse the commands of a transcript without running them."""
    for line in _lines(text):
        with contextlib.suppress(ValueError):  # output may contain a quote
            words = shlex.split(line, comments=True)
            if words[:1] == ["$"] and words[1:2] in (["make"], ["pip"]):
                PROGRAMS[words[1]](words[1:], reader)
            if words[:2] == ["$", "tokentape"]:
                read_command(words[2:])
            if words[:3] == ["$", "vllm", "serve"]:
                _vllm(words[4:])


def _vllm(words: list[str]) -> None:
    """Check that the real engine's tests use these vLLM flags."""
    source = (ROOT / "tests" / "system" / "real_engines" / "conftest.py").read_text()
    for flag, value in zip(words, [*words[1:], "--"], strict=True):
        if flag.startswith("--"):
            option = flag if value.startswith("--") else f"{flag}={value}"
            assert f'"{option}"' in source, f"tests/system/real_engines does not start vLLM with {option}"


def _lines(text: str) -> Iterator[str]:
    """Split a script into lines, joined at a backslash or an open quote."""
    gathered = ""
    for line in text.splitlines():
        gathered = f"{gathered}\n{line}" if gathered else line
        if not gathered.endswith("\\") and _is_complete(gathered):
            yield gathered
            gathered = ""
    assert not gathered, f"an incomplete line: {gathered}"


def _is_complete(line: str) -> bool:
    try:
        shlex.split(line, comments=True)
    except ValueError:
        return False
    return True


def read_command(words: list[str]) -> None:
    """Parse one of our command lines without running it. Raises click's error if it is invalid."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        name, *words = words
        assert name in command.commands, f"there is no command {name!r}"
        command = command.commands[name]
    if not {"--help", "--version", "--install-completion", "--show-completion"} & set(words):
        command.make_context("tokentape", words)


def _tokentape(words: list[str], reader: Reader) -> str:
    words = words[1:]
    if not words or words[0] in LASTING or any(re.fullmatch("[A-Z]{3,}", word) for word in words):  # ROLLOUT is any
        read_command(words)
        return ""
    with contextlib.chdir(reader.folder):
        done = CliRunner().invoke(app, words, env={"TOKENTAPE_URL": reader.proxy})
    assert done.exit_code == 0, f"{words}: exit code {done.exit_code}\n{done.output}"
    return done.output


def _make(words: list[str], _: Reader) -> None:
    for word in words[1:]:
        name, is_variable, _value = word.partition("=")
        if is_variable:
            assert f"$({name}" in (ROOT / "Makefile").read_text(), f"the Makefile knows no {name}="
        else:
            assert name in _TARGETS, f"the Makefile has no target {name!r}"


def _pip(words: list[str], _: Reader) -> None:
    """Check that the extras in an installation exist."""
    assert "install" in words
    for word in words:
        if found := re.match(r"(?:tokentape|\.)\[(.*)\]", word):
            assert set(found[1].split(",")) <= set(_PROJECT["optional-dependencies"]), word


def _python_file(words: list[str], _: Reader) -> None:
    """Check that a program of the tree, which has its own test, or a module exists."""
    path = next(word for word in words[1:] if not word.startswith("-"))
    module = path.replace(".", "/") if words[1] == "-m" else path
    assert path in ("venv", "pip") or (ROOT / module).exists() or (ROOT / f"{module}.py").exists(), (
        f"there is no {path}"
    )


def _has_argument(words: list[str], _: Reader) -> None:
    """Check a command that only sets the stage: `git clone`, `cd`, activating."""
    assert len(words) > 1


PROGRAMS: dict[str, Callable[[list[str], Reader], str | None]] = {
    "cd": _has_argument,
    "git": _has_argument,
    ".": _has_argument,
    "make": _make,
    "pip": _pip,
    "python": _python_file,
    "python3": _python_file,
    ".venv/bin/python": _python_file,
    "tokentape": _tokentape,
    ".venv/bin/tokentape": _tokentape,
}


def _yaml(text: str, reader: Reader) -> None:
    """Load our configuration; parse other YAML files, recognised by their first keys."""
    read = yaml.safe_load(text)
    if not {"apiVersion", "services", "scrape_configs", "groups"} & read.keys():
        (reader.folder / "page.yaml").write_text(text)
        load(reader.folder / "page.yaml")


def _http(text: str, _: Reader) -> None:
    """Check that the route of an HTTP request exists and accepts its body."""
    head, _, body = text.partition("\n\n")
    method, path, _version = head.splitlines()[0].split()
    route = next(route for route in ROUTES if route.method == method.lower() and _is_at(path.split("?")[0], route.path))
    model: type[BaseModel] | None = route.body
    assert (model is None) == (not body.strip())
    if model is not None:
        model.model_validate(orjson.loads(body))


def _is_at(path: str, route: str) -> bool:
    return re.fullmatch(re.sub(r"\\\{[^}]*\\\}", "[^/]+", re.escape(route)), path) is not None


def _json(text: str, _: Reader) -> None:
    orjson.loads(text)


def _toml(text: str, _: Reader) -> None:
    tomllib.loads(text)


def _output(_text: str, _reader: Reader) -> None:
    """Accept output."""


LANGUAGES: dict[str, Callable[[str, Reader], str | None]] = {
    "bash": _bash,
    "console": _console,
    "http": _http,
    "json": _json,
    "python": _python,
    "text": _output,
    "toml": _toml,
    "yaml": _yaml,
}
