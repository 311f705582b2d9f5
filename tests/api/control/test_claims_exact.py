"""Claims that return exactly as many groups as requested, or none."""

import asyncio

import pytest
from tests.support.fakes import settings_for
from tests.support.session import Session, names_in

from proxy.api.control import claims
from proxy.server.listener import running
from storage.errors import StoreUnreachable


async def frozen(proxy, members):
    return [(await proxy.get(f"/rollouts/{member}")).json["claimed_by"] for member in members]


async def test_an_exact_claim_waits_until_all_its_groups_are_complete(proxy):
    """Until then it holds none of them, and their rewards can be changed."""
    members = await proxy.group("g1", 1, 0)
    (last,) = await proxy.group("g2", 1, finish=False)
    empty = await proxy.claim(groups=2, exact=True, wait_s=0.3)
    unfrozen = await frozen(proxy, members)
    waiting = asyncio.ensure_future(proxy.claim(groups=2, exact=True, wait_s=30))
    await proxy.finish(last, reward=1)

    assert tuple(empty[name] for name in ("batch_id", "groups", "lease_ms", "refused", "dropped")) == (
        None,
        [],
        None,
        [],
        [],
    )
    assert (empty["waiting"], empty["reasons"]) == ({"available": 1, "claimed": 0}, {"refused": {}, "dropped": {}})
    assert unfrozen == [None, None]
    assert names_in(await waiting) == ["g1", "g2"]


async def test_groups_that_are_refused_or_dropped_do_not_count(proxy):
    """They are named once; a group is dropped once."""
    await proxy.group("equal", 1, 1)
    await proxy.group("mixed1", 1, 0)
    _, unrewarded = await proxy.group("refused", 0, None)
    options = {"groups": 2, "exact": True, "only_mixed": True, "members": "all", "format": "scored_data"}
    first = await proxy.claim(**options)
    second = await proxy.claim(**options)
    await proxy.patch(f"/rollouts/{unrewarded}", {"reward": 1})
    third = await proxy.claim(**options)

    assert (first["groups"], first["reasons"]) == ([], {"refused": {"no_reward": 1}, "dropped": {"equal_rewards": 1}})
    assert (second["groups"], second["reasons"]) == ([], {"refused": {"no_reward": 1}, "dropped": {}})
    assert first["waiting"] == second["waiting"] == {"available": 2, "claimed": 0}
    assert names_in(third) == ["mixed1", "refused"]


async def test_a_reward_that_is_set_while_a_claim_waits_completes_it(proxy, monkeypatch):
    """The group was refused without the reward, and neither leased nor frozen for that."""
    monkeypatch.setattr(claims, "_EXAMINE_INTERVAL_S", 0.1)
    _, unrewarded = await proxy.group("g", 1, None)
    examine, examined, leased = claims._why_incomplete, asyncio.Semaphore(0), []

    async def counted(context, claim, waiting):
        reason = await examine(context, claim, waiting)
        examined.release()
        leased.append(len(claim.held))
        return reason

    monkeypatch.setattr(claims, "_why_incomplete", counted)
    waiting = asyncio.ensure_future(proxy.claim(exact=True, members="all", format="scored_data", wait_s=30))
    for _ in range(2):
        await examined.acquire()
    status = await proxy.status("g")
    patched = await proxy.patch(f"/rollouts/{unrewarded}", {"reward": 0})
    claimed = await waiting

    assert (status, set(leased)) == ("complete", {0})
    assert (patched.status, names_in(claimed), claimed["refused"]) == (200, ["g"], [])


async def test_of_competing_exact_claims_no_two_hold_a_part_of_the_groups(proxy, store):
    """Each gets all that it requests, one after the other, at two replicas."""
    for number in range(6):
        await proxy.group(f"g{number}", 1, 0)
    async with running(settings_for(None), store) as other:
        replicas = [proxy, Session(proxy.http, other.url)]

        async def consume(number):
            replica = replicas[number % 2]
            batch = await replica.claim(consumer=f"c{number}", groups=4, exact=True, wait_s=30)
            await replica.release(batch)
            return len(batch["groups"])

        assert await asyncio.gather(*map(consume, range(4))) == [4] * 4
    assert len((await proxy.claim(groups=6, exact=True))["groups"]) == 6


