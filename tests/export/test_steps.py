"""The format `steps`: each choice of each step is a row."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from tests.support.forests import make_choice, make_step, rollouts

from proxy.export import FORMATS
from proxy.trajectory.arrays import pack_experts, pack_mask
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.sequence import Options
from proxy.trajectory.step import Span

FACTS = RolloutFacts("r1", "g1", reward=0.5, step_rewards={"b": 1.0}, metadata={"task": 7})


def rows(*steps, options=None):
    return FORMATS["steps"].rows(FACTS, steps, options or Options()).rows


def test_a_row_has_prompt_ids_sampled_ids_logprobs_and_origin():
    choice = make_choice(0, [1024, 2048], stop_reason=7)
    (row,) = rows(make_step("a", [1, 2], choice, index=3, policy_version="9"))

    assert row == {
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
    }


def test_a_step_reward_overrides_the_rollouts_reward():
    steps = make_step("a", [1], [10]), make_step("b", [1], [20])

    assert [row["reward"] for row in rows(*steps)] == [0.5, 1.0]


def test_a_choice_has_its_own_prompt_and_no_row_without_one():
    step = make_step("a", [1], [10], make_choice(1, [20], prompt=1), make_choice(2, [30], prompt=2))
    step = replace(step, prompts=(*step.prompts, step.choices[0].ids))

    assert [(row["prompt_ids"], row["ids"]) for row in rows(step)] == [([1], [10]), ([10], [20])]


def test_flagged_steps_are_rows_only_on_request_and_have_their_flags():
    step = make_step("a", [1], [10], problems=("echo",))

    assert (rows(step), [row["problems"] for row in rows(step, options=Options(include="flagged"))]) == ([], [["echo"]])


def test_routed_experts_sampling_mask_and_version_spans_are_exported():
    spans = (Span(0, 1, "8"), Span(1, 2, "9"))
    choice = replace(
        make_choice(0, [10, 20]),
        spans=spans,
        routed_experts=pack_experts("AQIDBA=="),
        sampling_mask=pack_mask([[10, 11], []]),
    )
    (plain,) = rows(make_step("a", [1], make_choice(0, [10, 20])))
    (row,) = rows(make_step("a", [1], choice))

    assert {key: value for key, value in row.items() if key not in plain} == {
        "spans": [{"start": 0, "end": 1, "policy_version": "8"}, {"start": 1, "end": 2, "policy_version": "9"}],
        "routed_experts": {"form": "int32", "given": "AQIDBA=="},
        "sampling_mask": [[10, 11], []],
    }


def test_the_epoch_is_exported_unless_it_is_the_first_one():
    first, second = (
        make_step("a", [1], replace(make_choice(0, [10]), spans=(Span(0, 1, "8", epoch),))) for epoch in (0, 2)
    )

    assert [rows(step)[0].get("policy_epoch") for step in (first, second)] == [None, 2]
    assert FORMATS["steps"].columns.keys() >= rows(second)[0].keys()


@given(rollouts(), st.randoms())
def test_each_trainable_choice_is_one_row_in_order_of_age(steps, random):
    """In any order of steps."""
    names = sorted(
        (step.step_id, choice.index) for step in steps if step.trainable for choice in step.choices if choice.ids
    )

    assert names == [(row["step_id"], row["choice"]) for row in rows(*random.sample(steps, len(steps)))]
    assert rows(*steps) == rows(*steps[::-1])
