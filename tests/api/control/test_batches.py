"""Batches: claim, ack, release, extend; several consumers and processes."""

import asyncio

import pytest
from tests.support.fakes import settings_for
from tests.support.session import names_in

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
    assert (other["batch_id"], other["groups"]) == (None, [])
    assert released.json["released"] == acked.json["acked"] == ["g"]
    assert batch["batch_id"] != second["batch_id"]
    assert third["groups"] == []
    assert await proxy.status("g") == "done"


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

    assert [response.status for response in responses] == [200] * 4
    assert responses[0].json == responses[1].json
    assert responses[2].json == responses[3].json
    assert [response.status for response in conflicts] == [409] * 3


async def test_a_retry_completes_an_ack_that_failed_half_way(proxy, store):
    """The store failed after the groups were marked as done."""
    await proxy.group("g", 1)
    batch = await proxy.claim()
    batches = store.batches
    update_if, batches.update_if = batches.update_if, unreachable
    first = await settle(proxy, batch, "ack")
    batches.update_if = update_if
    second = await settle(proxy, batch, "ack", delete=True)

    assert (first.status, second.status, second.json["acked"]) == (503, 200, ["g"])
    assert (await proxy.get("/groups/g")).status == 404


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

    assert names_in(batch) == ["g"]
    assert [(response.status, response.json["error"]["type"]) for response in responses] == [(409, "lease_lost")] * 2
    assert (released.status, released.json["released"], released.json["lost"]) == (200, [], ["g"])
    assert (await settle(proxy, batch, "ack")).status == 200


async def test_an_ack_of_a_partly_lost_batch_acks_the_remaining_groups(proxy):
    """The lost groups are listed."""
    await proxy.group("g1", 1)
    await proxy.group("g2", 1)
    late = await proxy.claim(groups=2, lease_s=0.05)
    batch = await claim_once_available(proxy, groups=1)
    acked = await settle(proxy, late, "ack")
    taken = batch["groups"][0]["group_id"]

    assert acked.status == 200
    assert (set(acked.json["acked"]), acked.json["lost"]) == ({"g1", "g2"} - {taken}, [taken])


async def test_extend_restarts_the_lease(proxy):
    await proxy.group("g", 1)
    batch = await proxy.claim(lease_s=60)
    extended = await settle(proxy, batch, "extend", lease_s=1000)
    shortened = await settle(proxy, batch, "extend", lease_s=0.01)

    assert (extended.status, extended.json["held"]) == (200, ["g"])
    assert extended.json["lease_ms"] > batch["lease_ms"] > shortened.json["lease_ms"]
    assert names_in(await proxy.claim(wait_s=50)) == ["g"]


async def test_an_ack_with_delete_deletes_the_groups_and_their_rollouts(proxy):
    """Other rollouts remain."""
    members = await proxy.group("g", 1, 1)
    await proxy.chat("other")
    batch = await proxy.claim()
    assert (await settle(proxy, batch, "ack", delete=True)).status == 200

    assert [(await proxy.get(path)).status for path in ("/groups/g", *(f"/rollouts/{m}" for m in members))] == [404] * 3
    assert (await proxy.get("/rollouts/other")).status == 200


async def test_a_claim_with_wait_s_waits_for_a_group(proxy):
    """After the time it returns no groups."""
    (member,) = await proxy.group("g", 1, finish=False)
    empty = await proxy.claim(wait_s=0.3)
    waiting = asyncio.ensure_future(proxy.claim(wait_s=30))
    await asyncio.sleep(0)
    await proxy.finish(member, reward=1)

    assert (empty["batch_id"], empty["groups"], empty["lease_ms"]) == (None, [], None)
    assert names_in(await waiting) == ["g"]


async def test_a_consumer_that_disconnects_while_it_waits_claims_nothing(proxy):
    """A group that is completed afterwards goes to the next consumer."""
    (member,) = await proxy.group("g", 1, finish=False)
    waiting = asyncio.ensure_future(proxy.claim(wait_s=30))
    assert (await proxy.get("/health")).status == 200  # by now the claim was sent, too
    waiting.cancel()
    await asyncio.wait([waiting])
    await proxy.finish(member, reward=1)

    assert names_in(await claim_once_available(proxy)) == ["g"]


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
        ({"consumer": "t", "instance": ""}, 422),
        ({"consumer": "t", "instance": 1}, 422),
        ({"consumer": "t", "heartbeat_s": 0}, 422),
        ({"consumer": "t", "members": "some"}, 422),
        ({"consumer": "t", "members": None, "min_group": 0}, 422),
        ({"consumer": "t", "exact": "yes"}, 422),
        ({"consumer": "t", "row_weight": 0.5}, 422),
        ({"consumer": "t", "branches": "none"}, 422),
        ({"consumer": "t", "format": "nope"}, 400),
        ([], 400),
    ]:
        assert status == (await proxy.post("/batches/claim", body)).status, body
        assert await proxy.status("g") == "complete"


async def test_an_unknown_batch_is_404(proxy):
    assert [(await proxy.post(f"/batches/none/{verb}")).status for verb in ("ack", "release", "extend")] == [404] * 3


async def test_a_batch_can_be_acked_at_any_process(proxy, store):
    await proxy.group("g", 1)
    batch = await proxy.claim()
    async with (
        running(settings_for(None), store) as other,
        proxy.http.post(f"{other.url}/batches/{batch['batch_id']}/ack") as response,
    ):
        assert (await response.json())["acked"] == ["g"]


