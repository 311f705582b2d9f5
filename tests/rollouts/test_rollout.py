"""A rollout, written to and read from the store's fields."""

import pytest

from proxy.protocols.sampling import Sampling
from proxy.rollouts.rollout import CountedDrift, Limits, read_marks, read_rollout, write_fields
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
    assert ("failed", True, "g", 0.5, {"a": 1}) == (
        rollout.status, rollout.is_finished, rollout.group_id, rollout.reward, rollout.metadata
    )  # fmt: skip
    assert (Sampling(default={"n": 1}), ({"x": 1},), Limits(max_steps=3), 4) == (
        rollout.sampling, rollout.tools, rollout.limits, rollout.counts["steps"]
    )  # fmt: skip
    assert ("append", None) == (rollout.continuation, read_rollout(StoredEntity("r2", "b", 1, 2, {}, {})).continuation)
    assert ("open", False) == (read_rollout(StoredEntity("r2", "b", 1, 2, {}, {})).status, False)


def test_undelivered_marks_exclude_steps_delivered_later():
    marks = read_marks(
        {
            "undelivered:s1": b"1",
            "later:s3": b"x",
            "undelivered:s4": b"1",
            "delivered:s4": b"1",  # replayed later
        }
    )

    assert {"s1"} == marks.undelivered


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
