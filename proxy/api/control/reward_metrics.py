"""Metrics of the rewards of claimed groups. A group counts once, in the batch that froze its rewards."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean
from typing import Final

from proxy.rollouts.policy import Announced
from proxy.rollouts.rollout import Rollout
from proxy.telemetry.metrics import Metrics

_COMPARED: Final = 2  # rewards, at least, that are equal or not


@dataclass(frozen=True, slots=True)
class Earned:
    """The rewards of a group's rollouts that have one, and the number of tokens that each rollout sampled."""

    rewards: tuple[float, ...]
    tokens: tuple[int, ...]


def earned_by(rollouts: Sequence[Rollout]) -> Earned:
    """Return what these rollouts earned, before the penalty of long responses."""
    return Earned(
        tuple(float(rollout.reward) for rollout in rollouts if rollout.reward is not None),
        tuple(rollout.counts.get("sampled_tokens", 0) for rollout in rollouts),
    )


def observe_claimed(
    metrics: Metrics, policy: str, earned: Earned, oldest: str | None, epoch: int, announced: Announced
) -> None:
    """Count a group that is claimed for a policy. `oldest` is the oldest version of its tokens of this policy, of `epoch`."""
    rewards = earned.rewards
    for count in earned.tokens:
        metrics.rollout_tokens.labels(policy).observe(count)
    with metrics.reward_windows.lock:
        versions = metrics.reward_windows.of(policy, oldest, epoch)
        for reward in rewards:
            metrics.reward.labels(policy, versions).observe(reward)
            metrics.reward_amount.labels(policy, versions, "negative" if reward < 0 else "positive").inc(abs(reward))
    if rewards:
        metrics.group_reward_mean.labels(policy).observe(mean := fmean(rewards))
        if len(rewards) >= _COMPARED:
            spread = sqrt(fmean((reward - mean) ** 2 for reward in rewards))
            metrics.group_reward_spread.labels(policy).observe(spread)
            metrics.compared_groups.labels(policy, "equal" if len(set(rewards)) == 1 else "different").inc()
    staleness = announced.staleness(oldest, epoch)
    if staleness is not None:
        metrics.claim_staleness.labels(policy).observe(max(0, staleness))
