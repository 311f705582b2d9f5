"""The shapes of rollouts: for each, the tree, the sequences and the numbers; and the laws over forests of unique ids."""

import random
from collections import Counter
from dataclasses import asdict

import pytest
from forests import full_ids, unique_forests
from hypothesis import given
from shapes import SHAPES, Counted

from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.sequence import Options, select, sequences
from proxy.trajectory.tree import grow

FACTS = RolloutFacts("r1")
FLAGGED = Options(include="flagged")


def named(step_id: str, choice: int) -> str:
    return f"{step_id}.{choice}" if choice else step_id


def paths_of(tree) -> tuple[str, ...]:
    """The way from a root to each leaf."""
    return tuple(" ".join(named(*node.key) for node in tree.path(leaf)) for leaf in tree.leaves)


def rows_of(rows) -> tuple[str, ...]:
    """What each row is made of; in brackets what is context there."""
    return tuple(
        " ".join(
            named(span.step_id, span.choice) if span.owned else f"({named(span.step_id, span.choice)})"
            for span in row.spans
        )
        for row in rows
    )


def counted(tree, rows) -> Counted:
    return Counted(
        nodes=len(tree.nodes),
        roots=sum(node.parent is None for node in tree.nodes),
        leaves=len(tree.leaves),
        superseded=len(tree.superseded()),
        sequences=len(rows),
        trained=sum(sum(row.mask) for row in rows),
        total=sum(len(row.token_ids) for row in rows),
    )


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_shapes(shape):
    """Each shape has its tree, its sequences and its numbers."""
    tree, rows = grow(shape.steps), sequences(shape.steps, FACTS).rows

    assert shape.paths == paths_of(tree)
    assert shape.rows == rows_of(rows)
    assert asdict(shape.counted) == asdict(counted(tree, rows))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_arrival(shape):
    """In whatever order steps arrive, the tree and the sequences are the same."""
    for seed in range(5):
        steps = random.Random(seed).sample(shape.steps, len(shape.steps))

        assert shape.paths == paths_of(grow(steps))
        assert shape.rows == rows_of(sequences(steps, FACTS).rows)


@given(unique_forests())
def test_once_by_ids(steps):
    """Where no id was sampled twice, each id of an exported step has mask 1 once, in one row, unless it is superseded."""
    tree = grow(steps)
    replaced = {tree.nodes[place].key for place in tree.superseded()}
    for options in (Options(), FLAGGED):
        wanted = Counter(
            token
            for step, choice in select(steps, options)[0]
            if (step.step_id, choice.index) not in replaced
            for token in choice.ids
        )
        trained = Counter(
            token
            for row in sequences(steps, FACTS, options).rows
            for token, on in zip(row.token_ids, row.mask, strict=True)
            if on
        )

        assert wanted == trained
        assert set(trained.values()) <= {1}


@given(unique_forests())
def test_ids_by_ids(steps):
    """Every id of a row stands where its call had it: nothing of another branch, nothing added, nothing twice."""
    recorded = {(step.step_id, choice.index): full_ids(step, choice) for step in steps for choice in step.choices}
    for row in sequences(steps, FACTS, FLAGGED).rows:
        last = row.spans[-1]

        assert recorded[last.step_id, last.choice] == row.token_ids
        assert len(set(row.token_ids)) == len(row.token_ids)


@given(unique_forests())
def test_a_superseded_leaf_has_a_retry_that_was_taken(steps):
    """Nothing is left out for a retry's sake unless a call of the same body took its place, and never what went on."""
    tree = grow(steps)
    bodies = Counter(step.extra["request_key"] for step in steps)
    for place in tree.superseded():
        assert () == tree.children[place]
        assert bodies[tree.nodes[place].step.extra["request_key"]] > 1
