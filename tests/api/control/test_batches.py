"""Batches: claim, ack, release, extend; several consumers and processes."""

import asyncio

from fakes import settings_for

from proxy.server.listener import running


async def settle(proxy, batch, verb, **body):
    return await proxy.post(f"/batches/{batch['batch_id']}/{verb}", body)


async def claim_once_available(proxy, **body):
    """Claim, and wait until a lease has expired."""
    return await proxy.claim(wait_s=20, **body)


async def test_a_claimed_group_is_claimed_by_no_other_consumer_until_it_is_released(proxy):
    """An acked group is never claimed again."""
    await proxy.group("g", 1)
    batch = await proxy.claim()
    held = await proxy.get("/groups/g")
    other = await proxy.claim(consumer="other")
    released = await settle(proxy, batch, "release")
    second = await proxy.claim(consumer="other")
    acked = await settle(proxy, second, "ack")
    third = await proxy.claim()

    assert ("claimed", "trainer", batch["batch_id"]) == tuple(
        held.json[name] for name in ("status", "consumer", "batch_id")
    )
    assert (None, []) == (other["batch_id"], other["groups"])
    assert ["g"] == released.json["released"] == acked.json["acked"]
    assert batch["batch_id"] != second["batch_id"]
    assert [] == third["groups"]
    assert "done" == await proxy.status("g")


async def test_ack_and_release_are_idempotent(proxy):
    """A retry returns the same response at any process; another operation is 409."""
    await proxy.group("g1", 1)
    await proxy.group("g2", 1)
    acked, released = await proxy.claim(), await proxy.claim()
    responses = [await settle(proxy, acked, "ack") for _ in range(2)]
    responses += [await settle(proxy, released, "release") for _ in range(2)]
    conflicts = [
        await settle(proxy, acked, "release"),
        await settle(proxy, released, "ack"),
        await settle(proxy, acked, "extend"),
    ]

    assert [200] * 4 == [response.status for response in responses]
    assert responses[0].json == responses[1].json
    assert responses[2].json == responses[3].json
    assert [409] * 3 == [response.status for response in conflicts]


async def test_a_retry_completes_an_ack_that_failed_half_way(proxy, store):
    """The store failed after the groups were marked as done."""
    await proxy.group("g", 1)
    batch = await proxy.claim()
    batches = store.batches
    update_if, batches.update_if = batches.update_if, unreachable
    first = await settle(proxy, batch, "ack")
    batches.update_if = update_if
    second = await settle(proxy, batch, "ack", delete=True)

    assert (503, 200, ["g"]) == (first.status, second.status, second.json["acked"])
    assert 404 == (await proxy.get("/groups/g")).status


async def unreachable(*_, **__):
    from storage.errors import StoreUnreachable

    raise StoreUnreachable("the test took the store away")


async def test_after_its_lease_expired_a_batch_is_claimed_by_another_consumer(proxy):
    """The first consumer's operations are then 409 with lease_lost."""
    await proxy.group("g", 1)
    late = await proxy.claim(lease_s=0.05)
    batch = await claim_once_available(proxy, consumer="next")
    responses = [await settle(proxy, late, verb) for verb in ("extend", "ack")]
    released = await settle(proxy, late, "release")

    assert ["g"] == [group["group_id"] for group in batch["groups"]]
    assert [(409, "lease_lost")] * 2 == [(response.status, response.json["error"]["type"]) for response in responses]
    assert (200, [], ["g"]) == (released.status, released.json["released"], released.json["lost"])
    assert 200 == (await settle(proxy, batch, "ack")).status


async def test_an_ack_of_a_partly_lost_batch_acks_the_remaining_groups(proxy):
    """The lost groups are listed."""
    await proxy.group("g1", 1)
    await proxy.group("g2", 1)
    late = await proxy.claim(groups=2, lease_s=0.05)
    batch = await claim_once_available(proxy, groups=1)
    acked = await settle(proxy, late, "ack")
    taken = batch["groups"][0]["group_id"]

    assert 200 == acked.status
    assert ({"g1", "g2"} - {taken}, [taken]) == (set(acked.json["acked"]), acked.json["lost"])


