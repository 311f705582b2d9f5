"""A store on a primary that sentinels monitor: discovery, failovers, and bad input."""

import asyncio
import logging
import os
import signal
from contextlib import suppress
from itertools import count

import pytest

from storage.errors import StorageError, StoreUnreachable
from storage.types import StepWrite

LOG = logging.getLogger("failover")


def url_of(trio, service="main"):
    return f"redis+sentinel://{','.join(sentinel.address for sentinel in trio)}/{service}"


async def appended(store, name):
    incarnation = (await store.open("r", {}, now_ms=1)).incarnation
    return (await store.append(StepWrite("r", incarnation, name, b"1"), now_ms=2)).position


async def is_primary(server):
    return (await asyncio.to_thread(server.send, "ROLE"))[0] == b"master"


async def test_the_primary_is_found(sentinels, opened):
    """Also by a list in which the first sentinel is dead; the primary can have a database."""
    primary, _, trio = sentinels
    store = await opened(url_of(trio))
    other = await opened(f"redis+sentinel://127.0.0.1:1,{trio[2].address}/main/0")

    await appended(store, "s")

    assert primary.address == store.server_of("r")
    assert (await other.list()).names == ("r",)


async def test_a_requested_failover_is_followed(sentinels, opened, until):
    """The old primary still runs and accepts writes for seconds; no write goes there once the replica was promoted."""
    _, replica, trio = sentinels
    store = await opened(url_of(trio))
    await appended(store, "s0")
    trio[0].send("SENTINEL", "FAILOVER", "main")

    async def is_followed():
        return store.server_of("r") == replica.address

    await until(is_followed)

    assert await appended(store, "s1") == 1
    assert await is_primary(replica)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_call_waits_for_the_failover(sentinels, opened, fault):
    """A primary that is killed or frozen is replaced within the timeout of the call; so no call fails."""
    primary, replica, trio = sentinels
    store = await opened(url_of(trio), timeout_s=30)
    await appended(store, "s0")
    os.kill(primary.process.pid, fault)

    assert await appended(store, "s1") == 1
    assert replica.address == store.server_of("r")
    os.kill(primary.process.pid, signal.SIGCONT) if fault == signal.SIGSTOP else None


async def test_sentinels_have_their_own_password(sentinels, start, sentinel_kind, opened):
    """It is store.sentinel_password."""
    primary, _, _ = sentinels
    settings = (f"sentinel monitor main 127.0.0.1 {primary.port} 1", "requirepass word")
    trio = [start(*settings, kind=sentinel_kind, password="word")]

    assert await appended(await opened(url_of(trio), sentinel_password="word"), "s") == 0
    for wrong in ({"sentinel_password": "wrong"}, {}):
        with pytest.raises(StorageError, match=r"store\.sentinel_password"):
            await opened(url_of(trio), **wrong)


async def test_an_unknown_name_is_an_error(sentinels, opened):
    """It contains the name, and where to correct it."""
    _, _, trio = sentinels

    with pytest.raises(StorageError, match=r"monitor no primary with the name 'other': correct the end of store\.url"):
        await opened(url_of(trio, "other"))


async def test_sentinels_that_do_not_respond_are_unreachable(opened):
    """The error names all of them."""
    with pytest.raises(
        StoreUnreachable, match=r"no sentinel in store.url can be reached: .*127.0.0.1:1 .*127.0.0.1:2 "
    ):
        await opened("redis+sentinel://127.0.0.1:1,127.0.0.1:2/main")


@pytest.mark.parametrize("durability", ["acknowledged", "fsync", "replicated"])
async def test_what_a_promoted_replica_lacks_was_not_acknowledged_with_replicated(sentinels, opened, durability):
    """Only `replicated` promises that a replica which lags has each acknowledged record (docs/reliability.md)."""
    primary, replica, trio = sentinels
    primary.send("CONFIG", "SET", "appendonly", "yes")
    store = await opened(url_of(trio), durability=durability, timeout_s=1 if durability == "replicated" else 30)
    incarnation = (await store.open("r", {}, now_ms=1)).incarnation
    acknowledged = []

    async def append(number):
        with suppress(StoreUnreachable):
            await store.append(StepWrite("r", incarnation, f"s{number}", bytes(500_000)), now_ms=2)
            acknowledged.append(f"s{number}")

    for number in range(5):
        await append(number)
    os.kill(replica.process.pid, signal.SIGSTOP)  # it lags by more than what the kernel buffers for it
    await asyncio.gather(*(append(number) for number in range(5, 65)))
    os.kill(primary.process.pid, signal.SIGKILL)
    os.kill(replica.process.pid, signal.SIGCONT)
    async with asyncio.timeout(60):
        while store.server_of("r") != replica.address:
            await asyncio.sleep(0.05)
    client = await opened(url_of(trio), timeout_s=30)
    lost = [name for name in acknowledged if await client.find("r", name) is None]

    LOG.info("%s: %d of %d acknowledged records lost", durability, len(lost), len(acknowledged))
    if durability == "replicated":
        assert (len(acknowledged), lost) == (5, [])
    else:
        assert len(acknowledged) == 65


async def test_a_requested_failover_of_a_paused_primary_loses_nothing(sentinels, opened):
    """Sentinel notices a promotion up to a second later; while the old primary is paused, it acknowledges nothing."""
    primary, replica, trio = sentinels
    store = await opened(url_of(trio), timeout_s=30)
    acknowledged, stopped = [], asyncio.Event()

    async def call(rollout):
        incarnation = (await store.open(rollout, {}, now_ms=1)).incarnation
        for number in count():
            await store.append(StepWrite(rollout, incarnation, f"s{number}", b"1"), now_ms=2)
            acknowledged.append((rollout, f"s{number}"))
            if stopped.is_set():
                return

    calls = [asyncio.create_task(call(f"r{number}")) for number in range(8)]
    while len(acknowledged) < 100:
        await asyncio.sleep(0.01)
    primary.send("CLIENT", "PAUSE", 5000, "WRITE")
    trio[0].send("SENTINEL", "FAILOVER", "main")
    async with asyncio.timeout(60):
        while store.server_of("r") != replica.address:
            await asyncio.sleep(0.01)
    before = len(acknowledged)
    async with asyncio.timeout(60):
        while len(acknowledged) < before + 100:
            await asyncio.sleep(0.01)
    stopped.set()
    await asyncio.gather(*calls)

    assert [pair for pair in acknowledged if await store.find(*pair) is None] == []
