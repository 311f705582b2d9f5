"""Build hook of the wheel: `proxy` and `storage` are installed as `tokentape._server.proxy` and `tokentape._server.storage`.

Both are common names: at the top level, a user's own `proxy.py` or `storage/` would hide them, or they would hide it. The hook
changes import statements only, and refuses names of modules that it would miss.
"""

import ast
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGES: Final = ("proxy", "storage")
TARGET: Final = "tokentape._server"
_NAMED_IN_TEXT: Final = re.compile(r"\b(?:from|import)\s+(?:proxy|storage)\b|^(?:proxy|storage)(?:\.\w+)+$")


class ServerBelowTokentape(BuildHookInterface):
    """Adds the packages to a wheel. An editable installation imports them from the clone."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the packages with their imports changed, and include them."""
        self._written = tempfile.TemporaryDirectory(prefix="tokentape-wheel-")  # removed at the exit if the build fails
        if version == "editable":
            return
        folder = Path(self._written.name)
        (folder / "__init__.py").write_text(
            f'"""The server. Its sources import these packages without `{TARGET}`."""\n'
        )
        for package in PACKAGES:
            target = folder / package
            shutil.copytree(Path(self.root) / package, target, ignore=shutil.ignore_patterns("__pycache__"))
            for path in target.rglob("*.py"):
                path.write_text(moved(path.read_text(encoding="utf-8"), str(path)), encoding="utf-8")
        build_data["force_include"][str(folder)] = TARGET.replace(".", "/")

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was written."""
        self._written.cleanup()


def moved(source: str, path: str) -> str:
    """Return the source of a module with absolute imports of PACKAGES below TARGET.

    Raises ValueError for `import proxy.a`, which binds the name `proxy`, and for a string that names a module.
    """
    lines = source.encode().splitlines(keepends=True)
    tree = ast.parse(source)
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(_is_own(alias.name) for alias in node.names):
            raise ValueError(f"{path}:{node.lineno}: write `from … import …`, which the wheel can change")
        if isinstance(node, ast.ImportFrom) and node.level == 0 and _is_own(node.module):
            line, start = lines[node.lineno - 1], node.col_offset
            lines[node.lineno - 1] = line[:start] + line[start:].replace(b"from ", f"from {TARGET}.".encode(), 1)
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings
        if is_text and (found := _NAMED_IN_TEXT.search(node.value)):
            raise ValueError(f"{path}:{node.lineno}: {found[0]!r} is another name in the wheel: use __package__")
    return b"".join(lines).decode()


def _is_own(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in PACKAGES
