"""Reports what CONTRIBUTING's rules advise against: `python -m docs.style`, which `make lint` runs. It never fails.

It lists words to avoid in pages, messages, docstrings, comments and names of tests, files of more than 700 lines and functions
of more than 50.
"""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
PACKAGES: Final = ("proxy/", "storage/", "tokentape/", "docs/", "examples/", "benchmarks/")
MAX_FILE: Final = 700  # lines
MAX_FUNCTION: Final = 50

# CONTRIBUTING's section on style shows what not to write.
_SECTION = re.compile(r"^## Style$.*?(?=^## )", re.DOTALL | re.MULTILINE)
_QUOTED = re.compile(r"```.*?```|`[^`]*`|“[^”]*”|<!--.*?-->", re.DOTALL)
_LISTED = re.compile(r"^Words to avoid[^:]*: (.*?)\. ", re.DOTALL | re.MULTILINE)


def avoided_words(contributing: str) -> re.Pattern[str]:
    """Return a pattern of the words in CONTRIBUTING's list, where each is in backticks."""
    listed = _LISTED.search(contributing)
    words = re.findall(r"`([^`]+)`", listed[1] if listed else "")
    return re.compile(rf"(?<![\w-])(?:{'|'.join(words)})(?![\w:-])".replace(" ", r"\s+"), re.IGNORECASE)


def code_texts(source: str, *, with_messages: bool) -> Iterator[str]:
    """Yield comments, names of tests and docstrings; `with_messages` also strings with a space."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node.name.replace("_", " ")
        if with_messages:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                yield node.value
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def words_in(path: str, source: str, avoided: re.Pattern[str]) -> list[str]:
    """Return the avoided words outside quotations in a file, each with the text around it."""
    if not avoided.search(source.replace("_", " ")):
        return []
    is_page = path.endswith(".md")
    texts = [_SECTION.sub("", source)] if is_page else code_texts(source, with_messages=path.startswith(PACKAGES))
    return [
        " ".join(text[max(match.start() - 40, 0) : match.end() + 40].split())
        for text in (_QUOTED.sub("", text) for text in texts)
        for match in avoided.finditer(text)
    ]


def sizes_in(source: str) -> list[str]:
    """Return what is long in a file."""
    lines = source.count("\n")
    return [f"{lines} lines"] * (lines > MAX_FILE) + [
        f"{node.name}: {size} lines"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (size := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION
    ]


def main() -> None:
    """Print the findings, one per line."""
    avoided = avoided_words((ROOT / "CONTRIBUTING.md").read_text())
    words = ["git", "ls-files", "*.md", "*.py"]
    listed = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)  # noqa: S603
    for path in listed.stdout.splitlines():
        if path.startswith("tests/cassettes/") or not (ROOT / path).exists():
            continue
        source = (ROOT / path).read_text()
        for finding in [*words_in(path, source, avoided), *(sizes_in(source) if path.endswith(".py") else [])]:
            print(f"{path}: {finding}")


if __name__ == "__main__":
    main()
