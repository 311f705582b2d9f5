"""The cache of the newest values: one per rollout, bounded in bytes."""

from proxy.rollouts.newest import Newest


def test_the_values_that_were_kept_first_are_dropped_at_the_limit():
    """A value that exceeds the limit alone is dropped, too. A value that is replaced is not dropped, but its size is freed."""
    dropped = []
    newest = Newest(300, dropped.append)
    for key in ("a", "b", "c", "a", "d"):
        newest.put(key, key.upper(), 100)

    assert {"c": "C", "a": "A", "d": "D"} == newest
    assert ["B"] == dropped
    newest.put("e", "E", 301)
    assert {} == newest
    assert "<Newest 0 rollouts, 0 bytes>" == repr(newest)


def test_a_value_may_change_its_size():
    newest = Newest(300)
    newest.put("a", 1, 300)
    newest.put("a", 2, 100)
    newest.put("b", 3, 200)

    assert {"a": 2, "b": 3} == newest
