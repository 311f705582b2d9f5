"""The threat model of docs/security.md: each line names tests, and each test exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "security.md").read_text()
TABLE = PAGE.partition("\n## Who can do what")[2].partition("\n## ")[0]
LINES = [line.split("|")[1:-1] for line in TABLE.splitlines() if line.startswith("| ")]
NAMED = re.compile(r"`(?:(tests/[\w/]+\.py)::)(test_\w+)`")


def test_every_line_of_the_threat_model_names_a_test():
    """A promise needs a test."""
    promises = [cells for cells in LINES if cells[0].strip() not in ("who", "---")]

    assert len(promises) > 25
    assert [cells for cells in promises if not NAMED.search(cells[-1])] == []


def test_every_test_that_the_threat_model_names_exists():
    """A renamed test is renamed on the page, too."""
    named = NAMED.findall(PAGE)

    assert [
        name
        for path, name in named
        if not (ROOT / path).exists()
        or not re.search(rf"^(?:async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE)
    ] == []
