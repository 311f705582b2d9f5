"""Batches are extended while the trainer works, acknowledged at the end of the body, and released otherwise."""

import asyncio
from contextlib import aclosing
from itertools import count

import pytest
from aiohttp import web
from tests.support.batching import BatchServer, group, refused

from proxy import errors
from tokentape import AsyncClient, ClientError
from tokentape.batches import GROUPS_REFUSED, LEASE_LOST, MAX_WAIT_S, Stall, what_batches_wait_for


@pytest.fixture
def server(engine):
    return BatchServer(engine)


@pytest.fixture
async def client(engine):
    async with AsyncClient(engine.url, attempts=1) as client:
        yield client


async def test_a_batch_is_acknowledged_when_the_loop_continues(client, server):
    """One batch after the other, until no group is available for `wait_s`."""
    server.ready = [[group("g1"), group("g2")], [group("g3")]]
    batches = client.batches(consumer="c", groups=2, format="trl", wait_s=0, lease_s=30, order="oldest")
    seen = [(batch.batch_id, batch.groups, server.ended()) async for batch in batches]

    assert [("b1", [group("g1"), group("g2")], []), ("b2", [group("g3")], ["ack b1"])] == seen
    assert server.ended() == ["ack b1", "ack b2"]
    claims = [request[1] for request in server.requests if request[0] == "claim"]
    assert len({claim.pop("instance") for claim in claims}) == 1
    assert claims[0] == {
        "consumer": "c", "groups": 2, "wait_s": 0, "lease_s": 30, "heartbeat_s": 10, "format": "trl", "order": "oldest",
    }  # fmt: skip


async def test_each_claim_has_the_policy_of_the_batches(client, server):
    server.ready = [[group("g1")]]
    await client.claim_batch(consumer="c", groups=1, policy="coder", wait_s=0)
    seen = [batch async for batch in client.batches(consumer="c", groups=1, policy="planner", wait_s=0)]

    assert seen == []
    assert [request[1]["policy"] for request in server.requests if request[0] == "claim"] == ["coder", "planner"]


@pytest.mark.parametrize("lost", [set(), {"b1"}])
async def test_a_batch_is_released_when_the_body_raises(client, server, lost):
    """The exception of the body propagates, also if the release fails: it explains the second one."""
    server.ready, server.lost = [[group("g1")]], lost
    with pytest.raises(ZeroDivisionError):
        async with aclosing(client.batches(consumer="c", groups=1, wait_s=0)) as batches:
            async for _ in batches:
                1 / 0  # noqa: B018

    assert server.ended() == ["release b1"]


@pytest.mark.parametrize(("acknowledged", "ended"), [(True, ["ack b1"]), (False, ["release b1"])])
async def test_a_break_releases_a_batch_that_is_not_acknowledged(client, server, acknowledged, ended):
    """A batch is acknowledged or released once."""
    server.ready = [[group("g1")]]
    async with aclosing(client.batches(consumer="c", groups=1, wait_s=0)) as batches:
        async for batch in batches:
            if acknowledged:
                await batch.ack(delete=True)
            break

    assert ended == server.ended()
    assert acknowledged == (("ack", "b1", {"delete": True}) in server.requests)


async def test_a_batch_that_the_body_releases_is_not_acknowledged(client, server):
    """The next batch is."""
    server.ready = [[group("g1")], [group("g2")]]
    async for batch in client.batches(consumer="c", groups=1, wait_s=0):
        if batch.groups[0]["group_id"] == "g1":
            await batch.release()

    assert server.ended() == ["release b1", "ack b2"]


async def test_the_lease_is_extended_while_the_body_runs(client, server):
    """Three times per lease, by the whole lease; the heartbeat ends with the batch."""
    server.ready = [[group("g1")]]
    async for batch in client.batches(consumer="c", groups=1, wait_s=0, lease_s=0.03):
        await server.extended.wait()
        assert not batch.is_lost

    assert ("extend", "b1", {"lease_s": 0.03}) in server.requests
    assert [task for task in asyncio.all_tasks() if task.get_coro().__qualname__ == "TaskHeartbeat._run"] == []
    assert [request[0] for request in server.requests if request[0] != "claim"][-1] == "ack"


