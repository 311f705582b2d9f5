"""Generates the blocking client from the asyncio client by replacing words, as httpcore generates its `_sync`.

Statements whose first line ends in `# async only` are omitted.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent.parent / "tokentape"
SOURCES: Final = {
    FOLDER / "sync_client.py": FOLDER / "async_client.py",
    FOLDER / "sync_batches.py": FOLDER / "batches.py",
    FOLDER / "sync_events.py": FOLDER / "events.py",
}
HEADER: Final = "# Generated from tokentape/{source} by `python -m docs.generate`; edit {source} instead.\n"
WORDS: Final = (
    (r"\bAsyncGenerator\[([\w |]+), None\]", r"Generator[\1, None, None]"),
    (r"\btokentape\.(batches|events)\b", r"tokentape.sync_\1"),
    (r"\basync (def|for|with)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\bAsync(Client|Generator|Heartbeat|Iterator)\b", r"\1"),
    (r"\bfrom asyncio import sleep\b", "from time import sleep"),
    (r"\b__a(enter|exit)__\b", r"__\1__"),
    (r"\ba(close|closing|read|iter_bytes|finished)\b", r"\1"),
)


def sync_module(target: Path) -> str:
    """Return the source of a module of the blocking client."""
    source = SOURCES[target]
    text = without_async_only(source.read_text())
    for pattern, replacement in WORDS:
        text = re.sub(pattern, replacement, text)
    text = HEADER.format(source=source.name) + text
    without_unused_imports = _ruff("check", "--quiet", "--fix-only", "--select", "F401,I", target=target, text=text)
    return _ruff("format", "--quiet", target=target, text=without_unused_imports)


def without_async_only(source: str) -> str:
    """Return the source without the statements that are marked as `# async only`, and the blank lines after them."""
    lines: list[str | None] = list(source.splitlines(keepends=True))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt) and (lines[node.lineno - 1] or "").rstrip().endswith("# async only"):
            assert node.end_lineno is not None
            end = node.end_lineno
            while end < len(lines) and not (lines[end] or "").strip():
                end += 1
            lines[node.lineno - 1 : end] = [None] * (end - node.lineno + 1)
    return "".join(line for line in lines if line is not None)


def _ruff(command: str, *options: str, target: Path, text: str) -> str:
    """Return the output of ruff for a text, with the settings of this repository."""
    arguments = [sys.executable, "-m", "ruff", command, *options, "--stdin-filename", str(target), "-"]
    folder = FOLDER.parent
    done = subprocess.run(arguments, input=text, capture_output=True, text=True, check=True, cwd=folder)  # noqa: S603
    return done.stdout
