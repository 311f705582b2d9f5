"""Windows of policy versions: the newest exist, and all workers end the same ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.telemetry.version_windows import KEPT, OLDER, UNKNOWN, VersionWindows, label_of, newest, window_of


class Series:
    """The series that windows begin and end."""

    def __init__(self):
        self.live = set()
        self.windows = VersionWindows(self._begin, self._end)

    def _begin(self, *series):
        assert series not in self.live
        self.live.add(series)

    def _end(self, *series):
        self.live.remove(series)


@pytest.mark.parametrize(
    ("version", "label"),
    [("0", "0-9"), ("129", "120-129"), ("130", "130-139"), (None, UNKNOWN), ("main", UNKNOWN), ("-3", UNKNOWN)],
)
def test_a_window_is_ten_versions(version, label):
    assert label == Series().windows.of("default", version)


def test_the_next_window_begins_before_its_first_reward():
    """Prometheus does not see the increase of a series that starts at 1."""
    series = Series()
    series.windows.of("default", "7")

    assert series.live == {("default", "0-9"), ("default", "10-19")}


def test_versions_older_than_all_windows_are_counted_together():
    """Their window has ended, and does not begin again at 0."""
    series = Series()
    series.windows.of("default", "0")
    for version in range(100, 200):
        series.windows.of("default", str(version))

    assert tuple(series.windows.of("default", version) for version in ("5", "120")) == (OLDER, "120-129")
    assert ("default", "0-9") not in series.live


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 400).map(str))))
def test_each_policy_has_at_most_ten_windows_and_the_returned_one_is_among_them(observed):
    """Each policy keeps its newest windows, independently of the other policies."""
    series = Series()
    for policy, version in observed:
        label = series.windows.of(policy, version)

        assert label == OLDER or (policy, label) in series.live
        assert series.windows.has(policy, label)
        assert all(len([name for name, _ in series.live if name == policy]) <= KEPT for policy in "ab")
    for policy in "ab":
        numbers = {int(version) // 10 for name, version in observed if name == policy}
        begun = {label_of(number) for window in numbers for number in (window, window + 1)}
        assert newest(begun) == {label for name, label in series.live if name == policy}


@given(st.lists(st.integers(0, 60)), st.lists(st.integers(0, 60)))
def test_a_window_that_one_worker_ended_is_not_among_the_newest_of_both(first, second):
    """Otherwise the sum over the workers would fall when only one of them ends it."""
    workers = [Series(), Series()]
    begun = []
    for worker, windows in zip(workers, (first, second), strict=True):
        for window in windows:
            worker.windows.of("default", str(window * 10))
        begun.append({label_of(number) for window in windows for number in (window, window + 1)})
    shown = newest({label for worker in workers for _, label in worker.live})

    for worker, all_begun in zip(workers, begun, strict=True):
        assert not shown & (all_begun - {label for _, label in worker.live})


def test_the_windows_of_an_earlier_run_end_when_a_lower_version_is_announced():
    """Also without a claim; a version that is not a number ends nothing."""
    series = Series()
    for announced, expected in (("main", 10), ("905", 10), ("3", 0)):
        for version in range(820, 920, 10):
            series.windows.of("default", str(version)) if announced == "main" else None
        series.windows.announced = lambda announced=announced: dict.fromkeys(("default", "other"), (0, announced))
        series.windows.settle()

        assert len(series.live) == expected
    assert series.windows.of("default", "3") == "0-9"


def test_the_windows_of_an_earlier_epoch_end_when_a_new_one_begins():
    """Also if its versions overlap with the earlier ones, and whether a claim or an announcement shows it first."""
    for shown_first in ("announcement", "claim"):
        series = Series()
        series.windows.announced = lambda: {"default": (1, "125")}
        series.windows.of("default", "125", 1)
        if shown_first == "announcement":
            series.windows.announced = lambda: {"default": (2, "121")}
            series.windows.settle()
            assert series.live == set()

        assert series.windows.of("default", "121", 2) == "120-129"
        assert series.windows.of("default", "125", 1) == OLDER
        assert series.live == {("default", "120-129"), ("default", "130-139")}


def test_windows_that_a_worker_takes_over_continue_in_their_epoch():
    series = Series()
    series.windows.adopt("default", "120-129")
    series.windows.announced = lambda: {"default": (3, "125")}
    series.windows.settle()

    assert series.live == {("default", "120-129")}


@given(st.integers(0, 10**16))
def test_a_label_names_its_window(window):
    assert window == window_of(label_of(window))
    assert (window_of(UNKNOWN), window_of(OLDER)) == (None, None)


def test_labels_that_are_no_windows_are_always_shown():
    labels = {UNKNOWN, OLDER, *(label_of(number) for number in range(20))}

    assert {UNKNOWN, OLDER, *(label_of(number) for number in range(10, 20))} == newest(labels)
