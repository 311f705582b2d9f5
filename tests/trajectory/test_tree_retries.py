"""Retries: which call was another's next attempt."""

import pytest
from forests import make_step
from shapes import LOST, TWIN

from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.sequence import sequences
from proxy.trajectory.tree import earlier_attempts, grow


def attempt(step_id, number, prompt=(1,), *, body="same", **facts):
    """A call that its client numbers."""
    return make_step(step_id, prompt, [ord(step_id)], extra={"request_key": body, "attempt": number}, **facts)


def superseded(*steps):
    tree = grow(steps)
    return {tree.nodes[place].step.step_id for place in tree.superseded()}


def test_no_retry_without_a_word():
    """Equal bodies alone pair nothing."""
    assert {} == earlier_attempts([make_step("a", [1], [10], **TWIN), make_step("b", [1], [20], **TWIN)])


def test_a_retry_that_knows_its_first():
    """What names the call before it is believed, whatever the bodies."""
    retry = make_step("b", [1], [20], extra={"request_key": "other", "retry_of": "a"})

    assert {"b": "a"} == earlier_attempts([retry, make_step("a", [1], [10])])


@pytest.mark.parametrize(
    ("steps", "pairs"),
    [
        ([attempt("a", 0), attempt("b", 1), attempt("c", 2)], {"b": "a", "c": "b"}),
        ([attempt("c", 0), attempt("b", 1), attempt("a", 2)], {"b": "c", "a": "b"}),
        ([attempt("a", 0), attempt("b", 0, delivered=False), attempt("c", 1)], {"c": "b"}),
        ([attempt("a", 0), attempt("b", 0), attempt("c", 1)], {}),  # nobody can say which was made again
        ([attempt("a", 0, body="another"), attempt("b", 1)], {}),
        ([attempt("a", 0), attempt("b", 2)], {}),
    ],
)
def test_numbered_attempts(steps, pairs):
    """Attempt N follows attempt N - 1 of the same body: what did not arrive, else the only one that did."""
    assert pairs == earlier_attempts(steps)


def test_a_retry_that_arrived_replaces_what_seemed_to_have_arrived():
    """The client says that it has not got the first, and it knows best; so for every attempt before."""
    steps = [attempt("a", 0), attempt("b", 1), attempt("c", 2)]

    assert {"a"} == superseded(*steps[:2])
    assert {"a", "b"} == superseded(*steps)
    assert [("a", "superseded by a retry")] == [
        (left.step_id, left.why) for left in sequences(steps[:2], RolloutFacts("r1")).skipped
    ]


def test_a_retry_that_did_not_arrive_replaces_nothing():
    """Neither broken off, nor undelivered, nor failed: the first attempt stays, and the retry makes way for it."""
    failed = make_step("b", [1], status="error", extra={"request_key": "same", "attempt": 1})

    assert {"b"} == superseded(attempt("a", 0), attempt("b", 1, delivered=False))
    assert {"b"} == superseded(attempt("a", 0), attempt("b", 1, status="partial"))
    assert set() == superseded(attempt("a", 0), failed)


def test_what_was_continued_is_not_replaced():
    """Ids prove that the agent has the first attempt after all; then it is the retry that was not taken."""
    first, retry = attempt("a", 0), attempt("b", 1)

    assert {"b"} == superseded(first, retry, make_step("c", [1, ord("a"), 2], [30]))


def test_a_retry_that_was_continued_was_taken():
    """Even if nobody saw that it was delivered."""
    first, retry = attempt("a", 0), attempt("b", 1, delivered=False)

    assert {"a"} == superseded(first, retry, make_step("c", [1, ord("b"), 2], [30]))


def test_attempts_after_a_failure():
    """A failed first attempt is followed like any other; of it nothing is there to be replaced."""
    failed = make_step("a", [1], status="error", extra={"request_key": "same"})

    assert {"b": "a"} == earlier_attempts([failed, attempt("b", 1)])
    assert set() == superseded(failed, attempt("b", 1))
    assert {"a"} == superseded(make_step("a", [1], [10], **LOST), attempt("b", 1))
