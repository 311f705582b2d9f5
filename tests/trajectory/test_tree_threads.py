"""Trees and sequences of threads: steps of different threads never join."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.forests import forests, make_step

from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.sequence import sequences
from proxy.trajectory.tree import grow

FACTS = RolloutFacts("r1")


@given(steps=forests(), data=st.data())
def test_the_rows_of_a_rollout_equal_the_rows_of_each_thread_alone(steps, data):
    """Each token is trained once, and the row names the thread."""
    threads = {step.step_id: data.draw(st.sampled_from(["main", "a"])) for step in steps}
    named = [replace(step, thread=threads[step.step_id]) for step in steps]
    alone = [sequences([step for step in named if step.thread == name], FACTS).rows for name in ("main", "a")]
    joined = sequences(named, FACTS).rows

    def contents(rows):
        return sorted((row.thread, row.token_ids, row.mask) for row in rows)

    assert contents([*alone[0], *alone[1]]) == contents(joined)
    assert {row.thread for row in joined} <= {"main", "a"}


@given(steps=forests())
def test_one_thread_changes_nothing(steps):
    named = grow([replace(step, thread="main") for step in steps])

    assert [node.parent for node in grow(steps).nodes] == [node.parent for node in named.nodes]
    assert grow(steps).superseded() == named.superseded()


@pytest.mark.parametrize("thread", [None, "main"])
def test_a_row_names_its_thread_if_it_is_known(thread):
    (row,) = sequences([replace(make_step("a", [1, 2], [3]), thread=thread)], FACTS).rows

    assert thread == row.as_row().get("thread")
