"""Fixtures of the deploy tests: the files of deploy/, and the checkers."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from .environment import checkers

DEPLOY = Path(__file__).parents[3] / "deploy"
VARIABLE = re.compile(r"\$\$|\$\{(\w+)(?:(:-|:\?)([^}]*))?\}")


@pytest.fixture(scope="session")
def checker():
    """Run a program of the checkers' environment, or Python code in it; return the exit code and the output."""
    folder = checkers()

    def run(name: str, *words: str, stdin: str = "") -> tuple[int, str]:
        command = [str(folder / name)] if name == "hadolint" else [str(folder / "python"), "-c", name]
        done = subprocess.run([*command, *words], input=stdin, capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.fixture(scope="session")
def variables():
    """The variables of .env: env.example, with keys where it has none."""
    lines = [line.partition("=") for line in (DEPLOY / "env.example").read_text().splitlines() if line[:1].isalpha()]
    return {name: value or f"a-{name.lower()}" for name, _, value in lines}


@pytest.fixture(scope="session")
def compose_text(variables):
    """compose.yaml with its variables substituted, as by `docker compose config`."""

    def substitute(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        name, way, otherwise = found.groups()
        assert name in variables or way == ":-", f"{name} has no default and is not in env.example"
        return variables.get(name) or otherwise

    return VARIABLE.sub(substitute, (DEPLOY / "compose.yaml").read_text())


@pytest.fixture(scope="session")
def services(compose_text):
    """The services of compose.yaml, by name."""
    return yaml.safe_load(compose_text)["services"]
