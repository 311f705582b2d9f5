"""The formats `verl` and `verl_dataproto`."""

from dataclasses import replace

import pytest
from tests.support import worked

from proxy.export import FORMATS, Fill, Inexpressible

OUTPUT = {
    "prompt_ids": [101, 102, 103],
    "response_ids": [201, 202, 9, 301, 302, 303, 304, 203, 9],
    "response_mask": [1, 1, 1, 0, 0, 0, 0, 1, 1],
    "response_logprobs": [-0.5, -0.25, -0.125, 0.0, 0.0, 0.0, 0.0, -1.0, -0.0625],
    "reward_score": 1.0,
    "num_turns": 4,
    "metrics": {},
    "extra_fields": {"rollout_id": "r1", "min_global_steps": 3, "max_global_steps": 4},
}
BATCH = {
    "prompts": [[0, 101, 102, 103]],
    "responses": [[201, 202, 9, 301, 302, 303, 304, 203, 9, 0]],
    "input_ids": [[0, 101, 102, 103, 201, 202, 9, 301, 302, 303, 304, 203, 9, 0]],
    "attention_mask": [[0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0]],
    "position_ids": [[0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 11]],
    "response_mask": [[1, 1, 1, 0, 0, 0, 0, 1, 1, 0]],
    "rollout_log_probs": [[-0.5, -0.25, -0.125, 0.0, 0.0, 0.0, 0.0, -1.0, -0.0625, 0.0]],
    "rm_scores": [[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]],
}
LENGTHS = Fill(prompt_length=4, response_length=10)


def test_an_agent_loop_output_has_prompt_and_response_apart():
    """num_turns counts the messages of user, assistant and tools."""
    assert worked.rows("verl") == [OUTPUT]
    assert FORMATS["verl"].whole


def test_without_messages_num_turns_counts_calls():
    steps = [worked.first(request={}), worked.second(request={"prompt": "?"})]

    assert [row["num_turns"] for row in worked.rows("verl", steps)] == [2]


def test_policy_versions_and_reward_are_optional():
    steps = [worked.first(policy_version=None), worked.second(policy_version=None)]
    (row,) = worked.rows("verl", steps, replace(worked.FACTS, reward=None))

    assert row == OUTPUT | {"extra_fields": {"rollout_id": "r1"}, "reward_score": None}


def test_a_batch_is_padded_left_for_prompts_and_right_for_responses():
    """The reward is on the last response token."""
    assert worked.rows("verl_dataproto", fill=LENGTHS) == [BATCH]


@pytest.mark.parametrize(
    ("reward", "step_rewards", "scores"),
    [
        (1.0, {"a": 0.5}, [0, 0, 0.5, 0, 0, 0, 0, 0, 1]),
        (1.0, {"a": 0.5, "b": 0.25}, [0, 0, 0.5, 0, 0, 0, 0, 0, 0.25]),
        (1.0, {"a": [0.5, 0.25, 0.125]}, [0.5, 0.25, 0.125, 0, 0, 0, 0, 0, 1]),
        (None, {"b": [0.5, 0.25]}, [0, 0, 0, 0, 0, 0, 0, 0.5, 0.25]),
        (1.0, {"elsewhere": 0.5}, [0, 0, 0, 0, 0, 0, 0, 0, 1]),
    ],
)
def test_the_scores_of_a_batch_have_the_rewards_of_steps_and_of_tokens(reward, step_rewards, scores):
    facts = replace(worked.FACTS, reward=reward, step_rewards=step_rewards)
    (row,) = worked.rows("verl_dataproto", facts=facts, fill=LENGTHS)

    assert row["rm_scores"] == [[*scores, 0.0]]


def test_rewards_of_other_steps_give_a_batch_no_scores():
    facts = replace(worked.FACTS, reward=None, step_rewards={"elsewhere": 0.5})
    (row,) = worked.rows("verl_dataproto", facts=facts, fill=LENGTHS)

    assert "rm_scores" not in row


def test_a_group_is_one_batch_with_a_reward_for_all_or_none():
    bare = replace(worked.FACTS, reward=None)
    without = {key: [*value, *value] for key, value in BATCH.items() if key != "rm_scores"}
    with pytest.raises(Inexpressible, match="some have no rm_scores"):
        worked.gathered("verl_dataproto", worked.FACTS, bare, fill=LENGTHS)

    assert without == worked.gathered("verl_dataproto", bare, bare, fill=LENGTHS)


@pytest.mark.parametrize(
    ("fill", "why"),
    [
        (Fill(), "requires the parameter prompt_length"),
        (Fill(prompt_length=3), "requires the parameter response_length"),
        (Fill(prompt_length=2, response_length=9), "requires at most prompt_length=2 tokens; rollout 'r1' has 3"),
        (Fill(prompt_length=3, response_length=8), "requires at most response_length=8 tokens; rollout 'r1' has 9"),
    ],
)
def test_missing_or_exceeded_lengths_are_rejected(fill, why):
    with pytest.raises(Inexpressible, match=why):
        worked.rows("verl_dataproto", fill=fill)


def test_a_sequence_of_full_length_is_not_padded():
    """The pad id is configurable."""
    (exact,) = worked.rows("verl_dataproto", fill=Fill(prompt_length=3, response_length=9))
    (padded,) = worked.rows("verl_dataproto", fill=replace(LENGTHS, pad_id=7))

    assert (exact["prompts"], padded["prompts"]) == ([[101, 102, 103]], [[7, 101, 102, 103]])
