"""Deadlines of rollouts over HTTP: terms, invalid values, and calls before, at and after a deadline, at two replicas."""

import asyncio

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from tests.support.fakes import settings_for
from tests.support.recorded import load
from tests.support.session import Session, names_in
from tests.support.stored import stored_rollout

from proxy.api.control.schemas import OpenGroup, OpenRollout
from proxy.api.requests import read_as
from proxy.errors import BadRequest
from proxy.server.listener import running

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
TIMEOUT_S = 50
WRONG = [0, -1, -0.0, "5", [1], {}, True]


@pytest.fixture
def fast(monkeypatch):
    """Sweeps and touches many times per second, and idle times of less than a second."""
    monkeypatch.setattr("proxy.rollouts.finishing._INTERVALS_S", (0.01, 0.02))
    monkeypatch.setattr("proxy.rollouts.admission._TICK_S", 0.02)
    monkeypatch.setattr("proxy.rollouts.rollout._MIN_IDLE_S", 0.01)


@pytest.fixture
def sweepless(monkeypatch):
    """No sweep during the test."""
    monkeypatch.setattr("proxy.rollouts.finishing._INTERVALS_S", (1000, 1000))


@pytest.fixture
async def replicas(store, engine, http):
    """Two replicas with one store; the engine responds while `engine.hold` is set."""
    engine.hold = asyncio.Event()
    engine.hold.set()

    async def respond(request, body):
        await engine.hold.wait()
        return web.Response(body=load("chat_ids_lp").response, content_type="application/json")

    engine.respond = respond
    async with running(settings_for(engine.url), store) as first, running(settings_for(engine.url), store) as second:
        yield [Session(http, first.url), Session(http, second.url)]


async def finished(store, name):
    """Return the rollout once it is finished."""
    async with asyncio.timeout(TIMEOUT_S):
        while not (rollout := await stored_rollout(store, name)).is_finished:
            await asyncio.sleep(0.01)
    return rollout


async def start_call(replica, engine, name):
    """Start a call that ends after `engine.hold` is set; return once the engine has it."""
    engine.hold.clear()
    engine.reached.clear()
    call = asyncio.ensure_future(replica.post(f"/rollouts/{name}{CHAT}", BODY))
    async with asyncio.timeout(TIMEOUT_S):
        await engine.reached.wait()
    return call


async def test_the_deadlines_of_a_rollout_are_shown_with_its_terms(proxy, sweepless):
    """In the responses of opening, reading and listing; null if they are not set. So is the reason of its end."""
    opened = await proxy.post("/rollouts", {"rollout_id": "r1", "deadline_s": 60, "idle_s": 2.5})
    again = await proxy.post("/rollouts", {"rollout_id": "r1", "deadline_s": 60, "idle_s": 2.5})
    other = await proxy.post("/rollouts", {"rollout_id": "r1", "deadline_s": 61, "idle_s": 2.5})
    without = await proxy.post("/rollouts", {"rollout_id": "r2", "deadline_s": None})
    listed = (await proxy.get("/rollouts")).json["rollouts"]
    shown = [opened.json, without.json, *sorted(listed, key=lambda rollout: rollout["rollout_id"])]

    assert [opened.status, again.status, other.status, without.status] == [201, 200, 409, 201]
    assert opened.json == again.json
    assert [(rollout["deadline_s"], rollout["idle_s"]) for rollout in shown] == [(60, 2.5), (None, None)] * 2
    assert [rollout["reason"] for rollout in listed] == [None, None]
    assert "deadline_s" not in opened.json["limits"]


@pytest.mark.parametrize(
    "terms", [{"deadline_s": 60, "rollout": {"idle_s": 5}}, {"rollout": {"deadline_s": 60, "idle_s": 5}}]
)
async def test_the_deadlines_of_a_group_apply_to_each_of_its_rollouts(proxy, store, sweepless, terms):
    """At the top level or in `rollout`; the same request again returns the same group."""
    body = {"group_id": "g", "size": 3, **terms}
    opened, again = await proxy.post("/groups", body), await proxy.post("/groups", body)

    assert (201, 200, opened.json) == (opened.status, again.status, again.json)
    assert [(rollout["deadline_s"], rollout["idle_s"]) for rollout in opened.json["rollouts"]] == [(60, 5)] * 3
    assert len(await store.timers.claim(9, now_ms=2**53, until_ms=2**53)) == 3


@pytest.mark.parametrize("name", ["deadline_s", "idle_s", "start_s"])
@pytest.mark.parametrize("value", WRONG, ids=str)
async def test_a_deadline_that_is_not_a_positive_number_is_422_and_names_the_field(proxy, name, value):
    """In rollouts and groups; nothing is opened."""
    for path, body in [
        ("/rollouts", {name: value}),
        ("/groups", {"size": 2, name: value}),
        ("/groups", {"size": 2, "rollout": {name: value}}),
    ]:
        response = await proxy.post(path, body)
        assert response.status == 422, body
        assert name in response.json["error"]["message"]
    assert (await proxy.get("/rollouts")).json["rollouts"] == []


