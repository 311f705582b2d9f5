"""Checks of a call before it is sent."""

import pytest

from proxy.api.model.calls import GUARDS
from proxy.errors import LimitReached, RolloutClosed
from proxy.rollouts.rollout import FINISHED, Limits, Rollout


def check(**named) -> None:
    rollout = Rollout("r1", "b", 1000, 1000, **named)
    for guard in GUARDS:
        guard(rollout)


@pytest.mark.parametrize("status", FINISHED)
def test_a_call_of_a_finished_rollout_is_rejected(status):
    with pytest.raises(RolloutClosed, match=status):
        check(status=status)


@pytest.mark.parametrize(
    ("limits", "counts"),
    [(Limits(max_steps=2), {"steps": 2}), (Limits(max_tokens=10), {"sampled_tokens": 12}), (Limits(max_steps=0), {})],
)
def test_a_call_at_a_limit_of_the_rollout_is_rejected(limits, counts):
    """The limits are steps and sampled tokens."""
    with pytest.raises(LimitReached):
        check(limits=limits, counts=counts)


def test_a_call_just_below_every_limit_is_accepted():
    check(limits=Limits(3, 10), counts={"steps": 2, "sampled_tokens": 9})
