"""What rows say of their rollout."""

from proxy.trajectory.facts import RolloutFacts


def test_nothing_is_invented():
    """A rollout that nobody said anything about has no group, no reward and no advantages."""
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
    """None where none was given."""
    assert [2.0, 0.75, None] == [FACTS.step_reward(step) for step in ("s1", "s2", "s3")]


def test_rewards_by_token_are_those_given_one_by_one():
    """A number for the step is none of them."""
    assert [None, [0.5, 0.25], None] == [FACTS.token_rewards(step) for step in ("s1", "s2", "s3")]
