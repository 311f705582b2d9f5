"""The tree of a rollout of several policies is the union of the trees of their steps."""

from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.forests import forests, make_step, rollouts

from proxy.trajectory.blocks import BlockReader
from proxy.trajectory.codec import decode, encode
from proxy.trajectory.drift import find_boundaries
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.outline import outline
from proxy.trajectory.sequence import Options, sequences
from proxy.trajectory.tree import grow

POLICIES = ("default", "judge", "planner")
FACTS = RolloutFacts("r1", None, "open", None, {}, None, {})
TEXTS = ("ask", "more")


@st.composite
def conversations(draw):
    """Draw chat steps. Their messages continue earlier ones; their prompts continue the earlier ids or drift from them."""
    steps, known = [], [([], [])]
    for number in range(draw(st.integers(1, 8))):
        messages, ids = draw(st.sampled_from(known))
        cut = draw(st.sampled_from([0, 0, 0, 1]))
        prompt = [*ids[: len(ids) - cut], *draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))]
        asked = [*messages, {"role": "user", "content": draw(st.sampled_from(TEXTS))}]
        reply = {"role": "assistant", "content": draw(st.sampled_from(TEXTS))}
        sampled = draw(st.lists(st.integers(1, 2), min_size=1, max_size=2))
        response = {"choices": [{"index": 0, "message": reply}]}
        steps.append(make_step(f"{number:02}", prompt, sampled, request={"messages": asked}, response=response))
        known.append(([*asked, reply], [*prompt, *sampled]))
    return steps


@st.composite
def retried(draw):
    """Draw rollouts. Some calls are declared as retries of others."""
    steps = draw(st.one_of(rollouts(), conversations()))
    names = [step.step_id for step in steps]
    extras = st.sampled_from([{}, {}, {"attempt": 1}, {"attempt": 2}, *({"retry_of": name} for name in names)])
    return [
        replace(
            step, extra={**step.extra, **{key: value for key, value in draw(extras).items() if value != step.step_id}}
        )
        for step in steps
    ]


@st.composite
def of_policies(draw):
    """Draw rollouts with steps of one or several policies, or the same rollouts as they are read from the store."""
    steps = [replace(step, policy=draw(st.sampled_from(POLICIES))) for step in draw(retried())]
    return read_back(steps) if draw(st.booleans()) else steps


def read_back(steps):
    """Return the steps as read from the store."""
    records = [encode(step) for step in steps]
    reader = BlockReader({name: block for record in records for name, block in record.blocks.items()})
    return [decode(record.record, reader) for record in records]


def parts(steps):
    """Return the steps of each policy."""
    return [[step for step in steps if step.policy == policy] for policy in POLICIES]


def described(steps):
    """Return everything that the tree of these steps shows, by keys of nodes."""
    tree = grow(steps)
    key = [node.key for node in tree.nodes]
    return {
        "parents": {node.key: None if node.parent is None else key[node.parent] for node in tree.nodes},
        "leaves": {node.key for node in tree.leaves},
        "superseded": {key[position] for position in tree.superseded()},
        "same": {node.key: key[tree.same(node)] for node in tree.nodes},
        "beginnings": {node.key: [key[position] for position in tree.beginnings(node)] for node in tree.nodes},
        "unplaced": {step.step_id: why for step, why in tree.unplaced},
        "drift": {(found.step_id, found.earlier.key, found.window.key) for found in find_boundaries(tree)},
    }


def union(found):
    """Return the union of what the trees of several policies show."""
    return {
        name: set().union(*(part[name] for part in found))
        if isinstance(found[0][name], set)
        else {key: value for part in found for key, value in part[name].items()}
        for name in found[0]
    }


@given(of_policies())
def test_the_tree_is_the_union_of_the_trees_of_the_policies(steps):
    """Parents, leaves, retries, representatives of equal ids and drift, with equal and unequal prefixes."""
    assert union([described(part) for part in parts(steps)]) == described(steps)


def rows_of(steps, options):
    """Return the rows without their numbers, and the skipped steps, in any order."""
    found = sequences(steps, FACTS, options)
    rows = [{**row.as_row(), "branch": None} for row in found.rows]
    return sorted(rows, key=repr), sorted(found.skipped, key=repr)


@given(
    of_policies(),
    st.sampled_from(["all", "longest", "last"]),
    st.sampled_from(["exact", "flagged"]),
    st.sampled_from([None, 3]),
)
def test_the_rows_of_a_rollout_are_the_rows_of_its_policies(steps, branches, include, max_len):
    """Each policy's sampled tokens are trained as if its steps were exported alone."""
    options = Options(branches, include, max_len)
    alone = [rows_of(part, options) for part in parts(steps)]

    assert rows_of(steps, options) == tuple(sorted(chain(*lists), key=repr) for lists in zip(*alone, strict=True))


@given(of_policies())
def test_the_outline_shows_the_branches_of_each_policy(steps):
    """No branch contains steps of two policies."""
    policy = {step.step_id: step.policy for step in steps}
    branches = {}
    for node in outline(steps, FACTS)["nodes"]:
        for branch in node["branches"]:
            branches.setdefault(branch, set()).add(policy[node["step_id"]])

    assert all(len(policies) == 1 for policies in branches.values())


@given(forests(), st.sampled_from(POLICIES))
def test_the_name_of_an_only_policy_changes_nothing(steps, policy):
    assert described(steps) == described([replace(step, policy=policy) for step in steps])


@pytest.mark.parametrize("second", ["default", "judge"])
def test_a_path_of_two_policies_is_two_roots(second):
    """Although the prompt begins with the ids of the other policy's step."""
    first = make_step("a", [1] * 600, [2])
    steps = read_back([first, make_step("b", [*[1] * 600, 2, 3], [5], policy=second)])

    assert (None if second == "judge" else 0) == grow(steps).nodes[1].parent
