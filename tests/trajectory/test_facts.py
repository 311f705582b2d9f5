"""Facts of a rollout: group, reward, step rewards, advantages."""

from proxy.trajectory.facts import RolloutFacts


def test_facts_default_to_none():
    facts = RolloutFacts("r1")

    assert (None, None, {}, None, {}) == (
        facts.group_id,
        facts.reward,
        facts.step_rewards,
        facts.advantages,
        facts.metadata,
    )


FACTS = RolloutFacts("r1", step_rewards={"s1": 2, "s2": [0.5, 0.25]})


def test_a_steps_reward_is_the_sum_of_its_tokens():
    """None if the step has no reward."""
    assert [2.0, 0.75, None] == [FACTS.step_reward(step) for step in ("s1", "s2", "s3")]


def test_token_rewards_are_a_list_of_numbers():
    """A single number is a step reward."""
    assert [None, [0.5, 0.25], None] == [FACTS.token_rewards(step) for step in ("s1", "s2", "s3")]