async def test_a_lost_lease_sets_is_lost_and_raises_at_the_end_of_the_body(client, server):
    """The heartbeat stops, because another consumer can claim the groups."""
    server.ready, server.lost = [[group("g1")]], {"b1"}
    with pytest.raises(ClientError, match="409 lease_lost"):
        async for batch in client.batches(consumer="c", groups=1, wait_s=0, lease_s=0.03):
            await server.extended.wait()
            while not batch.is_lost:  # the response is on its way
                await asyncio.sleep(0)

    assert sum(request[0] == "extend" for request in server.requests) == 1


async def test_the_error_of_a_partly_lost_batch_names_the_lost_groups(client, server):
    """The other groups of the batch are acknowledged."""
    server.ready, server.partly_lost = [[group("g1"), group("g2")]], ["g2"]
    with pytest.raises(ClientError, match="another consumer claimed g2") as caught:
        async for batch in client.batches(consumer="c", groups=2, wait_s=0, lease_s=0.03):
            await server.extended.wait()
            while not batch.is_lost:  # the response is on its way
                await asyncio.sleep(0)

    assert (caught.value.status, caught.value.code) == (409, "lease_lost")
    assert server.ended() == ["ack b1"]


async def test_a_lost_lease_raises_at_the_next_step_of_the_body(client, server, caplog):
    """`check` and `groups` raise before anything is trained, without a request; the batch is not acknowledged."""
    server.ready, server.partly_lost = [[group("g1"), group("g2")]], ["g2"]
    async with aclosing(client.batches(consumer="c", groups=2, wait_s=0, lease_s=0.03)) as batches:
        batch = await anext(batches)
        batch.check()
        await server.extended.wait()
        while not batch.is_lost:  # the response is on its way
            await asyncio.sleep(0)
        sent = len(server.requests)
        for step in (batch.check, lambda: batch.groups):
            with pytest.raises(ClientError, match="another consumer claimed g2") as caught:
                step()
            assert (caught.value.status, caught.value.code) == (409, "lease_lost")
        assert sent == len(server.requests)

    assert server.ended() == ["release b1"]
    assert [batch.batch_id in record.message for record in caplog.records if "is lost" in record.message] == [True]


async def test_a_lease_that_cannot_be_extended_for_its_whole_time_is_lost(client, server, engine):
    """Another consumer may have claimed its groups; the acknowledgement asks the server."""
    server.ready = [[group("g1")]]

    async def respond(request, body):
        if request.path.endswith("/extend"):
            return web.json_response({"error": {"message": "no store", "type": "t", "code": "c"}}, status=503)
        return await server.respond(request, body)

    engine.respond = respond
    async for batch in client.batches(consumer="c", groups=1, wait_s=0, lease_s=0.03):
        while not batch.is_lost:
            await asyncio.sleep(0)
        with pytest.raises(ClientError, match="no store"):
            batch.check()

    assert server.ended() == ["ack b1"]


@pytest.mark.parametrize(("lease_s", "heartbeat_s"), [(30, 10), (60, 20), (600, 20)])
async def test_a_claim_has_the_interval_of_its_heartbeat(client, server, lease_s, heartbeat_s):
    """A third of the lease, and 20 s at most, so that a trainer that is started again need not wait for a long lease."""
    async for _ in client.batches(consumer="c", groups=1, wait_s=0, lease_s=lease_s):
        pass

    assert heartbeat_s == server.requests[0][1]["heartbeat_s"]


def test_a_partly_lost_batch_has_the_error_code_of_the_proxy():
    """The client raises it for a response with status 200, the proxy for a batch that is lost as a whole."""
    assert errors.LeaseLost.code == LEASE_LOST


async def test_a_heartbeat_that_fails_once_does_not_lose_the_lease(client, server, engine, monkeypatch):
    """503 is not a lost lease."""
    monkeypatch.setattr("tokentape.batches.HEARTBEATS_PER_LEASE", 3000)
    server.ready = [[group("g1")]]
    unavailable = [True]

    async def respond(request, body):
        if request.path.endswith("/extend") and unavailable:
            unavailable.clear()
            return web.json_response({}, status=503)
        return await server.respond(request, body)

    engine.respond = respond
    async for batch in client.batches(consumer="c", groups=1, wait_s=0, lease_s=30):
        await server.extended.wait()
        assert not batch.is_lost

    assert server.ended() == ["ack b1"]


