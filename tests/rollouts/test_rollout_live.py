"""What a process remembers of rollouts: one object for each, in bounded memory."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from tests.support.forests import make_step

from proxy.rollouts.rollout import LiveRollouts, read_rollout
from proxy.telemetry.metrics import make_metrics
from storage.types import StoredEntity

REPLY = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "b"}}]}


@pytest.fixture
def metrics():
    return make_metrics(CollectorRegistry())


def rollout(name="r1", incarnation="b", **fields):
    return StoredEntity(name, incarnation, 1, 1, fields, {})


def test_a_rollout_has_one_object_with_its_latest_state(metrics):
    """Another incarnation has an object of its own: nothing is known of it."""
    rollouts = LiveRollouts(2**20, metrics)
    first = rollouts.note(rollout())
    again = rollouts.note(rollout(status=b'"completed"'))
    other = rollouts.note(rollout(incarnation="c"))

    assert first is again
    assert first.rollout.status == "completed"
    assert other is not first
    assert (rollouts.get("r1"), rollouts.get("r2")) == (other, None)


FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "status": st.sampled_from([b'"open"', b'"completed"']),
        "reward": st.sampled_from([b"1.5", b"0"]),
        "metadata": st.just(b'{"a": [1]}'),
        "limits": st.just(b'{"max_steps": 3}'),
        "drift": st.just(b'{"kinds": {"unexplained": 1}, "steps": 2}'),
    },
)
READS = st.tuples(
    FIELDS, st.integers(1, 2), st.dictionaries(st.just("steps"), st.integers(1, 4)), st.sampled_from([None, True])
)


@given(st.lists(READS, min_size=2, max_size=5))
@example([({"drift": b'{"kinds": {}, "steps": 2}'}, 1, {"steps": steps}, None) for steps in (3, 1, 3)])
def test_a_known_rollout_is_read_as_an_unknown_one(reads):
    """Also if all of its fields are equal to those before, and the others are not."""
    rollouts = LiveRollouts(2**20, make_metrics(CollectorRegistry()))
    for number, (fields, created_ms, counts, has_reservation) in enumerate(reads):
        stored = StoredEntity("r1", "b", created_ms, number, fields, counts, has_reservation=has_reservation)

        assert read_rollout(stored) == rollouts.note(stored).rollout


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

    assert [rollouts.get(name) is not None for name in ("r1", "r2", "r7")] == [True, False, True]
    assert rollouts.get("r1") is first
    assert repr(rollouts) == "<LiveRollouts 6, 0 busy, 18000 bytes>"


def test_the_memory_of_a_rollout_that_grows_is_counted(metrics):
    """Its fields when it is read, all else when a call ends."""
    rollouts = LiveRollouts(50_000, metrics)
    live, other = rollouts.note(rollout("r1")), rollouts.note(rollout("r2", metadata=b'{"a": "%s"}' % (b"x" * 5000)))
    sizes = [live.size, other.size]
    live.blocks.update(b"%016d" % number for number in range(100))
    rollouts.keep(live)
    sizes.append(live.size)
    rollouts.note(rollout("r1", metadata=b'{"a": "%s"}' % (b"x" * 8000)))

    assert [low < size for low, size in zip((0, 20_000, sizes[0] + 5000), sizes, strict=True)] == [True, True, True]
    assert (rollouts.get("r2"), rollouts.get("r1")) == (None, live)


def test_without_memory_nothing_is_remembered(metrics):
    rollouts = LiveRollouts(0, metrics)

    assert rollouts.note(rollout()).rollout.incarnation == "b"
    assert repr(rollouts) == "<LiveRollouts 0, 0 busy, 0 bytes>"


def test_the_endings_of_steps_count_as_memory(metrics):
    """So does all that a process keeps for a rollout: a process that records for days has the limit's memory."""
    rollouts = LiveRollouts(2**20, metrics)
    live = rollouts.note(rollout())
    before = live.size
    live.endings.add(make_step("a", [1], [2], request={"messages": [{"role": "user", "content": "a"}]}, response=REPLY))
    rollouts.keep(live)

    assert before + live.endings.size == live.size > before
