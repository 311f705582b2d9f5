"""What rows say of their rollout."""

from proxy.trajectory.rollout import RolloutFacts


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
