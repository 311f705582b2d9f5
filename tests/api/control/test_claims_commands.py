"""How many commands a claim sends to the store: they do not grow with what is stored."""

import asyncio

import pytest
from tests.support.session import names_in

from storage.redis import scripts

BACKGROUND = {
    "HEARTBEAT", "INDEX_MISSING", "INDEX_REPAIR", "LEAD", "TIMERS_CLAIM", "TIMERS_MOVE", "TIMERS_TURN",
}  # fmt: skip


@pytest.fixture
def writes(store, monkeypatch):
    """The writes to the server from now on, each with its commands, without those of background work."""
    servers, found = store._store._servers, []
    execute = servers.execute
    known = {name: script for name, script in vars(scripts).items() if isinstance(script, scripts.Script)}
    names = {part: name for name, script in known.items() for part in (script.sha, script._text)}
    names |= {own.sha: names[script.sha] for script, own in store._store._scripts.items()}

    async def noted(key, commands, **options):
        named = [names.get(command[1], command[0]) for command in commands]
        if not BACKGROUND & {*named}:
            found.append(named)
        return await execute(key, commands, **options)

    monkeypatch.setattr(servers, "execute", noted)
    return found


async def test_a_claim_of_a_group_of_two_is_six_writes(proxy, writes):
    """It reads the index, leases, freezes and reads both members, extends the lease and stores the batch."""
    for name in ("g1", "g2"):
        await proxy.group(name, 1, 0)
    assert names_in(await proxy.claim()) == ["g1"]  # the first claim of a process also compares the index
    writes.clear()
    batch = await proxy.claim()

    assert names_in(batch) == ["g2"]
    assert len(writes) <= 6, writes


async def test_a_claim_that_waits_reads_once_a_second(proxy, writes):
    """Besides it subscribes to notifications."""
    await proxy.claim()
    writes.clear()
    await proxy.claim(wait_s=2.5)

    assert len(writes) <= 6, writes  # at once, once subscribed, after each second, and at the end


async def test_a_claim_that_waits_is_notified_of_a_group(proxy, store, monkeypatch):
    """Of one that becomes complete, and of one that is released."""
    monkeypatch.setattr("proxy.api.control.claims._POLL_INTERVAL_S", 3600)
    (member,) = await proxy.group("g", 1, finish=False)
    arrivals = store.queue.arrivals
    subscribed = asyncio.Event()

    def noted(queue):
        subscribed.set()
        return arrivals(queue)

    monkeypatch.setattr(store.queue, "arrivals", noted)
    waiting = asyncio.ensure_future(proxy.claim(wait_s=50))
    await subscribed.wait()
    await proxy.finish(member, reward=1)
    batch = await waiting
    subscribed.clear()
    again = asyncio.ensure_future(proxy.claim(consumer="other", wait_s=50))
    await subscribed.wait()
    await proxy.release(batch)

    assert names_in(batch) == names_in(await again) == ["g"]


async def test_an_instance_that_waits_looks_for_silent_ones_with_the_same_reads(proxy, writes):
    """One a second, independently of the number of batches."""
    for name in ("g1", "g2"):
        await proxy.group(name, 1)
        await proxy.claim(instance="a", heartbeat_s=3600)
    writes.clear()
    await proxy.claim(instance="b", wait_s=2.5)

    assert len(writes) <= 6, writes
    assert {name for commands in writes for name in commands} == {"QUEUE_READ"}
