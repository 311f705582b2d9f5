"""Batches: claimed, acknowledged, kept for longer, given back; by many consumers, some of which are killed."""

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack, contextmanager
from pathlib import Path

import orjson
import pytest
from fakes import settings_for

from proxy.server.listener import running

CONSUMER = Path(__file__).parent.parent.parent / "support" / "consumer.py"


async def settle(proxy, batch, verb, **said):
    return await proxy.post(f"/batches/{batch['batch_id']}/{verb}", said)


async def claimed_again(proxy, **said):
    """Claims until something is claimed: leases run out in their own time."""
    return await proxy.claim(wait_s=20, **said)


async def test_nobody_else_gets_what_is_held(proxy):
    """Until it is given back; what is done is never given again."""
    await proxy.group("g", 1)
    batch = await proxy.claim()
    held = await proxy.get("/groups/g")
    other = await proxy.claim(consumer="other")
    released = await settle(proxy, batch, "release")
    again = await proxy.claim(consumer="other")
    acked = await settle(proxy, again, "ack")
    never = await proxy.claim()

    assert ("claimed", "trainer", batch["batch_id"]) == tuple(
        held.json[name] for name in ("status", "consumer", "batch_id")
    )
    assert (None, []) == (other["batch_id"], other["groups"])
    assert ["g"] == released.json["released"] == acked.json["acked"]
    assert batch["batch_id"] != again["batch_id"]
    assert [] == never["groups"]
    assert "done" == await proxy.status("g")


async def test_settling_again_is_the_same_answer(proxy):
    """Through whichever process: whoever lost the answer asks again. Another ending is 409."""
    await proxy.group("g1", 1)
    await proxy.group("g2", 1)
    acked, released = await proxy.claim(), await proxy.claim()
    answers = [await settle(proxy, acked, "ack") for _ in range(2)]
    answers += [await settle(proxy, released, "release") for _ in range(2)]
    others = [
        await settle(proxy, acked, "release"),
        await settle(proxy, released, "ack"),
        await settle(proxy, acked, "extend"),
    ]

    assert [200] * 4 == [response.status for response in answers]
    assert answers[0].json == answers[1].json
    assert answers[2].json == answers[3].json
    assert [409] * 3 == [response.status for response in others]


async def test_an_acknowledgement_whose_end_was_lost_is_made_good(proxy, store):
    """The store failed after the groups were done: asked again, it answers that they are."""
    await proxy.group("g", 1)
    batch = await proxy.claim()
    batches = store.batches
    amend, batches.update_if = batches.update_if, failing
    first = await settle(proxy, batch, "ack")
    batches.update_if = amend
    again = await settle(proxy, batch, "ack", delete=True)

    assert (503, 200, ["g"]) == (first.status, again.status, again.json["acked"])
    assert 404 == (await proxy.get("/groups/g")).status


async def failing(*_, **__):
    from storage.errors import StoreUnreachable

    raise StoreUnreachable("the test took the store away")


async def test_a_lease_that_runs_out_gives_the_groups_to_the_next(proxy):
    """And whoever held them learns of it when settling."""
    await proxy.group("g", 1)
    late = await proxy.claim(lease_s=0.05)
    batch = await claimed_again(proxy, consumer="next")
    answers = [await settle(proxy, late, verb) for verb in ("extend", "ack")]
    released = await settle(proxy, late, "release")

    assert ["g"] == [group["group_id"] for group in batch["groups"]]
    assert [(409, "lease_lost")] * 2 == [(response.status, response.json["error"]["type"]) for response in answers]
    assert (200, [], ["g"]) == (released.status, released.json["released"], released.json["lost"])
    assert 200 == (await settle(proxy, batch, "ack")).status


async def test_a_batch_may_be_lost_in_part(proxy):
    """What is still held is done; what is not is named."""
    await proxy.group("g1", 1)
    await proxy.group("g2", 1)
    late = await proxy.claim(groups=2, lease_s=0.05)
    batch = await claimed_again(proxy, groups=1)
    acked = await settle(proxy, late, "ack")
    taken = batch["groups"][0]["group_id"]

    assert 200 == acked.status
    assert ({"g1", "g2"} - {taken}, [taken]) == (set(acked.json["acked"]), acked.json["lost"])


async def test_a_lease_is_extended(proxy):
    """It counts from then on."""
    await proxy.group("g", 1)
    batch = await proxy.claim(lease_s=2)
    extended = await settle(proxy, batch, "extend", lease_s=1000)

    assert (200, ["g"]) == (extended.status, extended.json["held"])
    assert extended.json["lease_ms"] > batch["lease_ms"]
    assert [] == (await proxy.claim(wait_s=2.1))["groups"]


async def test_an_acknowledgement_may_delete(proxy):
    """The groups and their rollouts, and nothing else."""
    members = await proxy.group("g", 1, 1)
    await proxy.chat("other")
    batch = await proxy.claim()
    assert 200 == (await settle(proxy, batch, "ack", delete=True)).status

    assert [404] * 3 == [(await proxy.get(path)).status for path in ("/groups/g", *(f"/rollouts/{m}" for m in members))]
    assert 200 == (await proxy.get("/rollouts/other")).status


