"""The limits of rollouts, which are checked before a call is sent, and what a process knows of rollouts."""

import asyncio

import pytest
from tests.support.fakes import proxying
from tests.support.recorded import load

from proxy.errors import LimitReached
from proxy.rollouts.admission import check_limits
from proxy.rollouts.rollout import FINISHED, Limits, Rollout, write_fields


def check(**named) -> None:
    check_limits(Rollout("r1", "b", 1000, 1000, **named))


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


@pytest.mark.parametrize("status", FINISHED)
async def test_a_call_of_a_finished_rollout_is_rejected(store, engine, http, status):
    """The process that finished it need not be the one that has the call, and knows it as open."""
    engine.plays(load("chat_ids_lp"))
    async with proxying(engine.url, store) as served:
        url, body = f"{served.url}/rollouts/r1/v1/chat/completions", {"model": "tiny", "messages": []}
        async with http.post(url, json=body) as before:
            pass
        fields = write_fields({"status": status, "reason": "deadline"})
        await store.update_if("r1", fields, expect={"status": None}, now_ms=1)
        async with http.post(url, json=body) as rejected:
            error = (await rejected.json())["error"]

    assert (before.status, rejected.status, len(engine.requests)) == (200, 409, 1)
    assert f"Rollout 'r1' is {status} (deadline)" in error["message"]


async def test_a_call_that_waits_during_a_pause_keeps_its_reservation(store, engine, http, monkeypatch):
    """The last step of the rollout is its own, also before it is sent."""
    await store.open("r1", write_fields({"limits": {"max_steps": 1}}), now_ms=1)
    engine.plays(load("chat_ids_lp"))
    opened, all_opened, real = 0, asyncio.Event(), store.open

    async def counted(*positional, **named):
        nonlocal opened
        found = await real(*positional, **named)
        opened += 1
        if opened == 3:
            all_opened.set()
        return found

    monkeypatch.setattr(store, "open", counted)
    async with proxying(engine.url, store) as served:
        url, body = f"{served.url}/rollouts/r1/v1/chat/completions", {"model": "tiny", "messages": []}
        async with http.post(f"{served.url}/policy/pause", json={"mode": "wait"}):
            pass
        calls = [asyncio.ensure_future(http.post(url, json=body)) for _ in range(3)]
        async with asyncio.timeout(50):
            await all_opened.wait()
        async with http.post(f"{served.url}/policy/resume"):
            pass
        statuses = [(await call).status for call in calls]

    assert sorted(statuses) == [200, 429, 429]
    assert len(engine.requests) == 1