async def test_an_exact_claim_with_more_groups_than_exist_returns_none(proxy):
    """More than 1000 is 422."""
    await proxy.group("g", 1, 0)
    claimed = await proxy.claim(groups=1000, exact=True)
    rejected = await proxy.post("/batches/claim", {"consumer": "t", "groups": 10_000, "exact": True})

    assert (claimed["groups"], claimed["waiting"]) == ([], {"available": 1, "claimed": 0})
    assert (rejected.status, rejected.json["error"]["param"]) == (422, "groups")
    assert await proxy.status("g") == "complete"


@pytest.mark.parametrize("verb", ["read", "opened"])
async def test_after_a_failed_exact_claim_nothing_is_held_or_frozen(proxy, store, verb):
    """It fails at its second group, or at storing the batch."""
    members = [member for name in ("g1", "g2") for member in await proxy.group(name, 1, 0)]
    read, opening, reads = store.read_each, store.batches.open, []

    async def fail_at_the_second(names, limit):
        reads.append(names)
        if len(reads) == 2:
            raise StoreUnreachable("the test took the store away")
        return await read(names, limit)

    async def unreachable(*_, **__):
        raise StoreUnreachable("the test took the store away")

    if verb == "read":
        store.read_each = fail_at_the_second
    else:
        store.batches.open = unreachable
    failed = await proxy.post("/batches/claim", {"consumer": "t", "groups": 2, "exact": True})
    store.read_each, store.batches.open = read, opening

    assert failed.status == 503
    assert await frozen(proxy, members) == [None] * 4
    assert names_in(await proxy.claim(groups=2, exact=True)) == ["g1", "g2"]


async def test_an_exact_claim_that_lost_a_lease_while_rendering_has_no_batch(proxy, monkeypatch):
    """Its other groups are released."""
    members = [member for name in ("g1", "g2") for member in await proxy.group(name, 1, 0)]
    fill, taken = claims.fill, []

    async def slow(context, claim):
        await fill(context, claim)
        if claim.held and not taken:
            taken.append(claim)
            await asyncio.sleep(0.05)  # longer than its lease
            taken.append(await proxy.claim(consumer="fast", lease_s=60))

    monkeypatch.setattr(claims, "fill", slow)
    claimed = await proxy.claim(consumer="slow", groups=2, exact=True, lease_s=0.01)
    monkeypatch.setattr(claims, "fill", fill)
    (fast,) = taken[1]["groups"]

    assert tuple(claimed[name] for name in ("batch_id", "groups", "waiting")) == (
        None,
        [],
        {"available": 1, "claimed": 1},
    )
    held = [member for member, batch in zip(members, await frozen(proxy, members), strict=True) if batch is not None]
    assert fast["rollouts"] == held
    assert {"g1", "g2"} - {fast["group_id"]} == set(names_in(await proxy.claim()))


async def test_a_consumer_that_disconnects_leaves_nothing_claimed(proxy, store):
    members = await proxy.group("g1", 1, 0)
    (last,) = await proxy.group("g2", 1, finish=False)
    waiting = asyncio.ensure_future(proxy.claim(groups=2, exact=True, wait_s=30))
    assert (await proxy.get("/health")).status == 200  # by now the claim was sent, too
    waiting.cancel()
    await asyncio.wait([waiting])
    await proxy.finish(last, reward=1)

    assert names_in(await proxy.claim(groups=2, exact=True, wait_s=20)) == ["g1", "g2"]
    assert (await store.queue.counts()).claimed == 2
    assert [batch is not None for batch in await frozen(proxy, members)] == [True, True]
