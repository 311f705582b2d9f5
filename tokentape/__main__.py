"""The `tokentape` command: checks that the server's packages are TokenTape's, then starts the server's command line.

`proxy` and `storage` are names that other distributions use too: `pip install proxy.py` overwrites `proxy/__init__.py` and
`proxy/__main__.py`, and `pip uninstall proxy.py` deletes both. Each of the two packages therefore contains the line MARK,
which is read before the package is imported. This is the only module of `tokentape` that imports the server, by name.
"""

import sys
from importlib import import_module
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Final

PACKAGES: Final = ("proxy", "storage")
MARK: Final = 'DISTRIBUTION = "tokentape"'
REINSTALL: Final = "`pip install --force-reinstall --no-deps .` in a clone of TokenTape"


def main() -> None:
    """Run the command line, or exit with a sentence if a package is not TokenTape's."""
    for package in PACKAGES:
        if problem := package_problem(package):
            sys.exit(f"tokentape: {problem}")
    import_module("proxy.cli.main").main()


def package_problem(package: str) -> str | None:
    """Return what is wrong with an installed package and how to fix it, or None if it is TokenTape's."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:  # None for a folder without __init__.py
        return f"Package {package!r} is incomplete: it has no __init__.py. Run {REINSTALL}."
    path = Path(spec.origin)
    if MARK in path.read_text(encoding="utf-8", errors="replace").splitlines():
        return None
    others = sorted(set(packages_distributions().get(package, ())) - {"tokentape"})
    if not others:
        return f"Package {package!r} at {path} is not TokenTape's: remove it from the import path, or run {REINSTALL}."
    fixes = [f"`pip uninstall {name}`" for name in others]
    if path.parent.parent == Path(__file__).parent.parent:  # it was installed over our files
        fixes.append(REINSTALL)
    return f"Package {package!r} at {path} belongs to another distribution ({', '.join(others)}): run {', then '.join(fixes)}."


if __name__ == "__main__":
    main()
