"""Retries: which call repeats which."""

import pytest
from tests.support.forests import make_step
from tests.support.shapes import LOST, TWIN

from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.sequence import sequences
from proxy.trajectory.tree import earlier_attempts, grow


def attempt(step_id, number, prompt=(1,), *, body="same", **facts):
    """Return a call with its client's retry count."""
    return make_step(step_id, prompt, [ord(step_id)], extra={"request_key": body, "attempt": number}, **facts)


def superseded(*steps):
    tree = grow(steps)
    return {tree.nodes[index].step.step_id for index in tree.superseded()}


def test_equal_bodies_alone_are_no_retry():
    assert earlier_attempts([make_step("a", [1], [10], **TWIN), make_step("b", [1], [20], **TWIN)]) == {}


def test_a_call_with_retry_of_is_the_retry_of_that_step():
    """Even if the bodies differ."""
    retry = make_step("b", [1], [20], extra={"request_key": "other", "retry_of": "a"})

    assert earlier_attempts([retry, make_step("a", [1], [10])]) == {"b": "a"}


@pytest.mark.parametrize(
    ("steps", "pairs"),
    [
        ([attempt("a", 0), attempt("b", 1), attempt("c", 2)], {"b": "a", "c": "b"}),
        ([attempt("c", 0), attempt("b", 1), attempt("a", 2)], {"b": "c", "a": "b"}),
        ([attempt("a", 0), attempt("b", 0, delivered=False), attempt("c", 1)], {"c": "b"}),
        ([attempt("a", 0), attempt("b", 0), attempt("c", 1)], {}),  # ambiguous
        ([attempt("a", 0, body="another"), attempt("b", 1)], {}),
        ([attempt("a", 0), attempt("b", 2)], {}),
    ],
)
def test_attempt_n_is_the_retry_of_attempt_n_minus_1_with_the_same_body(steps, pairs):
    """Of several, the undelivered one, or else the only one."""
    assert pairs == earlier_attempts(steps)


def test_a_delivered_retry_supersedes_all_earlier_attempts():
    """Even those recorded as delivered: the client retried because it did not receive them."""
    steps = [attempt("a", 0), attempt("b", 1), attempt("c", 2)]

    assert superseded(*steps[:2]) == {"a"}
    assert superseded(*steps) == {"a", "b"}
    assert [(left.step_id, left.why) for left in sequences(steps[:2], RolloutFacts("r1")).skipped] == [
        ("a", "superseded by a retry")
    ]


def test_a_partial_undelivered_or_failed_retry_supersedes_nothing():
    """The first attempt is kept and the retry is superseded."""
    failed = make_step("b", [1], status="error", extra={"request_key": "same", "attempt": 1})

    assert superseded(attempt("a", 0), attempt("b", 1, delivered=False)) == {"b"}
    assert superseded(attempt("a", 0), attempt("b", 1, status="partial")) == {"b"}
    assert superseded(attempt("a", 0), failed) == set()


def test_a_continued_attempt_is_not_superseded():
    """The agent has received it, and the retry is superseded."""
    first, retry = attempt("a", 0), attempt("b", 1)

    assert superseded(first, retry, make_step("c", [1, ord("a"), 2], [30])) == {"b"}


def test_a_continued_retry_supersedes_the_first_attempt():
    """Even if it is not recorded as delivered."""
    first, retry = attempt("a", 0), attempt("b", 1, delivered=False)

    assert superseded(first, retry, make_step("c", [1, ord("b"), 2], [30])) == {"a"}


def test_a_failed_first_attempt_has_a_retry_but_no_node_to_supersede():
    failed = make_step("a", [1], status="error", extra={"request_key": "same"})

    assert earlier_attempts([failed, attempt("b", 1)]) == {"b": "a"}
    assert superseded(failed, attempt("b", 1)) == set()
    assert superseded(make_step("a", [1], [10], **LOST), attempt("b", 1)) == {"a"}
