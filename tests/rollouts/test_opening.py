"""Rollouts as they stood when the store was last there."""

from proxy.rollouts.opening import _MOST, Remembered
from proxy.rollouts.rollout import Limits, Rollout


def test_the_last_state_of_a_rollout_is_remembered():
    """And nothing of one that was never met."""
    remembered = Remembered()
    remembered.keep(Rollout("r1", "b", 1, 1))
    remembered.keep(Rollout("r1", "b", 1, 1, status="completed"))

    assert "completed" == remembered.find("r1").status
    assert remembered.find("r2") is None


def test_a_rollout_whose_steps_or_tokens_are_counted_is_not_remembered():
    """Nobody counts them while the store is away; a limit that came later forgets what was there."""
    remembered = Remembered()
    remembered.keep(Rollout("r1", "b", 1, 1))
    remembered.keep(Rollout("r1", "b", 1, 1, limits=Limits(max_steps=3)))

    assert remembered.find("r1") is None


def test_the_memory_is_bounded():
    """Those met longest ago are forgotten."""
    remembered = Remembered()
    for number in range(_MOST + 1):
        remembered.keep(Rollout(f"r{number}", "b", 1, 1))

    assert (None, "r1") == (remembered.find("r0"), remembered.find("r1").rollout_id)