async def test_without_wait_s_the_loop_polls_until_a_group_is_available(client, server):
    """One long poll after the other."""
    server.arrived.set()  # each poll returns immediately, without groups

    async def first():
        async with aclosing(client.batches(consumer="c", groups=1)) as batches:
            return (await anext(batches)).batch_id

    waiting = asyncio.create_task(first())
    while len(server.requests) < 3:
        await asyncio.sleep(0)
    server.ready = [[group("g1")]]

    assert (await waiting).startswith("b")


async def test_each_reason_why_groups_are_refused_or_dropped_is_logged_once(client, server, caplog):
    """Reasons that differ only in rollout ids and numbers are one reason."""
    server.ready = [[group("g1")], [group("g2")]]
    server.refused = [
        {"group_id": f"g{number}", "why": f"trl requires one sequence, and rollout 'r{number}' has {number}"}
        for number in (8, 9)
    ]
    server.dropped = [{"group_id": "g7", "why": "all its 4 rollouts have the same reward"}]
    async for _ in client.batches(consumer="c", groups=1, wait_s=0):
        pass

    assert [record.message for record in caplog.records if record.name == "tokentape.client"] == [
        "group g8 is refused: trl requires one sequence, and rollout 'r8' has 8",
        "group g7 is dropped: all its 4 rollouts have the same reward",
    ]


async def test_each_warning_of_claims_is_logged_once(client, server, caplog):
    """Warnings that differ only in numbers are one warning."""
    server.ready = [[group("g1")], [group("g2")]]
    server.warnings = [
        {
            "code": "raw_temperature",
            "tokens": 3,
            "of": 9,
            "why": f"sampled at temperature 0.{number}",
            "fix": "set 1",
        }
        for number in (7, 8)
    ]
    async for _ in client.batches(consumer="c", groups=1, wait_s=0):
        pass

    assert [record.message for record in caplog.records if record.name == "tokentape.client"] == [
        "3 of 9 trained tokens have wrong importance ratios (raw_temperature): sampled at temperature 0.7. To fix it: set 1"
    ]


@pytest.mark.parametrize("code", ["forked", "format"])
async def test_a_claim_in_which_the_format_refuses_every_group_raises_at_once(client, server, caplog, code):
    """The reasons are logged before; the message has each reason, its count, and an example."""
    server.refused = [refused("g1", code), refused("g2", code)]
    server.long_polls = False
    with pytest.raises(
        ClientError, match=rf"All 2 complete groups are refused: {code} \(2\)\. Group 'g1': it is"
    ) as caught:
        async for _ in client.batches(consumer="c", groups=1):
            pass

    assert caught.value.code == GROUPS_REFUSED
    assert len(server.requests) == 1
    assert [record.message for record in caplog.records] == [f"group g1 is refused: it is {code}"]


async def test_other_reasons_raise_after_stall_s(client, server):
    """Claims are shortened, so that the error is not late."""
    server.refused = [refused("g1", "forked"), refused("g2", "no_reward")]
    server.long_polls = False
    with pytest.raises(ClientError, match=r"forked \(1\), no_reward \(1\)"):
        async for _ in client.batches(consumer="c", groups=1, stall_s=0.05):
            pass
    waits = [request[1]["wait_s"] for request in server.requests]

    assert waits[0] == 30
    assert all(wait <= 0.05 for wait in waits[1:])


async def test_without_stall_s_a_loop_never_raises(client, server):
    server.refused = [refused("g1", "forked")]

    assert [batch async for batch in client.batches(consumer="c", groups=1, wait_s=0, stall_s=None)] == []


async def test_groups_that_can_still_be_claimed_are_no_stall(client, server):
    """An exact claim leaves them in the queue."""
    server.refused, server.other = [refused("g1", "forked")], 1

    assert [batch async for batch in client.batches(consumer="c", groups=2, exact=True, wait_s=0)] == []


def claim(*codes, batch=None, available=None):
    groups = [refused(f"g{number}", code) for number, code in enumerate(codes)]
    waiting = {"available": len(codes) if available is None else available, "claimed": 0}
    return {"batch_id": batch, "refused": groups, "waiting": waiting}


