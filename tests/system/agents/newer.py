"""Prints which of the pinned clients and agents have a newer version on PyPI or npm."""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from .clients import LOOPS, PAGE
from .environment import PACKAGES, PYTHONS

_NEWEST = re.compile(r"\((\S+)\)")  # "openai (3.54.0)"


def main() -> None:
    """Print a line for each package that has a newer version, or that cannot be looked up."""
    packages = sorted({(client.runs, client.package) for client in (*LOOPS, *PAGE) if client.runs != "bash"})
    with ThreadPoolExecutor(4) as pool:
        for (runs, package), newest in zip(packages, pool.map(newest_version, packages), strict=True):
            pinned = pinned_version(runs, package)
            if newest != pinned:
                sys.stdout.write(f"{package} {pinned} is tested; the newest version is {newest or 'unknown'}\n")


def pinned_version(runs: str, package: str) -> str:
    """Return the version that the tests install."""
    if runs in PACKAGES:
        return json.loads(PACKAGES[runs].read_bytes())["dependencies"][package]
    (version,) = re.findall(rf"^{re.escape(package)}==(\S+)$", PYTHONS[runs].read_text(), re.MULTILINE)
    return version


def newest_version(place: tuple[str, str]) -> str:
    """Return the newest version in the registry; empty if it cannot be looked up."""
    runs, package = place
    if runs in PACKAGES:
        return _printed(["npm", "view", package, "version"])
    found = _NEWEST.search(_printed([sys.executable, "-m", "pip", "index", "versions", package]))
    return found[1] if found else ""


def _printed(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


if __name__ == "__main__":
    main()