async def test_extend_restarts_the_lease(proxy):
    await proxy.group("g", 1)
    batch = await proxy.claim(lease_s=2)
    extended = await settle(proxy, batch, "extend", lease_s=1000)

    assert (200, ["g"]) == (extended.status, extended.json["held"])
    assert extended.json["lease_ms"] > batch["lease_ms"]
    assert [] == (await proxy.claim(wait_s=2.1))["groups"]


async def test_an_ack_with_delete_deletes_the_groups_and_their_rollouts(proxy):
    """Other rollouts remain."""
    members = await proxy.group("g", 1, 1)
    await proxy.chat("other")
    batch = await proxy.claim()
    assert 200 == (await settle(proxy, batch, "ack", delete=True)).status

    assert [404] * 3 == [(await proxy.get(path)).status for path in ("/groups/g", *(f"/rollouts/{m}" for m in members))]
    assert 200 == (await proxy.get("/rollouts/other")).status


async def test_a_claim_with_wait_s_waits_for_a_group(proxy):
    """After the time it returns no groups."""
    (member,) = await proxy.group("g", 1, finish=False)
    empty = await proxy.claim(wait_s=0.3)
    waiting = asyncio.ensure_future(proxy.claim(wait_s=30))
    await asyncio.sleep(0)
    await proxy.finish(member)

    assert (None, [], None) == (empty["batch_id"], empty["groups"], empty["lease_ms"])
    assert ["g"] == [group["group_id"] for group in (await waiting)["groups"]]


async def test_a_consumer_that_disconnects_while_it_waits_claims_nothing(proxy):
    """A group that is completed afterwards goes to the next consumer."""
    (member,) = await proxy.group("g", 1, finish=False)
    waiting = asyncio.ensure_future(proxy.claim(wait_s=30))
    assert 200 == (await proxy.get("/health")).status  # by now the claim was sent, too
    waiting.cancel()
    await asyncio.wait([waiting])
    await proxy.finish(member)

    assert ["g"] == [group["group_id"] for group in (await claim_once_available(proxy))["groups"]]


async def test_an_invalid_claim_is_rejected_and_claims_nothing(proxy):
    await proxy.group("g", 1)
    for body, status in [
        ({}, 422),
        ({"consumer": "t", "groups": 0}, 422),
        ({"consumer": "t", "lease_s": 0}, 422),
        ({"consumer": "t", "lease_s": 86_401}, 422),
        ({"consumer": "t", "wait_s": 601}, 422),
        ({"consumer": "t", "order": "random"}, 422),
        ({"consumer": "t", "colour": 1}, 422),
        ({"consumer": "t", "members": "some"}, 422),
        ({"consumer": "t", "members": None, "min_group": 0}, 422),
        ({"consumer": "t", "exact": "yes"}, 422),
        ({"consumer": "t", "row_weight": 0.5}, 422),
        ({"consumer": "t", "branches": "none"}, 422),
        ({"consumer": "t", "format": "nope"}, 400),
        ([], 400),
    ]:
        assert status == (await proxy.post("/batches/claim", body)).status, body
        assert "complete" == await proxy.status("g")


async def test_the_error_of_the_former_option_rewarded_names_members(proxy):
    rejected = await proxy.post("/batches/claim", {"consumer": "t", "rewarded": True})

    assert 422 == rejected.status
    assert "`members`" in rejected.json["error"]["message"]


async def test_an_unknown_batch_is_404(proxy):
    assert [404] * 3 == [(await proxy.post(f"/batches/none/{verb}")).status for verb in ("ack", "release", "extend")]


async def test_a_batch_can_be_acked_at_any_process(proxy, store):
    await proxy.group("g", 1)
    batch = await proxy.claim()
    async with (
        running(settings_for(None), store) as other,
        proxy.http.post(f"{other.url}/batches/{batch['batch_id']}/ack") as response,
    ):
        assert ["g"] == (await response.json())["acked"]
