"""Batches of the blocking client, which has its heartbeat in a thread; test_batches tests what both clients do."""

import asyncio
import threading
from contextlib import closing, suppress

import pytest
from tests.support.batching import BatchServer, group, refused

from tokentape import Client, ClientError


@pytest.fixture
def batch_server(engine):
    return BatchServer(engine)


@pytest.fixture
def in_thread(engine):
    """Run a function with a blocking client in a thread."""

    async def run(work):
        def with_client():
            with Client(engine.url, attempts=1) as client:
                return work(client)

        return await asyncio.to_thread(with_client)

    return run


def heartbeats():
    return [thread for thread in threading.enumerate() if thread.name == "tokentape-heartbeat"]


async def test_a_batch_is_acknowledged_when_the_loop_continues(in_thread, batch_server):
    batch_server.ready = [[group("g1"), group("g2")], [group("g3")]]

    def work(client):
        batches = client.batches(consumer="c", groups=2, format="trl", wait_s=0, lease_s=30)
        return [(batch.batch_id, batch.groups, batch_server.ended()) for batch in batches]

    assert [("b1", [group("g1"), group("g2")], []), ("b2", [group("g3")], ["ack b1"])] == await in_thread(work)
    assert batch_server.ended() == ["ack b1", "ack b2"]


async def test_the_lease_is_extended_by_a_thread_while_the_body_blocks(in_thread, batch_server):
    """The thread ends with the batch."""
    batch_server.ready = [[group("g1")]]
    extended = threading.Event()
    respond = batch_server.extended.set

    def set_both():
        respond()
        extended.set()

    batch_server.extended.set = set_both

    def work(client):
        for batch in client.batches(consumer="c", groups=1, wait_s=0, lease_s=0.03):
            assert extended.wait(10)
            assert len(heartbeats()) == 1
            assert not batch.is_lost
        return heartbeats()

    assert await in_thread(work) == []
    assert ("extend", "b1", {"lease_s": 0.03}) in batch_server.requests
    assert batch_server.ended() == ["ack b1"]


async def test_a_lost_lease_sets_is_lost_and_raises_at_the_end_of_the_body(in_thread, batch_server):
    batch_server.ready, batch_server.lost = [[group("g1")]], {"b1"}

    def work(client):
        for batch in client.batches(consumer="c", groups=1, wait_s=0, lease_s=0.03):
            while not batch.is_lost:
                for thread in heartbeats():
                    thread.join(0.01)

    with pytest.raises(ClientError, match="409 lease_lost"):
        await in_thread(work)
    assert sum(request[0] == "extend" for request in batch_server.requests) == 1


@pytest.mark.parametrize("end", ["break", "raise", "close"])
async def test_a_loop_that_is_left_releases_the_batch(in_thread, batch_server, end):
    """By a `break`, or when the generator is closed, as `contextlib.closing` does after an exception."""
    batch_server.ready = [[group("g1")]]

    def work(client):
        batches = client.batches(consumer="c", groups=1, wait_s=0)
        if end == "close":
            next(batches)
            batches.close()
        elif end == "break":
            for _ in client.batches(consumer="c", groups=1, wait_s=0):
                break
        else:
            with suppress(ZeroDivisionError), closing(batches):
                for _ in batches:
                    raise ZeroDivisionError

    await in_thread(work)

    assert batch_server.ended() == ["release b1"]
    assert heartbeats() == []


async def test_a_claim_in_which_every_group_is_refused_raises(in_thread, batch_server):
    batch_server.refused = [refused("g1", "forked")]

    with pytest.raises(ClientError, match=r"All 1 complete groups are refused: forked \(1\)"):
        await in_thread(lambda client: next(client.batches(consumer="c", groups=1, wait_s=0)))


async def test_a_forked_group_is_reported_and_claimed_with_branches_longest(in_thread, engine, url):
    """Before a real proxy."""

    def work(_):
        with Client(url) as client:
            opened = client.open_group(1)["rollouts"][0]["rollout_id"]
            for text in ("one", "two"):
                body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 4}
                client._api.transport._http.post(
                    f"/rollouts/{opened}/v1/chat/completions", json=body
                ).raise_for_status()
            client.finish_rollout(opened, reward=1.0)
            options = {"consumer": "c", "groups": 1, "format": "trl", "wait_s": 0}
            with pytest.raises(ClientError, match="branches=longest"):
                next(client.batches(**options))
            return [batch.groups[0]["skipped"] for batch in client.batches(**options, branches="longest")]

    (((skipped,)),) = await in_thread(work)

    assert skipped["dropped_tokens"] > 0


async def test_each_claim_has_the_policy_of_the_batches(in_thread, batch_server):
    batch_server.ready = [[group("g1")]]

    def work(client):
        client.claim_batch(consumer="c", groups=1, policy="coder", wait_s=0)
        return list(client.batches(consumer="c", groups=1, policy="planner", wait_s=0))

    assert await in_thread(work) == []
    assert [request[1]["policy"] for request in batch_server.requests if request[0] == "claim"] == ["coder", "planner"]
