"""Prints the test files of what changed since this branch left main, for `make check`: `python -m tests.changed [BASE]`."""

import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
ALWAYS = {"tests/test_layout.py", "tests/test_names.py"}
PAGES = {"tests/test_docs.py", "tests/test_pages.py"}


def found_for(path: str, tests: Mapping[str, str]) -> set[str]:
    """Return the tests of a changed file. `tests`: the text of each test file by its path.

    The tests of a source file are its mirrors (test_x.py, test_x_more.py of proxy/…/x.py). Without one, and for code that
    tests share, they are the tests that import it. The tests of a conftest.py are in its folder.
    """
    folder, _, name = path.rpartition("/")
    if path in tests:
        return {path}
    if path.endswith(".md") or folder.startswith("docs"):
        return PAGES
    if name == "conftest.py":
        return {test for test in tests if test.startswith(f"{folder}/")}
    if not name.endswith(".py"):
        return set()
    stem = name.removesuffix(".py").strip("_")
    inner = folder.removeprefix("proxy/") if folder.startswith("proxy") else folder
    mirror = f"tests/{inner}/test_{stem}"
    mirrors = {test for test in tests if test.startswith((f"{mirror}.", f"{mirror}_"))}
    module = path.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".")
    parent, _, last = module.rpartition(".")
    imports = (f"from {module} import ", f"import {module}\n", f"from {parent} import {last}\n")
    return mirrors or {test for test, text in tests.items() if any(line in text for line in imports)}


def changed_files(base: str) -> Iterable[str]:
    """Return the files that differ from the commit at which this branch left `base`, new ones included."""

    def lines_of(*words: str) -> list[str]:
        return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()

    (commit,) = lines_of("merge-base", base, "HEAD")
    return {*lines_of("diff", "--name-only", commit), *lines_of("ls-files", "--others", "--exclude-standard")}


def main(base: str = "main") -> None:
    """Print the paths."""
    paths = (path for path in ROOT.glob("tests/**/test_*.py") if not path.is_relative_to(ROOT / "tests" / "system"))
    tests = {str(path.relative_to(ROOT)): path.read_text() for path in paths}
    found = ALWAYS.union(*(found_for(path, tests) for path in changed_files(base)))
    sys.stdout.writelines(f"{path}\n" for path in sorted(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
