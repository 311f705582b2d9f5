"""Facts of a rollout: group, reward, step rewards, advantages."""

from dataclasses import replace

import pytest

from proxy.trajectory.facts import RolloutFacts


def test_facts_default_to_none():
    facts = RolloutFacts("r1")

    assert (
        facts.group_id,
        facts.reward,
        facts.step_rewards,
        facts.advantages,
        facts.metadata,
    ) == (None, None, {}, None, {})


FACTS = RolloutFacts("r1", step_rewards={"s1": 2, "s2": [0.5, 0.25]})


def test_a_steps_reward_is_the_sum_of_its_tokens():
    """None if the step has no reward."""
    assert [FACTS.step_reward(step) for step in ("s1", "s2", "s3")] == [2.0, 0.75, None]


def test_token_rewards_are_a_list_of_numbers():
    """A single number is a step reward."""
    assert [FACTS.token_rewards(step) for step in ("s1", "s2", "s3")] == [None, [0.5, 0.25], None]


@pytest.mark.parametrize(
    ("advantages", "shared"),
    [(1.0, 0.25), (None, None), ([1.0, 2.0], [1.0, 2.0]), ({"s1": 1.0}, {"s1": 1.0}), (True, True)],
)
def test_rows_share_the_reward_and_a_single_advantage(advantages, shared):
    """Rewards of steps, and advantages of steps or tokens, belong to one row."""
    split = replace(FACTS, reward=2.0, advantages=advantages).split(4)

    assert (0.5, shared, FACTS.step_rewards) == (split.reward, split.advantages, split.step_rewards)


def test_facts_of_one_row_or_without_a_reward_are_not_divided():
    rewarded = replace(FACTS, reward=2.0)

    assert rewarded == rewarded.split(1) == rewarded.split(0)
    assert FACTS.split(3) == FACTS


def test_rows_of_a_rewarded_thread_have_its_reward_and_advantage():
    """Other rows have the rollout's reward and advantage; rows that have one reward share it, if it is split."""
    facts = RolloutFacts(
        "r", reward=1.0, advantages=0.5, thread_rewards={"main": 3.0, "a": 1.0}, thread_advantages={"main": 2.0}
    )
    threads = ["main", "main", "a", "b", None]

    assert [(row.reward, row.advantages) for row in facts.of_rows(threads, split=False)] == [
        (3.0, 2.0),
        (3.0, 2.0),
        (1.0, 0.5),
        (1.0, 0.5),
        (1.0, 0.5),
    ]
    assert [row.reward for row in facts.of_rows(threads, split=True)] == [1.5, 1.5, 1.0, 0.5, 0.5]
    assert facts is facts.of_thread("b") is facts.of_thread(None)
    assert tuple(map(facts.rewarded, ("main", "b", None))) == ("main", None, None)
