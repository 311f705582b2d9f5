"""Clocks that differ from ours."""

from proxy.cli.check.engines import check_clock, read_date


def test_a_clock_that_is_off_is_told_with_how_much():
    """Ahead and behind; what a round trip and a cut-off second make up is none."""
    assert [] == list(check_clock("x", 1000.0, 1003.0))
    (behind,) = check_clock("x", 1000.0, 1060.0)
    (ahead,) = check_clock("x", 1060.0, 1000.0)

    assert "60 s behind ours" in behind.seen
    assert "60 s ahead of ours" in ahead.seen
    assert "note" == ahead.grade


def test_a_date_that_cannot_be_read_is_none():
    """Headers are other people's."""
    assert 784111777.0 == read_date("Sun, 06 Nov 1994 08:49:37 GMT")
    assert None is read_date("yesterday")
    assert None is read_date(None)
