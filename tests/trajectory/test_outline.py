"""The outline: the picture of a rollout's tree."""

from array import array

import orjson
import pytest
from forests import forests, make_choice, make_step
from hypothesis import given

from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.outline import outline
from proxy.trajectory.sequence import sequences
from proxy.trajectory.step import Span, Timing

FACTS = RolloutFacts("r1")


def test_nodes():
    """Each node tells its place, its ids' bounds, how it ended, and which branches hold and own it."""
    twin = {"extra": {"request_key": "same"}}
    steps = [
        make_step("a", [1], [10], **twin),
        make_step("b", [1], [20], **twin),
        make_step("c", [1, 20, 2], [30]),
        make_step("d", [1, 20, 3], [40, 41]),
        make_step("e", [5], [50], problems=("echo",), delivered=False),
        make_step("f", [6], status="error"),
    ]
    drawn = outline(steps, FACTS)
    told = ["step_id", "parent", "start", "end", "superseded", "branches", "owner", "exact", "delivered", "problems"]

    assert [
        ["a", None, 1, 2, True, [], None, True, True, []],
        ["b", None, 1, 2, False, [0, 1], 0, True, True, []],
        ["c", 1, 3, 4, False, [0], 0, True, True, []],
        ["d", 1, 3, 5, False, [1], 1, True, True, []],
        ["e", None, 1, 2, False, [], None, False, False, ["echo"]],
    ] == [[node[name] for name in told] for node in drawn["nodes"]]
    (unplaced,) = drawn["unplaced"]
    assert ("f", "error", "the engine returned an error") == tuple(
        unplaced[name] for name in ("step_id", "status", "why")
    )
    assert {"steps": 6, "nodes": 5, "roots": 3, "leaves": 4, "sequences": 2, "drift": 0, "unplaced": 1} == drawn[
        "counts"
    ]


def test_versions():
    """A node that two versions of the weights sampled is in its branch once."""
    both = make_choice(0, [10, 11], spans=(Span(0, 1, "7"), Span(1, 2, "8")))
    (node,) = outline([make_step("a", [1], both)], FACTS)["nodes"]

    assert ([0], 0) == (node["branches"], node["owner"])


def test_the_time_line():
    """Each node tells when its call was sent and had ended, in milliseconds, and how its reply begins."""
    timing = Timing(received=9.5, sent=10.0, first_byte=10.2, last_byte=11.5, stored=11.6)
    answer = {"choices": [{"index": 0, "message": {"content": "x" * 500}}]}
    early, silent = outline(
        [make_step("a", [1], [10, 11], timing=timing, response=answer), make_step("b", [2], [3], timing=Timing(9.5))],
        FACTS,
    )["nodes"]
    told = ("started_ms", "ended_ms", "sampled", "opening")

    assert (10_000, 11_500, 2, "x" * 80) == tuple(early[name] for name in told)
    assert (9_500, None, 1, None) == tuple(silent[name] for name in told)


@pytest.mark.parametrize("answer", [None, {}, {"choices": None}, {"choices": [None, {"index": 1}, {"message": []}]}])
def test_an_answer_of_any_shape_has_an_opening_or_none(answer):
    """Answers are other people's."""
    assert None is outline([make_step("a", [1], [2], response=answer)], FACTS)["nodes"][0]["opening"]


def test_the_histogram_of_logprobs():
    """By half a unit; what is lower than -10 together; what is no number not at all."""
    values = array("d", [0.0, 0.25, -0.49, -0.5, -9.99, -10.0, -1e9, float("nan"), float("-inf")])
    told = outline([make_step("a", [1], make_choice(0, list(range(9)), logprobs=values))], FACTS)["logprobs"]

    assert 0.5 == told["width"]
    assert [3, 1, *[0] * 17, 1, 2] == told["counts"]


@given(forests())
def test_owners(steps):
    """What a branch owns in the outline is what the export trains in it, and the outline is JSON."""
    drawn = outline(steps, FACTS)
    trained = {
        (span.step_id, span.choice): row.branch
        for row in sequences(steps, FACTS).rows
        for span in row.spans
        if span.owned
    }

    assert trained == {
        (node["step_id"], node["choice"]): node["owner"] for node in drawn["nodes"] if node["owner"] is not None
    }
    assert drawn == orjson.loads(orjson.dumps(drawn))
