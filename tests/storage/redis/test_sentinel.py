"""A store on a primary that sentinels monitor: discovery, failovers, and bad input."""

import asyncio
import os
import signal

import pytest

from storage.errors import StorageError, StoreUnreachable
from storage.types import StepWrite


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
    assert ("r",) == (await other.list()).names


async def test_a_requested_failover_is_followed(sentinels, opened, until):
    """The old primary still runs and accepts writes for seconds; no write goes there once the replica was promoted."""
    _, replica, trio = sentinels
    store = await opened(url_of(trio))
    await appended(store, "s0")
    trio[0].send("SENTINEL", "FAILOVER", "main")

    async def is_followed():
        return store.server_of("r") == replica.address

    await until(is_followed)

    assert 1 == await appended(store, "s1")
    assert await is_primary(replica)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_call_waits_for_the_failover(sentinels, opened, fault):
    """A primary that is killed or frozen is replaced within the timeout of the call; so no call fails."""
    primary, replica, trio = sentinels
    store = await opened(url_of(trio), timeout_s=30)
    await appended(store, "s0")
    os.kill(primary.process.pid, fault)

    assert 1 == await appended(store, "s1")
    assert replica.address == store.server_of("r")
    os.kill(primary.process.pid, signal.SIGCONT) if fault == signal.SIGSTOP else None


async def test_sentinels_have_their_own_password(sentinels, start, sentinel_kind, opened):
    """It is store.sentinel_password."""
    primary, _, _ = sentinels
    settings = (f"sentinel monitor main 127.0.0.1 {primary.port} 1", "requirepass word")
    trio = [start(*settings, kind=sentinel_kind, password="word")]

    assert 0 == await appended(await opened(url_of(trio), sentinel_password="word"), "s")
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
