"""Documents, messages, docstrings, comments and names of tests do not contain the words that CONTRIBUTING lists."""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs", "deploy/README.md", "examples")
PACKAGES = ("proxy", "storage", "tokentape", "docs", "examples", "benchmarks")

# Path -> the words that are allowed there, and why.
EXCEPTIONS: dict[str, tuple[set[str], str]] = {
    "proxy/simulator/script.py": ({"say"}, "a field of the script's YAML"),
}

# The tables of old names in CHANGELOG, and the style section of CONTRIBUTING, which shows what not to write.
_SECTION = re.compile(r"^### Renamed$.*?(?=^### |\Z)|^## Style$.*?(?=^## )", re.DOTALL | re.MULTILINE)
_QUOTED = re.compile(r"```.*?```|`[^`]*`|“[^”]*”|<!--.*?-->", re.DOTALL)
_LISTED = re.compile(r"^Words to avoid[^:]*: (.*?)\. ", re.DOTALL | re.MULTILINE)


def avoided_words() -> re.Pattern[str]:
    """Return a pattern of the words in CONTRIBUTING's list, where each is in backticks."""
    listed = _LISTED.search((ROOT / "CONTRIBUTING.md").read_text())
    assert listed is not None
    words = re.findall(r"`([^`]+)`", listed[1])
    return re.compile(rf"(?<![\w-])(?:{'|'.join(words)})(?![\w-])".replace(" ", r"\s+"), re.IGNORECASE)


AVOIDED = avoided_words()


def page_texts(text: str) -> Iterator[str]:
    """Yield the text of a page without quotations and code."""
    yield _QUOTED.sub("", _SECTION.sub("", text))


def code_texts(source: str, *, with_messages: bool) -> Iterator[str]:
    """Yield comments, names of tests and docstrings without quotations; `with_messages` also strings with a space."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield _QUOTED.sub("", token.string)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node.name.replace("_", " ")
        if with_messages:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                yield _QUOTED.sub("", node.value)
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield _QUOTED.sub("", ast.get_docstring(node) or "")


def avoided_in(path: str, text: str) -> list[str]:
    """Return the avoided words in a file, each with the text around it."""
    if not AVOIDED.search(text.replace("_", " ")):
        return []
    allowed, _ = EXCEPTIONS.get(path, (set(), ""))
    is_page = path.endswith(".md")
    texts = page_texts(text) if is_page else code_texts(text, with_messages=path.startswith(PACKAGES))
    return [
        " ".join(text[max(match.start() - 40, 0) : match.end() + 40].split())
        for text in texts
        for match in AVOIDED.finditer(text)
        if match[0].lower() not in allowed
    ]


def tracked(suffix: str, *paths: str) -> list[str]:
    """Return the tracked files below these paths."""
    listed = subprocess.run(["git", "ls-files", "--", *paths], cwd=ROOT, check=True, capture_output=True, text=True)
    return [path for path in listed.stdout.splitlines() if path.endswith(suffix) and (ROOT / path).exists()]


@pytest.mark.parametrize("paths", [PAGES, PACKAGES, ("tests",)], ids=["pages", "packages", "tests"])
def test_words_to_avoid_are_not_used(paths):
    files = tracked(".md" if paths is PAGES else ".py", *paths)

    assert len(files) > 20
    assert {} == {path: words for path in files if (words := avoided_in(path, (ROOT / path).read_text()))}


CODE = '''
def test_the_agent_is_told():
    """It spelt `told` in backticks."""
    answer = "told"
    assert answer == f"nobody knows {answer}"  # as it stands
'''


def test_avoided_words_are_found():
    prose = ["# as it stands", "test the agent is told", "It spelt in backticks."]

    assert prose == avoided_in("tests/test_a.py", CODE)
    assert {*prose, "nobody knows"} == {*avoided_in("proxy/a.py", CODE)}
    assert ["It is told as in ."] == avoided_in("a.md", "It is told as in “told” `told`.\n```\ntold\n```")


def test_exceptions_are_in_use():
    for path, (words, reason) in EXCEPTIONS.items():
        assert reason
        assert all(re.search(rf"\b{word}\b", (ROOT / path).read_text()) for word in words)
