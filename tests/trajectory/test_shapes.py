"""Shapes of rollouts: tree, sequences and counts of each; and laws over forests of unique ids."""

from collections import Counter
from dataclasses import asdict

import pytest
from hypothesis import given
from tests.support.forests import full_ids, unique_forests
from tests.support.shapes import SHAPES, Counted

from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.sequence import Options, select, sequences
from proxy.trajectory.tree import grow

FACTS = RolloutFacts("r1")
FLAGGED = Options(include="flagged")


def named(step_id: str, choice: int) -> str:
    return f"{step_id}.{choice}" if choice else step_id


def paths_from(tree) -> tuple[str, ...]:
    """Return the path from the root to each leaf."""
    return tuple(" ".join(named(*node.key) for node in tree.path(leaf)) for leaf in tree.leaves)


def rows_from(rows) -> tuple[str, ...]:
    """Return the steps of each row, with context in parentheses."""
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
def test_each_shape_has_its_tree_sequences_and_counts(shape):
    tree, rows = grow(shape.steps), sequences(shape.steps, FACTS).rows

    assert shape.paths == paths_from(tree)
    assert shape.rows == rows_from(rows)
    assert asdict(shape.counted) == asdict(counted(tree, rows))


@given(unique_forests())
def test_each_unique_id_of_an_exported_step_is_trained_in_exactly_one_row(steps):
    """Superseded steps aside."""
    tree = grow(steps)
    replaced = {tree.nodes[index].key for index in tree.superseded()}
    for options in (Options(), FLAGGED):
        expected = Counter(
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

        assert trained == expected
        assert set(trained.values()) <= {1}


@given(unique_forests())
def test_a_row_has_exactly_the_ids_of_its_last_call(steps):
    """No id twice."""
    recorded = {(step.step_id, choice.index): full_ids(step, choice) for step in steps for choice in step.choices}
    for row in sequences(steps, FACTS, FLAGGED).rows:
        last = row.spans[-1]

        assert recorded[last.step_id, last.choice] == row.token_ids
        assert len(set(row.token_ids)) == len(row.token_ids)


@given(unique_forests())
def test_a_superseded_leaf_has_a_retry_with_the_same_request_and_no_children(steps):
    tree = grow(steps)
    bodies = Counter(step.extra["request_key"] for step in steps)
    for index in tree.superseded():
        assert tree.children[index] == ()
        assert bodies[tree.nodes[index].step.extra["request_key"]] > 1
