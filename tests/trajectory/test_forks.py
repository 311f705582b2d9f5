"""Forks: why a step does not continue the newest one."""

from dataclasses import replace

import pytest
from forests import forests, make_step
from hypothesis import given
from hypothesis import strategies as st

from proxy.trajectory.forks import KINDS, Fork, find_forks
from proxy.trajectory.tree import grow

SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "17 times 23?"}
TOOL = {"role": "tool", "content": "391", "tool_call_id": "c1"}


def reply(text: str) -> dict:
    return {"role": "assistant", "content": text}


def called(step_id, prompt, sampled, messages, answer, **facts):
    response = {"choices": [{"index": 0, "message": {**reply(answer), "refusal": None}}]}
    return make_step(step_id, prompt, sampled, request={"messages": messages}, response=response, **facts)


FIRST = called("a", [1], [10], [SYSTEM, ASK], "391")
SECOND = called("b", [1, 10, 2], [20], [SYSTEM, ASK, reply("391"), {"role": "user", "content": "Sure?"}], "Yes.")


@pytest.mark.parametrize(
    ("step", "fork"),
    [
        (called("c", [1], [11], [SYSTEM, ASK], "400"), Fork("repeated", "a")),
        (
            called("c", [1, 10, 3], [30], [SYSTEM, ASK, reply("391"), {"role": "user", "content": "Why?"}], "So."),
            Fork("branch", "b", 3, "Sure?", "Why?"),
        ),
        (
            called("c", [5], [30], [SYSTEM, {"role": "user", "content": "Search."}], "Found."),
            Fork("conversation", "a"),
        ),
        (
            called("c", [6], [30], [SYSTEM, ASK, reply("390"), TOOL], "So."),
            Fork("edited", "b", 2, "391", "390"),
        ),
        (called("c", [7], [30], [SYSTEM, ASK, reply("391")], "So."), Fork("rewound", "b")),
        (called("c", [8], [30], [SYSTEM, ASK], "391", extra={"retry_of": "b"}), Fork("retry", "b")),
    ],
)
def test_a_fork_has_its_kind_and_the_texts_that_differ(step, fork):
    """Messages are compared as agents send them back: fields that engines add to a reply are no difference."""
    assert {step.step_id: fork} == {name: found for (name, _), found in find_forks(grow([FIRST, SECOND, step])).items()}


def test_drift_and_choices_are_named_first():
    """Drift has its own report of both texts; the choices of a call have the same prompt."""
    drifted = called("c", [9], [30], [SYSTEM, ASK, reply("391"), TOOL], "So.")
    two = make_step("d", [4], [1], [2])

    assert Fork("drift", "b") == find_forks(grow([FIRST, SECOND, drifted]), {"c"})["c", 0]
    assert Fork("choice", "d") == find_forks(grow([two]))["d", 1]


SHAPES = [None, 7, "text", [], {}, SYSTEM, ASK, TOOL, reply("391"), {"role": "user"}, {"role": [], "content": [{}, 3]}]


@given(forests(), st.lists(st.lists(st.sampled_from(SHAPES), max_size=4), max_size=10))
def test_every_fork_of_any_tree_has_a_kind(steps, bodies):
    """Also with requests of any shape: each node but the oldest child of its parent has one."""
    bodies += [[]] * len(steps)
    tree = grow([replace_request(step, body) for step, body in zip(steps, bodies, strict=False)])
    oldest = {min((node.key for node in tree.nodes if node.parent == each.parent), default=None) for each in tree.nodes}
    forks = find_forks(tree)

    assert {node.key for node in tree.nodes} - oldest == forks.keys()
    assert all(fork.kind in KINDS for fork in forks.values())


def replace_request(step, messages):
    return replace(step, request={"messages": messages})
