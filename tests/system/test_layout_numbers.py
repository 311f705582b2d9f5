"""The measured layout of the sources, which CONTRIBUTING.md quotes."""

import re
import subprocess
import sys
from pathlib import Path

from docs import layout

ROOT = Path(__file__).parents[2]
MAXIMA = {
    "rooms": 18,
    "floors": 9,
    "arrows upwards": 0,
    "modules in import circles": 0,
    "entries at proxy's root": 16,
    "files entered by a streamed call": 50,
    "moves between files of a streamed call": 250,
}
ATTEMPTS = 3  # a read of the socket may return a part of the response, which adds moves


def numbers_in(text: str) -> dict[str, int]:
    return {name: int(number) for name, number in re.findall(r"^(\S.*?) +(\d+)$", text, re.MULTILINE)}


def measured() -> dict[str, int]:
    run = subprocess.run([sys.executable, "-m", "docs.layout"], cwd=ROOT, capture_output=True, text=True, check=True)
    return numbers_in(run.stdout)


def test_contributing_quotes_the_import_graph_as_it_is():
    quoted = numbers_in((ROOT / "CONTRIBUTING.md").read_text())

    assert layout.layout().items() <= quoted.items()


def test_the_layout_is_within_its_bounds():
    """A streamed chat call is traced from the socket to the stored step."""
    runs = (measured() for _ in range(ATTEMPTS))

    assert any(MAXIMA.keys() <= run.keys() and all(run[name] <= MAXIMA[name] for name in MAXIMA) for run in runs)
