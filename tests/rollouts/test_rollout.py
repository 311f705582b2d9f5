"""A rollout, written to and read from the store's fields."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.protocols.sampling import Sampling
from proxy.rollouts.rollout import (
    CountedDrift,
    Limits,
    Rollout,
    deadlines_of,
    first_due_ms,
    is_past_deadline,
    read_marks,
    read_rollout,
    write_fields,
)
from storage.types import StoredEntity


def test_a_rollout_is_read_as_it_was_written():
    """Missing fields have their defaults."""
    fields = {
        "status": "failed",
        "group_id": "g",
        "reward": 0.5,
        "metadata": {"a": 1},
        "sampling": {"default": {"n": 1}},
        "tools": [{"x": 1}],
        "limits": {"max_steps": 3},
        "continuation": "append",
        "model": None,
    }
    written = write_fields(fields)
    rollout = read_rollout(StoredEntity("r1", "b", 1, 2, written | {"opened_with": b"not json"}, {"steps": 4}))

    assert "model" not in written
    assert (
        rollout.status, rollout.is_finished, rollout.group_id, rollout.reward, rollout.metadata
    ) == ("failed", True, "g", 0.5, {"a": 1})  # fmt: skip
    assert (Sampling(default={"n": 1}), ({"x": 1},), Limits(max_steps=3), 4) == (
        rollout.sampling, rollout.tools, rollout.limits, rollout.counts["steps"]
    )  # fmt: skip
    assert (rollout.continuation, read_rollout(StoredEntity("r2", "b", 1, 2, {}, {})).continuation) == ("append", None)
    assert (read_rollout(StoredEntity("r2", "b", 1, 2, {}, {})).status, False) == ("open", False)


def test_undelivered_marks_exclude_steps_delivered_later():
    marks = read_marks(
        {
            "undelivered:s1": b"1",
            "later:s3": b"x",
            "undelivered:s4": b"1",
            "delivered:s4": b"1",  # replayed later
        }
    )

    assert marks.undelivered == {"s1"}


def drifted(steps: int, **kinds: int) -> CountedDrift:
    return CountedDrift(kinds, steps)


def test_drift_is_known_if_it_covers_all_steps_and_has_no_unexplained_boundary():
    fields = {"drift": b'{"kinds": {"edited": 1}, "steps": 2}'}
    known = read_rollout(StoredEntity("r1", "b", 1, 2, fields, {"steps": 2}))
    with_a_later_step = read_rollout(StoredEntity("r1", "b", 1, 2, fields, {"steps": 3}))
    unexplained = {"drift": b'{"kinds": {"unexplained": 1}, "steps": 2}'}

    assert (drifted(2, edited=1), True, False) == (known.drift, known.is_drift_known, with_a_later_step.is_drift_known)
    assert not read_rollout(StoredEntity("r1", "b", 1, 2, unexplained, {"steps": 2})).is_drift_known
    assert not read_rollout(StoredEntity("r1", "b", 1, 2, {}, {})).is_drift_known
    assert read_rollout(StoredEntity("r1", "b", 1, 2, fields, {"steps": 1})).drift is None, (
        "the rollout expired and was restored"
    )


@pytest.mark.parametrize(
    ("found", "before", "more", "new"),
    [
        (drifted(2, edited=1), drifted(2, edited=1), False, {}),
        (drifted(3, edited=2), drifted(2, edited=1), True, {"edited": 1}),
        (drifted(2, other=1), drifted(2, unexplained=1), True, {"other": 1}),
        (drifted(2, unexplained=1), drifted(2, other=1), False, {}),
        (drifted(3, unexplained=1, other=1), drifted(2, other=1), True, {}),
        (drifted(1, unexplained=1, other=1), None, None, {"other": 1}),
    ],
)
def test_drift_totals_are_replaced_by_totals_of_more_steps_or_fewer_unexplained(found, before, more, new):
    """Each newly known kind is counted once."""
    if before is not None:
        assert more == found.knows_more_than(before)
    assert new == found.known_since(before)


def due_ms(*, touched_ms: int, began: bool = False, **terms) -> int | None:
    return Rollout("r1", "b", 0, touched_ms, began_ms=touched_ms if began else None, **terms).due_ms


@pytest.mark.parametrize(
    ("terms", "due"),
    [
        ({}, None), ({"deadline_s": 1.5}, 1500), ({"idle_s": 3}, 3200), ({"deadline_s": 3.5, "idle_s": 3}, 3200),
        ({"idle_s": 3, "start_s": 2}, 3200), ({"idle_s": 3, "start_s": 9}, 9000),
        ({"start_s": 2}, 2200),
        ({"idle_s": 3, "start_s": 9, "began": True}, 3200), ({"start_s": 2, "began": True}, None),
        ({"start_s": 9, "deadline_s": 5}, 5000),
        ({"start_s": 9, "touched_ms": 0}, 9000), ({"start_s": 9, "idle_s": 3, "touched_ms": 0}, 9000),
        ({"deadline_s": 0.0001}, 1), ({"idle_s": 0.0001}, 1200), ({"deadline_s": 1e306}, 2**52), ({"idle_s": 1.7e308}, 2**52),
    ],
)  # fmt: skip
def test_a_rollout_is_due_at_the_first_of_its_deadlines(terms, due):
    """Idle times shorter than a second count as one second; times beyond any clock are never.

    Before its first step, a rollout that was touched may have a call in flight: it is not due before it is idle.
    """
    assert due == due_ms(**{"touched_ms": 200, **terms})


@given(st.floats(min_value=0, exclude_min=True, allow_infinity=False), st.integers(0, 2**45), st.integers(0, 2**45))
def test_a_rollout_that_was_touched_later_is_not_due_earlier(idle_s, touched_ms, later_ms):
    first = due_ms(touched_ms=touched_ms, idle_s=idle_s)

    assert touched_ms < first <= due_ms(touched_ms=touched_ms + later_ms, idle_s=idle_s)
    assert first == first_due_ms({"idle_s": idle_s}, touched_ms)


@pytest.mark.parametrize(
    ("terms", "now_ms", "is_past"),
    [
        ({"deadline_s": 2}, 2999, False), ({"deadline_s": 2}, 3000, True), ({"idle_s": 1}, 10**9, False),
        ({"deadline_s": 2, "status": "completed"}, 3000, False), ({}, 10**9, False),
    ],
)  # fmt: skip
def test_an_open_rollout_is_past_its_deadline_at_that_age(terms, now_ms, is_past):
    """A call that arrives then is not admitted. Idleness ends with the call."""
    assert is_past == is_past_deadline(Rollout("r1", "b", 1000, 1000, **terms), now_ms)


@pytest.mark.parametrize(
    ("terms", "idle_s", "deadlines"),
    [
        ({}, None, {}), ({}, 9, {"idle_s": 9, "start_s": 4}), ({"idle_s": 2}, None, {"idle_s": 2, "start_s": 4}),
        ({"start_s": 1, "deadline_s": 3}, None, {"start_s": 1, "deadline_s": 3}),
        ({"start_s": 1, "idle_s": None, "model": "m"}, 9, {"start_s": 1, "idle_s": 9}),
    ],
)  # fmt: skip
def test_a_rollout_with_an_idle_limit_has_one_for_its_start(terms, idle_s, deadlines):
    assert deadlines == deadlines_of(terms, idle_s=idle_s, start_s=4)


@pytest.mark.parametrize(
    ("terms", "left"),
    [
        ({}, {}), ({"idle_s": 5, "start_s": 7}, {"idle_s": 5, "start_s": 7}),
        ({"deadline_s": 5, "idle_s": 3}, {"deadline_s": 3, "idle_s": 3}), ({"deadline_s": 2}, None), ({"deadline_s": 1}, None),
    ],
)  # fmt: skip
def test_a_replacement_has_what_is_left_of_the_deadline(terms, left):
    assert left == Rollout("r1", "b", 1000, 1000, **terms).deadlines_left(3000)