@pytest.mark.parametrize("between", [claim(), claim("stale", batch="b1"), claim("stale", available=2)])
def test_a_stall_begins_again_after_a_claim_that_refused_not_all_groups(monkeypatch, between):
    """For example because there were none."""
    now = iter([10.0, 69.0, 100.0, 159.0, 160.0])
    monkeypatch.setattr("tokentape.batches.monotonic", lambda: next(now))
    stall = Stall(60.0)
    for claimed in (claim("stale"), claim("stale"), between, claim("stale"), claim("stale")):
        stall.check(claimed)
    with pytest.raises(ClientError, match="stale"):
        stall.check(claim("stale"))


@pytest.fixture
def hurried(server, monkeypatch):
    """A clock that is 7 s later at each reading, and claims that return at once."""
    readings = count()
    monkeypatch.setattr("tokentape.transport.monotonic", lambda: 7.0 * next(readings))
    server.long_polls = False


async def test_a_long_wait_is_split_into_claims(client, server, hurried):
    """The proxy accepts 600 s; the loop ends after `wait_s` in total."""
    assert [batch async for batch in client.batches(consumer="c", groups=1, wait_s=100, stall_s=None)] == []
    waits = [request[1]["wait_s"] for request in server.requests]
    assert len(waits) > 1
    assert all(0 <= wait_s <= 30 for wait_s in waits)


async def test_a_wait_logs_what_it_waits_for(client, server, hurried, caplog):
    """Every 30 s: the groups of the last claim by reason, and the oldest open groups. An error of the list is no error."""
    server.refused, server.other = [refused("g1", "no_reward")], 1
    server.open_groups = [{"group_id": f"o{number}", "finished": 3, "members": 4} for number in range(4)]
    options = {"consumer": "c", "groups": 2, "exact": True, "policy": "planner", "stall_s": None}
    assert [batch async for batch in client.batches(wait_s=300, **options)] == []
    first = [record.message for record in caplog.records if "waiting" in record.message]
    caplog.clear()
    server.open_groups = None
    assert [batch async for batch in client.batches(wait_s=300, **options)] == []
    second = [record.message for record in caplog.records if "waiting" in record.message]

    assert min(len(first), len(second)) >= 2
    assert first[0].startswith(
        "waiting for 2 complete groups at once of policy 'planner': 2 available; 0 claimed by others; refused: no_reward (1), "
        "such as 'g1': it is no_reward; 4 open: 'o3' with 3 of 4 rollouts finished, 'o2' with 3 of 4 rollouts finished, 'o1' "
    )
    assert second[0].startswith("waiting for 2 complete groups at once of policy 'planner': 2 available")
    assert "open" not in second[0]


async def test_a_wait_without_wait_s_ends_with_its_reason(client, server, hurried, monkeypatch):
    """After two hours, as an error; it begins again with each batch."""
    monkeypatch.setattr("tokentape.batches.MAX_WAIT_S", 200.0)
    server.ready = [[group("g1")]]
    seen = []
    with pytest.raises(
        ClientError, match=r"s for a complete group: 0 available; .* no group is open. Set wait_s"
    ) as caught:
        seen += [batch async for batch in client.batches(consumer="c", groups=1)]

    assert caught.value.code == "wait_timeout"
    assert server.ended() == ["ack b1"]
    assert MAX_WAIT_S == 7200


def test_pending_rewards_are_no_stall(monkeypatch):
    """Such a group is claimed or dropped after `reward_s`."""
    monkeypatch.setattr("tokentape.batches.monotonic", lambda: 1e9 * next(readings))
    readings = count()
    stall = Stall(60.0)
    for _ in range(3):
        stall.check(claim("no_reward", "reward_pending", available=2))


async def test_closing_the_generator_releases_the_batch(client, server):
    server.ready = [[group("g1")]]
    batches = client.batches(consumer="c", groups=1)
    await anext(batches)
    await batches.aclose()

    assert server.ended() == ["release b1"]


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "no group is open"), (1, "1 open: 'o0' with 1 of 2 rollouts finished"), (100, "100 or more open: 'o99'")],
)
def test_the_oldest_open_groups_are_named(count, words):
    """The newest are first in the list."""
    groups = [{"group_id": f"o{number}", "finished": 1, "members": 2} for number in range(count)]

    assert words in what_batches_wait_for({}, 1, {}, groups)
