"""Surplus rollouts: their calls are cut."""

import pytest
from prometheus_client import CollectorRegistry

from proxy.api.in_flight import SurplusCalls
from proxy.rollouts.rollout import write_fields
from proxy.telemetry.metrics import make_metrics


class Call:
    """A call in flight."""

    def __init__(self, over_sampled) -> None:
        self.over_sampled = over_sampled
        self.stopped: list[str] = []

    def stop(self, reason: str) -> None:
        self.stopped.append(reason)


@pytest.fixture
def metrics():
    return make_metrics(CollectorRegistry())


@pytest.fixture
async def open_rollout(store):
    """Return a function that opens a rollout with these fields, and returns a call of it in flight."""

    async def opened(name, **fields):
        stored = await store.open(name, write_fields(fields), now_ms=1)
        return Call((name, stored.incarnation))

    return opened


async def test_only_calls_of_surplus_rollouts_are_stopped(store, open_rollout, metrics):
    surplus = await open_rollout("surplus", status="aborted", reason="surplus")
    others = [
        await open_rollout("open"),
        await open_rollout("late", status="aborted", reason="deadline"),
        await open_rollout("done", status="completed"),
    ]
    of_no_group = Call(None)
    of_before = Call(("surplus", "an earlier incarnation"))
    await SurplusCalls(store, {surplus, *others, of_no_group, of_before}, metrics).stop_surplus()

    assert surplus.stopped == ["its group is complete without it"]
    assert [call.stopped for call in others] == [[], [], []]


async def test_thousands_of_calls_are_looked_at(store, open_rollout, metrics):
    calls = {await open_rollout(f"r{n}", status="aborted", reason="surplus") for n in range(200)}
    await SurplusCalls(store, calls, metrics).stop_surplus()

    assert all(call.stopped for call in calls)
