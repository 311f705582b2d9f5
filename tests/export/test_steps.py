"""The format `steps`: each choice of each step as a row of its own."""

from dataclasses import replace

from forests import make_choice, make_step, rollouts
from hypothesis import given
from hypothesis import strategies as st

from proxy.export import FORMATS
from proxy.trajectory.arrays import pack_experts, pack_mask
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.sequence import Options
from proxy.trajectory.step import Span

FACTS = RolloutFacts("r1", "g1", reward=0.5, step_rewards={"b": 1.0}, metadata={"task": 7})


def rows(*steps, options=None):
    return FORMATS["steps"].rows(FACTS, steps, options or Options()).rows


def test_row():
    """A row has the prompt ids, the sampled ids and their logprobs as recorded, and says where they are from."""
    choice = make_choice(0, [1024, 2048], stop_reason=7)
    (row,) = rows(make_step("a", [1, 2], choice, index=3, policy_version="9"))

    assert {
        "rollout_id": "r1",
        "group_id": "g1",
        "step_id": "a",
        "index": 3,
        "choice": 0,
        "model": "policy",
        "prompt_ids": [1, 2],
        "ids": [1024, 2048],
        "logprobs": [-1.0, -2.0],
        "status": "complete",
        "delivered": True,
        "late": False,
        "finish_reason": "stop",
        "stop_reason": 7,
        "policy_version": "9",
        "temperature": 1.0,
        "constrained": None,
        "reward": 0.5,
        "metadata": {"task": 7},
    } == row


def test_reward():
    """A step that was given a reward of its own has that one, the others the rollout's."""
    steps = make_step("a", [1], [10]), make_step("b", [1], [20])

    assert [0.5, 1.0] == [row["reward"] for row in rows(*steps)]


def test_prompts():
    """A choice comes with its own prompt; one whose prompt is not known has no row."""
    step = make_step("a", [1], [10], make_choice(1, [20], prompt=1), make_choice(2, [30], prompt=2))
    step = replace(step, prompts=(*step.prompts, step.choices[0].ids))

    assert [([1], [10]), ([10], [20])] == [(row["prompt_ids"], row["ids"]) for row in rows(step)]


def test_flagged():
    """Flagged steps are rows only when asked for, and then say what is wrong with them."""
    step = make_step("a", [1], [10], problems=("echo",))

    assert ([], [["echo"]]) == (rows(step), [row["problems"] for row in rows(step, options=Options(include="flagged"))])


def test_what_few_rows_have():
    """Experts as the engine spelt them, its mask, and spans if there are several versions of the weights."""
    spans = (Span(0, 1, "8"), Span(1, 2, "9"))
    choice = replace(
        make_choice(0, [10, 20]),
        spans=spans,
        routed_experts=pack_experts("AQIDBA=="),
        sampling_mask=pack_mask([[10, 11], []]),
    )
    (plain,) = rows(make_step("a", [1], make_choice(0, [10, 20])))
    (row,) = rows(make_step("a", [1], choice))

    assert {
        "spans": [{"start": 0, "end": 1, "policy_version": "8"}, {"start": 1, "end": 2, "policy_version": "9"}],
        "routed_experts": {"form": "int32", "given": "AQIDBA=="},
        "sampling_mask": [[10, 11], []],
    } == {key: value for key, value in row.items() if key not in plain}


@given(rollouts(), st.randoms())
def test_once_each(steps, random):
    """Each choice that may be trained is one row, the oldest first, in whatever order the steps are given."""
    names = sorted(
        (step.step_id, choice.index) for step in steps if step.trainable for choice in step.choices if choice.ids
    )

    assert names == [(row["step_id"], row["choice"]) for row in rows(*random.sample(steps, len(steps)))]
    assert rows(*steps) == rows(*steps[::-1])
