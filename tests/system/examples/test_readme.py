"""examples/README.md, and the rules for examples."""

import ast
import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
README = (EXAMPLES / "README.md").read_text()
PROGRAMS = sorted(EXAMPLES.glob("*.py"))
COMMANDS = re.findall(r"^(?:\S*python) examples/(\w+\.py)(.*)$", README, re.MULTILINE)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_each_program_is_short_and_uses_only_the_client(program):
    """At most 150 lines, a `main`, and a docstring; of this project it imports the client and nothing else."""
    tree = ast.parse(program.read_text())
    imported = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }

    assert len(program.read_text().splitlines()) <= 150
    assert "main" in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert "Shows " in (ast.get_docstring(tree) or "")
    assert [name for name in imported if name.partition(".")[0] in ("proxy", "storage")] == []


def test_the_table_has_every_program_and_its_commands_use_existing_options():
    """A command that a reader copies runs: its file exists and accepts each option."""
    assert {path.name for path in PROGRAMS} == set(re.findall(r"^\| \[(\w+\.py)\]", README, re.MULTILINE))
    assert len(COMMANDS) >= 6
    for name, arguments in COMMANDS:
        text = (EXAMPLES / name).read_text()
        assert [option for option in re.findall(r"--\w+", arguments) if f'"{option}"' not in text] == [], name