@pytest.mark.parametrize("name", ["deadline_s", "idle_s", "start_s"])
async def test_a_deadline_of_a_group_and_of_its_rollouts_is_422(proxy, name):
    response = await proxy.post("/groups", {"size": 2, name: 5, "rollout": {name: 5}})

    assert response.status == 422
    assert name in response.json["error"]["message"]
    assert (await proxy.get("/groups")).json["groups"] == []


@pytest.mark.parametrize("value", [1e-300, 1e300, 1.7976931348623157e308, 2**63])
async def test_tiny_and_huge_deadlines_are_accepted(replicas, store, fast, value):
    """A tiny one ends the rollout at once, a huge one never."""
    opened = await replicas[0].post("/rollouts", {"rollout_id": "r1", "deadline_s": value, "idle_s": value})
    await replicas[0].post("/rollouts", {"rollout_id": "r2", "deadline_s": 0.01})
    await finished(store, "r2")

    assert (opened.status, opened.json["deadline_s"]) == (201, value)
    if value < 1:
        await finished(store, "r1")
    else:
        assert (await replicas[0].post(f"/rollouts/r1{CHAT}", BODY)).status == 200


@given(
    st.sampled_from(["deadline_s", "idle_s"]),
    st.floats().map(repr)
    | st.sampled_from(["1e999", "-1e999", "null", "1e-400", "9" * 400, "NaN", "[]", '"1"', "true"]),
)
def test_any_value_is_read_as_a_positive_finite_number_or_refused(name, text):
    for model, body in [
        (OpenRollout, b'{"%s": %s}'),
        (OpenGroup, b'{"size": 1, "%s": %s}'),
        (OpenGroup, b'{"size": 1, "rollout": {"%s": %s}}'),
    ]:
        try:
            read = read_as(model, body % (name.encode(), text.encode()))
        except BadRequest:  # or its subclass for a value
            continue
        values = [getattr(read, name), getattr(getattr(read, "rollout", read), name)]
        assert all(value is None or 0 < value < float("inf") for value in values)


async def test_a_rollout_without_calls_is_aborted_and_its_group_completes(replicas, store, fast):
    """The deadline of the last member completes the group, which can be claimed at either replica."""
    opened = await replicas[0].post("/groups", {"group_id": "g", "size": 2, "start_s": 0.3})
    first, second = [rollout["rollout_id"] for rollout in opened.json["rollouts"]]
    await replicas[0].post(f"/rollouts/{first}{CHAT}", BODY)
    await replicas[1].post(f"/rollouts/{first}/finish", {"status": "completed", "reward": 1.0})
    rollout = await finished(store, second)
    async with asyncio.timeout(TIMEOUT_S):
        while (await replicas[0].get("/groups/g")).json["status"] != "complete":
            await asyncio.sleep(0.01)
    shown = [(await replicas[1].get(f"/rollouts/{name}")).json for name in (first, second)]
    metrics = [(await replica.get("/metrics")).text.decode() for replica in replicas]

    assert [(one["status"], one["reason"]) for one in shown] == [("completed", None), ("aborted", "deadline")]
    assert rollout.finished_ms >= rollout.created_ms + 300
    assert sum("tokentape_deadline_rollouts_total 1.0" in text for text in metrics) == 1
    claim = await replicas[1].post("/batches/claim", {"consumer": "t", "format": "sequences", "min_group": 1})
    assert names_in(claim.json) == ["g"]


async def test_a_rollout_is_not_idle_before_its_first_call(replicas, store, fast):
    """Its agent may wait for its turn: only `start_s` limits that. After its call, `idle_s` does."""
    opened = await replicas[0].post("/groups", {"group_id": "g", "size": 2, "idle_s": 0.2, "start_s": 600})
    first, second = [rollout["rollout_id"] for rollout in opened.json["rollouts"]]
    await replicas[1].post(f"/rollouts/{first}{CHAT}", BODY)
    await finished(store, first)
    waiting = await stored_rollout(store, second)

    assert (waiting.status, waiting.began_ms) == ("open", None)


@pytest.mark.parametrize(
    ("section", "terms", "shown"),
    [
        ({}, {}, (None, 3600, 1800)), ({}, {"idle_s": 5, "deadline_s": 60}, (60, 5, 1800)),
        ({}, {"start_s": 7}, (None, 3600, 7)), ({"idle_s": None}, {}, (None, None, None)),
        ({"idle_s": None}, {"idle_s": 5}, (None, 5, 1800)), ({"idle_s": 30, "start_s": 9}, {}, (None, 30, 9)),
    ],
)  # fmt: skip
async def test_rollouts_of_a_group_have_an_idle_limit_by_default(store, http, sweepless, section, terms, shown):
    """The settings limit them, so that a dead agent does not keep its group open; other rollouts have no limit."""
    async with running(settings_for(None, groups=section), store) as served:
        proxy = Session(http, served.url)
        group = (await proxy.post("/groups", {"size": 1, **terms})).json["rollouts"][0]
        alone = (await proxy.post("/rollouts", {})).json
    names = ("deadline_s", "idle_s", "start_s")

    assert tuple(tuple(rollout[name] for name in names) for rollout in (group, alone)) == (shown, (None,) * 3)


