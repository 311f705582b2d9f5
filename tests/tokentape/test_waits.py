"""What waits of the clients log, and how they end."""

import math

import pytest

from tokentape.waits import Wait, what_batches_wait_for


def test_a_wait_of_infinite_wait_s_has_no_end(monkeypatch):
    now = iter([0.0, 1e12, 1e12])
    monkeypatch.setattr("tokentape.waits.monotonic", lambda: next(now))
    wait = Wait(math.inf)

    assert (math.inf, 0) == (wait.left_s, wait.until_log_s)


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "no group is open"), (1, "1 open: 'o0' with 1 of 2 rollouts finished"), (100, "100 or more open: 'o99'")],
)
def test_the_oldest_open_groups_are_named(count, words):
    """The newest are first in the list."""
    groups = [{"group_id": f"o{number}", "finished": 1, "members": 2} for number in range(count)]

    assert words in what_batches_wait_for({}, 1, {}, groups)


def test_a_wait_logs_again_after_its_interval_and_ends_with_what_it_waited_for(monkeypatch, caplog):
    now = [100.0]
    monkeypatch.setattr("tokentape.waits.monotonic", lambda: now[0])
    wait = Wait(90.0)
    seen = []
    for now[0] in (100.0, 130.0, 145.0, 200.0):
        seen.append((wait.seconds, wait.left_s, wait.until_log_s))
        if not wait.until_log_s:
            wait.log("a group")

    assert [(0, 90, 30), (30, 60, 0), (45, 45, 15), (100, 0, 0)] == seen
    assert [f"waiting for a group, for {seconds} s now" for seconds in (30, 100)] == caplog.messages
    assert "Waited 100 s for a group. Set wait_s" in str(wait.error("a group"))
