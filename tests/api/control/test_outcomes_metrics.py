"""Metrics of rewards: each group counts once, when a consumer gets it for the first time."""

import pytest
from prometheus_client import CollectorRegistry
from tests.support.session import names_in

from proxy.api.control import claims
from proxy.api.control.outcomes import Earned, earned_by, observe_claimed
from proxy.rollouts.policy import NOTHING, Announced
from proxy.rollouts.rollout import Rollout
from proxy.telemetry.metrics import make_metrics


def observed(*groups, oldest=None, announced=None, epochs=(0, 0)):
    """Return a reader of the metrics of groups with these rewards; `versions` of rewards is unknown unless given."""
    registry = CollectorRegistry()
    metrics = make_metrics(registry)
    now = Announced(announced, epochs[1])
    for rewards in groups:
        observe_claimed(metrics, "default", Earned(tuple(rewards), (3,) * len(rewards)), oldest, epochs[0], now)

    def read(name, **labels):
        windowed = {"versions": "unknown"} if name.startswith("reward") else {}
        return registry.get_sample_value(f"tokentape_{name}", {"policy": "default", **windowed, **labels})

    return read


def test_rewards_are_counted_by_rollout_and_by_group():
    read = observed([1.0, 0.0, -0.5, 0.5], [1.0, 1.0])

    assert (
        read("reward_count"), read("reward_bucket", le="-0.25"), read("reward_bucket", le="0.5")
    ) == (6.0, 1.0, 3.0)  # fmt: skip
    assert tuple(read("reward_amount_total", sign=sign) for sign in ("positive", "negative")) == (3.5, 0.5)
    assert (
        read("group_reward_mean_count"), read("group_reward_mean_bucket", le="0.25"), read("group_reward_mean_bucket", le="1.0")
    ) == (2.0, 1.0, 2.0)  # fmt: skip
    assert (2.0, pytest.approx(0.3125**0.5)) == (read("group_reward_spread_count"), read("group_reward_spread_sum"))
    assert tuple(read("compared_groups_total", rewards=rewards) for rewards in ("equal", "different")) == (1.0, 1.0)
    assert (read("rollout_tokens_count"), read("rollout_tokens_sum")) == (6.0, 18.0)


def test_one_reward_is_neither_equal_nor_different():
    read = observed([1.0], [])

    assert (read("group_reward_mean_count"), read("group_reward_spread_count")) == (1.0, 0.0)
    assert read("compared_groups_total", rewards="equal") == 0.0


def test_rewards_are_counted_by_the_window_of_the_oldest_version_of_their_policy():
    registry = CollectorRegistry()
    metrics = make_metrics(registry)
    for policy, oldest, reward in (("planner", "129", 1.0), ("planner", "120", -2.0), ("solver", "3", 4.0)):
        observe_claimed(metrics, policy, Earned((reward,), (3,)), oldest, 0, NOTHING)

    def count(policy, versions):
        return registry.get_sample_value("tokentape_reward_count", {"policy": policy, "versions": versions})

    assert (count("planner", "120-129"), count("planner", "130-139"), count("solver", "0-9")) == (2.0, 0.0, 1.0)
    labels = {"policy": "planner", "versions": "120-129", "sign": "negative"}
    assert registry.get_sample_value("tokentape_reward_amount_total", labels) == 2.0


@pytest.mark.parametrize(
    ("oldest", "announced", "expected"),
    [("3", "5", (1, 2)), ("5", "5", (1, 0)), ("7", "5", (1, 0)), (None, "5", (0, 0)), ("3", "main", (0, 0))],
)
def test_staleness_is_counted_between_numbers(oldest, announced, expected):
    read = observed([1.0], oldest=oldest, announced=announced)

    assert (read("claim_staleness_count"), read("claim_staleness_sum")) == expected


def test_groups_of_another_epoch_have_no_staleness():
    read = observed([1.0], oldest="3", announced="5", epochs=(0, 1))

    assert read("claim_staleness_count") == 0


def test_the_largest_rewards_are_finite():
    read = observed([3.4e38, -3.4e38])

    assert read("group_reward_spread_sum") == 3.4e38


def test_rollouts_without_a_reward_have_tokens():
    rollouts = [Rollout("a", "b", 1, 1, reward=1, counts={"sampled_tokens": 7}), Rollout("c", "b", 1, 1)]

    assert Earned((1.0,), (7, 0)) == earned_by(rollouts)


async def count(proxy, name="reward_count"):
    """Return the sum of a metric of the default policy in /metrics."""
    lines = (await proxy.get("/metrics")).text.decode().splitlines()
    found = [line for line in lines if line.startswith(f'tokentape_{name}{{policy="default"')]
    assert found
    return sum(float(line.split()[-1]) for line in found)


async def test_a_group_counts_when_it_is_claimed_and_not_again(proxy):
    """Neither in a repeated claim after an expired lease, nor after a release."""
    await proxy.put("/policy", {"version": 3})
    await proxy.group("g", 1, 0)
    await proxy.put("/policy", {"version": 5})
    assert await count(proxy) == 0
    lost = await proxy.claim(lease_s=0.001)
    assert (await count(proxy), await count(proxy, "claim_staleness_sum")) == (2, 2)
    again = await proxy.claim()
    assert names_in(again) == names_in(lost) == ["g"]
    await proxy.release(again)
    await proxy.claim()

    assert (await count(proxy), await count(proxy, "group_reward_mean_count")) == (2, 1)


async def test_a_claim_that_fails_or_refuses_counts_nothing(proxy, monkeypatch):
    """The group counts when it is claimed later."""
    await proxy.group("g", 1, None)
    await proxy.claim(format="areal", members="all")

    async def fail(*_, **__):
        raise RuntimeError

    with monkeypatch.context() as failing:
        failing.setattr(claims, "normalize", fail)
        assert (await proxy.post("/batches/claim", {"consumer": "t", "reward_s": 0})).status == 500
    assert await count(proxy) == 0
    await proxy.claim(reward_s=0)

    assert await count(proxy) == 1