async def test_a_claim_waits_for_the_first_group(proxy):
    """And answers with nothing when the time is over."""
    (member,) = await proxy.group("g", 1, finish=False)
    nothing = await proxy.claim(wait_s=0.3)
    waiting = asyncio.ensure_future(proxy.claim(wait_s=30))
    await asyncio.sleep(0)
    await proxy.finish(member)

    assert (None, [], None) == (nothing["batch_id"], nothing["groups"], nothing["lease_ms"])
    assert ["g"] == [group["group_id"] for group in (await waiting)["groups"]]


async def test_a_consumer_that_leaves_while_it_waits_holds_nothing(proxy):
    """The group that completes then is the next one's."""
    (member,) = await proxy.group("g", 1, finish=False)
    waiting = asyncio.ensure_future(proxy.claim(wait_s=30))
    assert 200 == (await proxy.get("/health")).status  # by now the claim was sent, too
    waiting.cancel()
    await asyncio.wait([waiting])
    await proxy.finish(member)

    assert ["g"] == [group["group_id"] for group in (await claimed_again(proxy))["groups"]]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 422),
        ({"consumer": "t", "groups": 0}, 422),
        ({"consumer": "t", "lease_s": 0}, 422),
        ({"consumer": "t", "lease_s": 86_401}, 422),
        ({"consumer": "t", "wait_s": 601}, 422),
        ({"consumer": "t", "order": "random"}, 422),
        ({"consumer": "t", "colour": 1}, 422),
        ({"consumer": "t", "format": "nope"}, 400),
        ([], 400),
    ],
)
async def test_a_claim_that_cannot_be_is_refused(proxy, body, status):
    """And holds nothing."""
    await proxy.group("g", 1)

    assert status == (await proxy.post("/batches/claim", body)).status
    assert "complete" == await proxy.status("g")


async def test_a_batch_that_is_not_there_is_404(proxy):
    """Whatever is to be done with it."""
    assert [404] * 3 == [(await proxy.post(f"/batches/none/{verb}")).status for verb in ("ack", "release", "extend")]


async def test_a_batch_is_settled_at_any_process_that_shares_the_store(proxy, store):
    """Claimed at one, acknowledged at another."""
    await proxy.group("g", 1)
    batch = await proxy.claim()
    async with (
        running(settings_for(None), store) as other,
        proxy.http.post(f"{other.url}/batches/{batch['batch_id']}/ack") as response,
    ):
        assert ["g"] == (await response.json())["acked"]


@contextmanager
def serving(server, prefix):
    """A proxy in a process of its own."""
    words = [sys.executable, "-m", "proxy", "serve", "--listen", "127.0.0.1:0", "--store", f"unix:{server.socket}"]
    environment = {**os.environ, "TOKENTAPE_STORE__PREFIX": prefix}
    process = started(words, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        said = ""
        while not (found := re.search(r"listening (http://\S+)", said)):
            said += process.stderr.readline()
            assert process.poll() is None, said
        yield process, found[1]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


async def test_with_consumers_and_a_proxy_killed_no_group_is_lost_and_none_is_held_twice(
    proxy, store, server, tmp_path
):
    """Consumers in processes of their own over two proxies; some are killed amid their work, and one proxy."""
    groups = {f"g{number}" for number in range(24)}
    for name in groups:
        await proxy.group(name, 1, 0)
    log = tmp_path / "log"
    log.touch()
    chance = random.Random(7)
    with ExitStack() as stack:
        (dying, first), (_, second) = (stack.enter_context(serving(server, store._store._prefix)) for _ in range(2))
        consumers = []
        stack.callback(lambda: [consumer.kill() or consumer.wait() for consumer in consumers])
        while len(done := await names_done(proxy)) < len(groups):
            while len([consumer for consumer in consumers if consumer.poll() is None]) < 4:
                urls = [first, second] if len(consumers) % 2 else [second, first]
                consumers.append(started([sys.executable, "-I", str(CONSUMER), str(log), *urls]))
            await asyncio.sleep(0.1)
            if len(consumers) < 16:
                chance.choice(consumers).send_signal(signal.SIGKILL)
            if len(done) > 8:
                dying.kill()

    holds, acked = events(log, "claimed"), Counter(group for _, group in events(log, "acked"))
    assert groups == done
    assert {1} == set(acked.values())
    assert len(holds) > len(groups)  # some were held by consumers that died, and given to others
    ends = {}
    for at, batch, group, until in sorted(holds):
        assert ends.get(group, 0) <= at, f"{group} was given to {batch} while somebody else held it"
        ends[group] = until


def started(words, **named):
    return subprocess.Popen(words, **named)


async def names_done(proxy):
    listed = (await proxy.get("/groups?status=done")).json
    return {group["group_id"] for group in listed["groups"]}


def events(log, kind):
    """What consumers wrote down, each in one line."""
    lines = [orjson.loads(line) for line in log.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    return [line[1:] for line in lines if line[0] == kind]