async def test_a_group_has_the_number_of_its_delivery_and_the_consumer_of_the_one_before(proxy):
    """After an expired lease and after a release; a claim that refuses it does not count."""
    await proxy.group("g", 1)
    batches = [await proxy.claim(lease_s=0.05)]
    batches.append(await claim_once_available(proxy, consumer="second"))
    await settle(proxy, batches[-1], "release")
    refused = await proxy.claim(consumer="third", format="prime_rl", advantage="none")  # it requires an advantage
    batches.append(await proxy.claim(consumer="fourth"))

    assert refused["groups"] == []
    assert [delivered(group) for batch in batches for group in batch["groups"]] == [
        ("g", 1, None),
        ("g", 2, "trainer"),
        ("g", 3, "second"),
    ]


async def test_a_claim_that_fails_is_no_delivery(proxy, store):
    """Its groups are released as they were before."""
    await proxy.group("g", 1)
    await settle(proxy, await proxy.claim(), "release")
    batches = store.batches
    open_batch, batches.open = batches.open, unreachable
    failed = await proxy.post("/batches/claim", {"consumer": "failed"})
    batches.open = open_batch
    batch = await proxy.claim(consumer="next")

    assert failed.status == 503
    assert [delivered(group) for group in batch["groups"]] == [("g", 2, "trainer")]


async def test_a_redelivered_group_counts_in_its_metric(proxy):
    """Once for each batch after the first one."""
    await proxy.group("g", 1)
    for _ in range(3):
        await settle(proxy, await proxy.claim(), "release")

    metrics = (await proxy.get("/metrics")).text
    assert 'tokentape_redelivered_groups_total{policy="default"} 2.0' in metrics.decode()


async def test_a_new_instance_takes_over_the_batches_of_one_that_missed_its_heartbeat(proxy, store):
    """At any process and long before the lease ends; all requests of the earlier instance are then 409."""
    await proxy.group("g1", 1)
    await proxy.group("g2", 1)
    early = await proxy.claim(groups=2, instance="a", heartbeat_s=0.05, lease_s=600)
    async with (
        running(settings_for(None), store) as other,
        proxy.http.post(
            f"{other.url}/batches/claim", json={"consumer": "trainer", "groups": 1, "instance": "b", "wait_s": 20}
        ) as response,
    ):
        batch = await response.json()
    responses = [await settle(proxy, early, verb) for verb in ("extend", "ack", "release")]
    rest = await proxy.claim(consumer="other")

    assert [delivered(group) for group in batch["groups"]] == [("g1", 2, "trainer")]
    assert [delivered(group) for group in rest["groups"]] == [("g2", 2, "trainer")]
    assert [(response.status, response.json["error"]["code"]) for response in responses] == [(409, "lease_lost")] * 3
    assert "another instance of consumer 'trainer' claims its groups" in responses[0].json["error"]["message"]
    assert "no heartbeat for 0.1 s" in responses[0].json["error"]["message"]
    assert (await settle(proxy, batch, "ack")).status == 200


def delivered(group):
    return group["group_id"], group["delivery"], group["previous_consumer"]


async def test_instances_that_send_their_heartbeats_keep_their_batches(proxy):
    """Also if they have the same name by mistake; nor is a batch taken over by its own instance."""
    await proxy.group("g1", 1)
    await proxy.group("g2", 1)
    first = await proxy.claim(instance="a", heartbeat_s=3600)
    second = await proxy.claim(instance="b", heartbeat_s=0.01)
    await proxy.claim(instance="b", wait_s=0.3)
    third = await proxy.claim(instance="c", heartbeat_s=3600, wait_s=20)

    assert names_in(third) == ["g2"]
    assert (await settle(proxy, second, "extend")).status == 409
    assert [(await settle(proxy, batch, "ack")).status for batch in (first, third)] == [200, 200]


@pytest.mark.parametrize(
    ("early", "late"),
    [
        ({}, {"instance": "b"}),
        ({"instance": "a"}, {"instance": "b"}),
        ({"heartbeat_s": 0.01}, {"instance": "b"}),
        ({"instance": "a", "heartbeat_s": 0.01}, {}),
        ({"instance": "a", "heartbeat_s": 0.01}, {"instance": "b", "consumer": "other"}),
    ],
)
async def test_a_batch_is_taken_over_within_its_consumer_and_with_its_heartbeat_only(proxy, early, late):
    """Others have their leases as without instances."""
    await proxy.group("g", 1)
    batch = await proxy.claim(**early)
    assert (await proxy.claim(wait_s=0.3, **late))["groups"] == []

    assert (await settle(proxy, batch, "ack")).status == 200


async def test_a_batch_that_extends_its_lease_while_it_is_taken_over_keeps_its_groups(proxy, store):
    """The first group decides: its release fails if the lease was extended meanwhile."""
    await proxy.group("g", 1)
    batch = await proxy.claim(instance="a", heartbeat_s=0.01)
    queue = store.queue
    read, release = queue.read, queue.release

    async def outdated(*arguments, consumer, **options):
        state = await read(*arguments, **options)
        return state if consumer is None else state._replace(overdue=[batch["batch_id"]])

    queue.read = outdated

    async def after_an_extension(*arguments, **options):
        extended.append((await settle(proxy, batch, "extend")).status)
        return await release(*arguments, **{**options, "silent_ms": 3_600_000})

    extended, queue.release = [], after_an_extension
    late = await proxy.claim(instance="b")
    queue.release, queue.read = release, read

    assert (late["groups"], extended[0]) == ([], 200)
    assert (await settle(proxy, batch, "ack")).status == 200
