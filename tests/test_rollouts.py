"""A rollout as it lies in the store's fields."""

from proxy.rollouts import Limits, read_marks, read_rollout, write_fields
from proxy.wire.plan import Sampling
from storage.store import StoredRollout


def test_what_is_written_is_read_again():
    """Every field of a rollout, and the defaults where there is none."""
    fields = {
        "status": "failed",
        "group_id": "g",
        "reward": 0.5,
        "metadata": {"a": 1},
        "sampling": {"default": {"n": 1}},
        "tools": [{"x": 1}],
        "limits": {"max_steps": 3},
        "model": None,
    }
    written = write_fields(fields)
    rollout = read_rollout(StoredRollout("r1", "b", 1, 2, written | {"opened_with": b"not json"}, {"steps": 4}))

    assert "model" not in written
    assert ("failed", True, "g", 0.5, {"a": 1}) == (
        rollout.status, rollout.is_finished, rollout.group_id, rollout.reward, rollout.metadata
    )  # fmt: skip
    assert (Sampling(default={"n": 1}), ({"x": 1},), Limits(max_steps=3), 4) == (
        rollout.sampling, rollout.tools, rollout.limits, rollout.counts["steps"]
    )  # fmt: skip
    assert ("open", False) == (read_rollout(StoredRollout("r2", "b", 1, 2, {}, {})).status, False)


def test_marks_are_read_by_their_kind():
    """Undelivered steps, less those that were delivered later; and drift."""
    marks = read_marks(
        {
            "undelivered:s1": b"1",
            "drift": b'{"edited":1}',
            "later:s3": b"x",
            "undelivered:s4": b"1",
            "delivered:s4": b"1",  # later, when its client asked again
        }
    )

    assert ({"s1"}, {"edited": 1}) == (marks.undelivered, marks.drift)
