"""The Markdown pages of the repository: their blocks, links and anchors.

A comment above a block names the test that checks it (`<!-- checked by tests/… -->`); at the top of a page, `<!-- every
block is checked by tests/… -->` applies to all. `<!-- excerpt of proxy/… -->` marks an excerpt of a file.
"""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SINGLE = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\S*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE
)
_CHECKED = re.compile(r"<!-- checked by (\S+) -->\s*\Z")
_EXCERPT = re.compile(r"<!-- excerpt of (\S+) -->\s*\Z")
_ALL_CHECKED = re.compile(r"<!-- every block is checked by (\S+) -->")
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?[^)]*\)")
_CODE = re.compile(r"`[^`\n]*`")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: location, language, text, and the test that checks it or the file that it is from, if any."""

    page: str
    line: int
    language: str
    text: str
    checked_by: str | None = None
    excerpt_of: str | None = None

    @property
    def place(self) -> str:
        """Return page and line."""
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """Return every page except benchmark results."""
    return sorted([*(ROOT / name for name in SINGLE if (ROOT / name).exists()), *ROOT.glob("docs/**/*.md")])


def blocks_of(path: Path) -> Iterator[Block]:
    """Return the fenced blocks of a page, in order."""
    text = path.read_text()
    whole = _ALL_CHECKED.search(text)
    for found in _FENCE.finditer(text):
        own, excerpt = (marker.search(text, 0, found.start()) for marker in (_CHECKED, _EXCERPT))
        checked_by = own[1] if own else whole[1] if whole else None
        indent = len(found["indent"])
        inner = "".join(line[indent:] if line.strip() else "\n" for line in found["text"].splitlines(keepends=True))
        line = text.count("\n", 0, found.start()) + 1
        of = excerpt[1] if excerpt else None
        yield Block(str(path.relative_to(ROOT)), line, found["language"], inner, checked_by, of)


def links_of(path: Path) -> Iterator[str]:
    """Return the links of a page, without those in blocks and code."""
    for found in _LINK.finditer(_CODE.sub("``", _FENCE.sub("", path.read_text()))):
        yield found[1]


def anchors_of(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = _FENCE.sub("", path.read_text())
    return {anchor_of(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


def anchor_of(heading: str) -> str:
    """Return the anchor of one heading."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip()).lower()
    kept = (character for character in plain if character in " -_" or unicodedata.category(character)[0] in "LN")
    return "".join(kept).replace(" ", "-")
