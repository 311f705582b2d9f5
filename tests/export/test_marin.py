"""The format `marin`: one Rollout per step."""

from dataclasses import replace

import pytest
from tests.support import worked
from tests.support.forests import make_step

from proxy.export import FORMATS, Inexpressible
from proxy.trajectory.sequence import Options
from proxy.trajectory.step import Span

EXAMPLES = [
    {
        "env_name": "demo",
        "env_example_id": "g1",
        "prompt_tokens": [101, 102, 103],
        "response_tokens": [201, 202, 9],
        "response_logprobs": [-0.5, -0.25, -0.125],
        "token_rewards": [1.0, 1.0, 1.0],
        "episode_reward": 1.0,
        "is_truncated": False,
        "metadata": {"worker_id": "", "timestamp": 0.0, "weight_step": 3},
    },
    {
        "env_name": "demo",
        "env_example_id": "g1",
        "prompt_tokens": [101, 102, 103, 201, 202, 9, 301, 302, 303, 304],
        "response_tokens": [203, 9],
        "response_logprobs": [-1.0, -0.0625],
        "token_rewards": [1.0, 1.0],
        "episode_reward": 1.0,
        "is_truncated": False,
        "metadata": {"worker_id": "", "timestamp": 0.0, "weight_step": 4},
    },
]


def test_the_reward_is_repeated_for_each_token_and_the_policy_version_is_a_number():
    assert worked.rows("marin") == EXAMPLES


def test_another_number_of_token_rewards_is_rejected():
    facts = replace(worked.FACTS, step_rewards={"a": [0.5, 0.25]})

    with pytest.raises(Inexpressible, match="2 rewards for the 3 tokens of step 'a'"):
        worked.rows("marin", facts=facts)


def test_token_rewards_are_exported_unchanged():
    rows = worked.rows("marin", facts=replace(worked.FACTS, step_rewards={"a": [0.5, 0.25, 0.0]}))

    assert [row["token_rewards"] for row in rows] == [[0.5, 0.25, 0.0], [1.0, 1.0]]


def test_a_rollout_group_has_equal_prompts():
    """The first steps form one; later steps form one per equal prompt."""
    form = FORMATS["marin"]
    short = [worked.first()]
    members = [form.rows(worked.FACTS, steps, Options()) for steps in (worked.STEPS, short, worked.STEPS)]

    assert [len(group["rollouts"]) for group in form.gather(members)] == [3, 2]
    assert [EXAMPLES[0]] * 3 == form.gather(members)[0]["rollouts"]


def test_rollouts_with_different_first_prompts_cannot_be_gathered():
    form = FORMATS["marin"]
    members = [form.rows(worked.FACTS, [step], Options()) for step in (worked.first(), make_step("a", [1], [2]))]

    with pytest.raises(Inexpressible, match="all rollouts of a group begin with the same prompt"):
        form.gather(members)


def test_a_response_cut_by_length_or_by_a_disconnect_is_truncated():
    cut = worked.first(worked.sampled(worked.S1, worked.L1, finish_reason="length"))
    broken = worked.first(worked.sampled(worked.S1, worked.L1, finish_reason=None), status="partial")

    assert [row["is_truncated"] for row in worked.rows("marin", [cut])] == [True]
    rows = worked.rows("marin", [broken, worked.second()], options=Options(include="flagged"))
    assert [row["is_truncated"] for row in rows] == [True, False]


def test_an_unknown_policy_version_is_minus_1_and_two_versions_in_a_step_are_rejected():
    both = worked.sampled(worked.S1, worked.L1, spans=(Span(0, 1, "4"), Span(1, 3, "5")))
    (row,) = worked.rows("marin", [worked.first(policy_version=None)])
    with pytest.raises(
        Inexpressible, match="requires one policy version per step; rollout .* has '4' and '5' at step 'a'"
    ):
        worked.rows("marin", [worked.first(both)])

    assert row["metadata"]["weight_step"] == -1


def test_sampling_parameters_are_exported_if_temperature_and_length_are_known():
    sampling = {"temperature": 0.5, "max_tokens": 16, "top_k": 5, "stop": "END"}
    (row,) = worked.rows("marin", [worked.first(sampling=sampling)])

    assert row["decoding"] == {
        "strategy": "sample",
        "temperature": 0.5,
        "top_k": 5,
        "top_p": None,
        "min_p": None,
        "repetition_penalty": None,
        "presence_penalty": None,
        "frequency_penalty": None,
        "max_output_tokens": 16,
        "min_output_tokens": None,
        "stop_strings": ["END"],
        "stop_token_ids": None,
        "ignore_eos": False,
        "seed": None,
    }


@pytest.mark.parametrize(
    ("facts", "why"), [({"reward": None}, "requires a reward"), ({"metadata": {}}, "requires `env_name`")]
)
def test_a_missing_reward_or_environment_is_rejected(facts, why):
    with pytest.raises(Inexpressible, match=why):
        worked.rows("marin", facts=replace(worked.FACTS, **facts))
