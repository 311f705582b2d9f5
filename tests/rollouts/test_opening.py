"""Rollouts as they stood when the store was last there."""

from proxy.rollouts.opening import _MAX_CACHED, RolloutCache
from proxy.rollouts.rollout import Limits, Rollout


def test_the_last_state_of_a_rollout_is_cache():
    """And nothing of one that was never met."""
    cache = RolloutCache()
    cache.keep(Rollout("r1", "b", 1, 1))
    cache.keep(Rollout("r1", "b", 1, 1, status="completed"))

    assert "completed" == cache.find("r1").status
    assert cache.find("r2") is None


def test_a_rollout_whose_steps_or_tokens_are_counted_is_not_cache():
    """Nobody counts them while the store is away; a limit that came later forgets what was there."""
    cache = RolloutCache()
    cache.keep(Rollout("r1", "b", 1, 1))
    cache.keep(Rollout("r1", "b", 1, 1, limits=Limits(max_steps=3)))

    assert cache.find("r1") is None


def test_the_memory_is_bounded():
    """Those met longest ago are forgotten."""
    cache = RolloutCache()
    for number in range(_MAX_CACHED + 1):
        cache.keep(Rollout(f"r{number}", "b", 1, 1))

    assert (None, "r1") == (cache.find("r0"), cache.find("r1").rollout_id)
