"""Sphinx' configuration of the documentation site: run `make docs`, then open build/docs/index.html.

The navigation is read from the lists of docs/index.md. The source directory is the whole repository, so that links have the
same targets on the site and on GitHub. The site loads no external resources.
"""

import re
from pathlib import Path

from sphinx.application import Sphinx

project = "TokenTape"
copyright = "the authors of TokenTape"  # noqa: A001 - Sphinx' name
html_show_sphinx = False
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/*.md", "docs/**/*.md", "examples/README.md"]
exclude_patterns = ["docs/landing/**"]
nitpicky = True
suppress_warnings = ["myst.header"]  # generated results of benchmarks begin at a lower heading level

myst_enable_extensions: list[str] = []  # pages use only what GitHub renders
myst_heading_anchors = 4

html_theme = "furo"
html_title = "TokenTape"
html_extra_path = ["landing"]  # index.html, which redirects to docs/index.html
html_copy_source = False
html_theme_options = {"sidebar_hide_name": False, "navigation_with_keys": True}

_SECTION = re.compile(r"^## (.+)\n((?:.*\n)*?)(?=^## |\Z)", re.MULTILINE)
_ENTRY = re.compile(r"^- \[([^\]]+)\]\(([^)#:]+)\.md\)", re.MULTILINE)


def tree(index: str) -> str:
    """Return the lists of the index as Sphinx' toctrees, one per section."""
    trees = []
    for heading, text in _SECTION.findall(index):
        entries = [f"{title} <{page}>" for title, page in _ENTRY.findall(text)]
        if entries:
            trees.append("\n".join(["```{toctree}", ":hidden:", f":caption: {heading}", "", *entries, "```"]))
    return "\n\n".join(trees)


def _with_tree(app: Sphinx, name: str, source: list[str]) -> None:
    if name == root_doc:
        source[0] += "\n" + tree(source[0]) + "\n"
    if name == "docs/decisions":
        names = sorted(path.stem for path in (Path(app.srcdir) / "docs" / "decisions").glob("*.md"))
        source[0] += "\n" + "\n".join(
            ["```{toctree}", ":hidden:", "", *(f"decisions/{decision}" for decision in names), "```"]
        )


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the extension; called by Sphinx."""
    app.connect("source-read", _with_tree)
    return {"parallel_read_safe": True}
