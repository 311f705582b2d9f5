"""What a process remembers of rollouts: one object for each, in bounded memory."""

import pytest
from prometheus_client import CollectorRegistry

from proxy.rollouts.live import LiveRollouts
from proxy.rollouts.rollout import read_rollout
from proxy.telemetry.metrics import make_metrics
from storage.types import StoredEntity


@pytest.fixture
def metrics():
    return make_metrics(CollectorRegistry())


def rollout(name="r1", incarnation="b", **fields):
    return read_rollout(StoredEntity(name, incarnation, 1, 1, fields, {}))


def test_a_rollout_has_one_object_with_its_latest_state(metrics):
    """Another incarnation has an object of its own: nothing is known of it."""
    rollouts = LiveRollouts(2**20, metrics)
    first = rollouts.note(rollout())
    again = rollouts.note(rollout(status=b'"completed"'))
    other = rollouts.note(rollout(incarnation="c"))

    assert first is again
    assert "completed" == first.rollout.status
    assert other is not first
    assert (other, None) == (rollouts.get("r1"), rollouts.get("r2"))


def test_rollouts_that_were_not_used_for_the_longest_time_are_forgotten(metrics):
    """A call keeps what it uses, and changes nothing of what is remembered since."""
    rollouts = LiveRollouts(18_000, metrics)
    first, second = rollouts.note(rollout("r1")), rollouts.note(rollout("r2"))
    rollouts.get("r1")
    for number in range(3, 8):
        rollouts.note(rollout(f"r{number}"))
    second.calls = 1
    second.blocks.update(b"%016d" % number for number in range(1000))
    rollouts.keep(second)

    assert [True, False, True] == [rollouts.get(name) is not None for name in ("r1", "r2", "r7")]
    assert rollouts.get("r1") is first
    assert "<LiveRollouts 6, 0 busy, 18000 bytes>" == repr(rollouts)


def test_the_memory_of_a_rollout_that_grows_is_counted(metrics):
    """Its fields when it is read, all else when a call ends."""
    rollouts = LiveRollouts(50_000, metrics)
    live, other = rollouts.note(rollout("r1")), rollouts.note(rollout("r2", metadata=b'{"a": "%s"}' % (b"x" * 5000)))
    sizes = [live.size, other.size]
    live.blocks.update(b"%016d" % number for number in range(100))
    rollouts.keep(live)
    sizes.append(live.size)
    rollouts.note(rollout("r1", metadata=b'{"a": "%s"}' % (b"x" * 8000)))

    assert [True, True, True] == [low < size for low, size in zip((0, 20_000, sizes[0] + 5000), sizes, strict=True)]
    assert (None, live) == (rollouts.get("r2"), rollouts.get("r1"))


def test_without_memory_nothing_is_remembered(metrics):
    rollouts = LiveRollouts(0, metrics)

    assert "b" == rollouts.note(rollout()).rollout.incarnation
    assert "<LiveRollouts 0, 0 busy, 0 bytes>" == repr(rollouts)
