"""The pictures of docs/mismatch.md: one of each verdict that compares tokens."""

from pathlib import Path

from benchmarks.mismatch import CAUSES, PICTURES, draw

DOCS = Path(__file__).parent.parent.parent / "docs"


def test_each_verdict_is_drawn_for_its_section(tmp_path):
    """From a batch with that verdict alone; the files are small."""
    draw(tmp_path)
    drawn = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    page = (DOCS / "mismatch.md").read_text()

    assert {f"mismatch-{verdict}.svg" for verdict in PICTURES} == drawn.keys()
    assert drawn.keys() == {path.name for path in DOCS.glob("images/mismatch-*")}
    assert max(drawn.values()) < 60_000
    assert all(f"### {verdict}\n" in page and f"(images/mismatch-{verdict}.svg)" in page for verdict in PICTURES)
    assert all(CAUSES[cause][1] == {verdict} for verdict, (cause, _) in PICTURES.items())
