"""What calls show about an endpoint: for their rollouts at once, for all rollouts after several, and for a time only."""

import pytest

from proxy.upstream.witnesses import ENOUGH, FORGET_S, MISSES, PAUSE_S, Finding, Misses, Recent


@pytest.fixture
def now():
    return [1000.0]


@pytest.fixture
def finding(now):
    return Finding(lambda: now[0])


def test_one_rollout_decides_for_itself_only(finding):
    """However many of its calls show it."""
    for _ in range(100):
        assert not finding.show("a", "returned_ids")

    assert ("returned_ids", None) == (finding.for_rollout("a"), finding.for_rollout("b"))


def test_several_rollouts_decide_for_all(finding):
    """With the newest reason; the last of them is reported."""
    assert [False, False, True, False] == [finding.show(name, f"reason of {name}") for name in "abcd"]

    assert ("reason of a", "reason of d") == (finding.for_rollout("a"), finding.for_rollout("z"))


def test_a_call_that_shows_the_opposite_keeps_the_others_from_deciding(finding, now):
    """For as long as findings last; the rollouts that showed it keep their own."""
    finding.oppose()
    for name in "abcde":
        finding.show(name, "x")
    assert ("x", None) == (finding.for_rollout("a"), finding.for_rollout("z"))

    now[0] += FORGET_S
    for name in "abc":
        finding.show(name, "x")
    assert "x" == finding.for_rollout("z")


def test_everything_is_forgotten_with_time(finding, now):
    for name in "abc":
        finding.show(name, "x")
        now[0] += FORGET_S / ENOUGH
    assert (None, None) == (finding.for_rollout("a"), finding.for_rollout("z"))
    assert "x" == finding.for_rollout("c")
    assert "<Finding of 2 rollouts>" == repr(finding)


def test_forget_forgets_at_once(finding):
    for name in "abc":
        finding.show(name, "x")
    finding.forget()

    assert (None, None) == (finding.for_rollout("a"), finding.for_rollout("z"))


def test_the_number_of_values_is_limited():
    """The oldest ones are forgotten."""
    values = Recent(10, lambda: 0.0)
    for key in range(1000):
        values.put(key, key)

    assert (10, None, 990, 999) == (len(values), values.get(989), values.get(990), values.last())


def test_an_endpoint_that_misses_several_in_a_row_is_paused(now):
    """For a time; the first miss after it begins the next pause, and an answer ends the row."""
    misses = Misses(lambda: now[0])
    assert [False] * (MISSES - 1) + [True, False] == [misses.add() for _ in range(MISSES + 1)]
    assert misses.is_paused

    now[0] += PAUSE_S
    assert not misses.is_paused
    assert misses.add()

    misses.forget()
    assert (False, False, False) == (misses.is_paused, misses.add(), misses.is_paused)
    assert "<Misses: 1 in a row>" == repr(misses)