async def test_a_call_that_is_longer_than_the_idle_time_keeps_its_rollout_open_at_another_replica(
    replicas, engine, store, fast
):
    """Both replicas sweep. The rollout is finished its idle time after the call, and the step is not late."""
    await replicas[1].post("/rollouts", {"rollout_id": "r1", "idle_s": 0.4})
    await replicas[1].post("/rollouts", {"rollout_id": "without", "idle_s": 0.4, "start_s": 0.4})
    call = await start_call(replicas[0], engine, "r1")
    await finished(store, "without")
    async with asyncio.timeout(TIMEOUT_S):
        while (rollout := await stored_rollout(store, "r1")).touched_ms < rollout.created_ms + 1600:
            await asyncio.sleep(0.02)
    engine.hold.set()
    response = await call
    rollout = await finished(store, "r1")

    assert response.status == 200
    assert (rollout.status, rollout.reason) == ("aborted", "deadline")
    assert rollout.finished_ms - rollout.created_ms >= 2000
    assert (rollout.counts["steps"], rollout.counts.get("late", 0)) == (1, 0)


async def test_a_call_in_flight_at_the_deadline_ends_normally_and_is_late(replicas, engine, store, fast):
    """As at any finish. A further call gets 409."""
    await replicas[0].post("/rollouts", {"rollout_id": "r1", "deadline_s": 0.5})
    call = await start_call(replicas[0], engine, "r1")
    await finished(store, "r1")
    engine.hold.set()
    response = await call
    later = await replicas[1].post(f"/rollouts/r1{CHAT}", BODY)
    counts = (await stored_rollout(store, "r1")).counts

    assert (response.status, later.status) == (200, 409)
    assert (
        later.json["error"]["code"],
        "aborted (deadline)" in later.json["error"]["message"],
    ) == ("rollout_closed", True)
    assert (counts["steps"], counts["late"]) == (1, 1)


async def test_a_call_after_the_deadline_finishes_the_rollout_before_a_sweep(replicas, store, sweepless):
    """It gets the 409 of finished rollouts, and the group completes; a limited rollout is finished as well."""
    opened = await replicas[0].post("/groups", {"group_id": "g", "size": 2, "deadline_s": 0.001})
    names = [rollout["rollout_id"] for rollout in opened.json["rollouts"]]
    await store.update_if(names[1], {"status": b'"limited"'}, expect={}, now_ms=1)
    await asyncio.sleep(0.01)  # the deadline
    calls = [await replicas[0].post(f"/rollouts/{name}{CHAT}", BODY) for name in (*names, names[0])]
    shown = (await replicas[1].get(f"/rollouts/{names[0]}")).json

    assert [(call.status, call.json["error"]["code"]) for call in calls] == [(409, "rollout_closed")] * 3
    assert (shown["status"], shown["reason"]) == ("aborted", "deadline")
    assert (await replicas[1].get("/groups/g")).json["status"] == "complete"


async def test_a_call_after_the_deadline_of_a_rollout_that_cannot_be_finished_is_503(replicas, store, sweepless):
    await replicas[0].post("/rollouts", {"rollout_id": "r1", "deadline_s": 0.001})
    await asyncio.sleep(0.01)  # the deadline
    store.failing.add("update_if")
    call = await replicas[0].post(f"/rollouts/r1{CHAT}", BODY)

    assert (call.status, call.json["error"]["code"]) == (503, "store_unavailable")


async def test_a_call_after_the_deadline_of_a_rollout_that_a_trainer_finishes_meanwhile_is_409(
    replicas, store, sweepless
):
    await replicas[0].post("/rollouts", {"rollout_id": "r1", "deadline_s": 0.001})
    await asyncio.sleep(0.01)  # the deadline
    update_if = store._store.update_if

    async def overtaken(name, fields, **named):
        await update_if(name, {"status": b'"completed"', "finished_ms": b"1"}, expect={}, now_ms=1)
        return await update_if(name, fields, **named)

    store._store.update_if = overtaken
    call = await replicas[0].post(f"/rollouts/r1{CHAT}", BODY)

    assert (call.status, call.json["error"]["code"]) == (409, "rollout_closed")
    assert (await stored_rollout(store, "r1")).status == "completed"


async def test_a_finish_after_the_deadline_is_idempotent_or_409(replicas, store, fast):
    """A late agent cannot turn an aborted rollout into a completed one."""
    await replicas[0].post("/rollouts", {"rollout_id": "r1", "deadline_s": 0.01})
    await finished(store, "r1")
    statuses = [
        (await replicas[0].post("/rollouts/r1/finish", {"status": status})).status
        for status in ("aborted", "completed")
    ]

    assert statuses == [200, 409]
