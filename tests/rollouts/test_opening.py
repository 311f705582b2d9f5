"""The cache of rollouts for the time when the store is unreachable."""

from proxy.rollouts.opening import _MAX_CACHED, RolloutCache
from proxy.rollouts.rollout import Limits, Rollout


def test_the_last_state_of_a_rollout_is_cached():
    """An unknown rollout is not in the cache."""
    cache = RolloutCache()
    cache.put(Rollout("r1", "b", 1, 1))
    cache.put(Rollout("r1", "b", 1, 1, status="completed"))

    assert "completed" == cache.get("r1").status
    assert cache.get("r2") is None


def test_a_rollout_with_a_limit_is_not_cached():
    """A limit that is set later removes the rollout from the cache."""
    cache = RolloutCache()
    cache.put(Rollout("r1", "b", 1, 1))
    cache.put(Rollout("r1", "b", 1, 1, limits=Limits(max_steps=3)))

    assert cache.get("r1") is None


def test_the_cache_evicts_the_oldest_entries():
    cache = RolloutCache()
    for number in range(_MAX_CACHED + 1):
        cache.put(Rollout(f"r{number}", "b", 1, 1))

    assert (None, "r1") == (cache.get("r0"), cache.get("r1").rollout_id)
