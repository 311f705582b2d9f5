"""The outline: the picture of a rollout's tree."""

import orjson
from forests import forests, make_choice, make_step
from hypothesis import given

from proxy.trajectory.outline import outline
from proxy.trajectory.rollout import RolloutFacts
from proxy.trajectory.sequence import sequences
from proxy.trajectory.step import Span

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
    assert [{"step_id": "f", "why": "the engine answered with an error"}] == drawn["unplaced"]
    assert {"steps": 6, "nodes": 5, "roots": 3, "leaves": 4, "sequences": 2, "drift": 0, "unplaced": 1} == drawn[
        "counts"
    ]


def test_versions():
    """A node that two versions of the weights sampled is in its branch once."""
    both = make_choice(0, [10, 11], spans=(Span(0, 1, "7"), Span(1, 2, "8")))
    (node,) = outline([make_step("a", [1], both)], FACTS)["nodes"]

    assert ([0], 0) == (node["branches"], node["owner"])


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
