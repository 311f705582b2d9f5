"""Retries, errors, streams and heartbeats of both clients."""

import asyncio
import inspect
import threading
from fractions import Fraction

import numpy as np
import pytest
from aiohttp import web
from tests.support.fakes import proxying

from proxy.cli.control import Control
from tokentape import AsyncClient, Client, ClientError
from tokentape.clients import AsyncTransport, ThreadHeartbeat, run
from tokentape.transport import LOG, TaskHeartbeat

ROLLOUT = {"rollout_id": "r1"}


def respond(engine, *responses):
    """Return one response per request, and the last one to all further requests."""
    remaining = list(responses)

    async def respond(request, body):
        status, headers, content = remaining.pop(0) if len(remaining) > 1 else remaining[0]
        return web.json_response(content, status=status, headers=headers)

    engine.respond = respond


ERROR = {"error": {"message": "not now", "type": "overloaded", "code": "busy", "param": None}}


@pytest.mark.parametrize("status", [429, 503])
async def test_a_request_is_retried_after_retry_after(client_at, engine, delays, status):
    """429 and 503, with the same body."""
    respond(engine, (status, {"Retry-After": "3"}, ERROR), (status, {}, ERROR), (200, {}, ROLLOUT))
    client = client_at(engine.url)
    opened = await client.open_rollout("r1", model="policy")
    await client.close()

    assert opened == ROLLOUT
    assert delays == [3.0, 0.5]
    assert engine.requests == [{"rollout_id": "r1", "model": "policy"}] * 3


async def test_the_error_of_the_last_attempt_is_raised(client_at, engine, delays):
    """After `attempts` requests."""
    respond(engine, (503, {"Retry-After": "1"}, ERROR))
    client = client_at(engine.url, attempts=3)
    with pytest.raises(ClientError, match="503 busy: not now"):
        await client.rollout("r1")
    await client.close()

    assert delays == [1.0, 1.0]
    assert len(engine.requests) == 3


async def test_an_export_is_retried_before_its_first_row(client_at, engine, delays):
    """Like any other request."""
    respond(engine, (503, {}, ERROR), (200, {}, {"row": 1}))
    client = client_at(engine.url)
    rows = await client.export()
    await client.close()

    assert rows == [{"row": 1}]
    assert delays == [0.25]


async def test_a_permanent_error_is_not_retried(client_at, engine, delays):
    """The error has the fields of the response."""
    respond(engine, (409, {}, ERROR))
    client = client_at(engine.url)
    with pytest.raises(ClientError) as caught:
        await client.open_rollout("r1")
    await client.close()

    assert (
        caught.value.status, caught.value.type, caught.value.code, caught.value.message,
    ) == (409, "overloaded", "busy", "not now")  # fmt: skip
    assert (delays, len(engine.requests)) == ([], 1)


async def test_a_failed_connection_is_retried(client_at, unused_tcp_port, delays):
    """The proxy can be starting; the error of the last attempt names the URL."""
    client = client_at(f"http://127.0.0.1:{unused_tcp_port}/", attempts=3)
    with pytest.raises(ClientError, match=f"GET http://127.0.0.1:{unused_tcp_port}/rollouts/r1") as caught:
        await client.rollout("r1")
    await client.close()

    assert (caught.value.status, caught.value.type, caught.value.code) == (None, "connection_error", "unreachable")
    assert delays == [0.25, 0.5]


async def test_a_request_is_not_retried_if_its_connection_is_lost(client_at, engine, delays):
    """The proxy can have processed it."""

    async def respond(request, body):
        request.transport.close()
        return web.Response()

    engine.respond = respond
    client = client_at(engine.url)
    with pytest.raises(ClientError) as caught:
        await client.rollout("r1")
    await client.close()

    assert caught.value.code == "connection_lost"
    assert (delays, len(engine.requests)) == ([], 1)


async def test_rows_end_at_line_feeds_only(client_at, engine):
    """Texts of agents have other line separators, which JSON does not escape."""
    row = {"text": "a\x85b\u2028c\u2029d"}
    engine.streams([b'{"text": "a\xc2\x85b\xe2\x80', b'\xa8c\xe2\x80\xa9d"}\n{"row"', b": 2}"], then="end")
    client = client_at(engine.url)
    rows = await client.export()
    await client.close()

    assert rows == [row, {"row": 2}]


async def test_an_export_raises_if_its_connection_is_lost(client_at, engine):
    """After the rows that arrived."""
    engine.streams([b'{"row": 1}\n'], then="die")
    client = client_at(engine.url)
    with pytest.raises(ClientError, match="connection lost"):
        await client.export()
    await client.close()


async def test_the_control_key_is_sent(client_at, simulated, store):
    """Without it the proxy returns 401."""
    async with proxying(simulated, store, control={"api_keys": ["secret-key"]}) as served:
        keyed, unkeyed = client_at(served.url, api_key="secret-key"), client_at(served.url)
        opened = await keyed.open_rollout("r1")
        with pytest.raises(ClientError, match="401"):
            await unkeyed.rollout("r1")
        await keyed.close()
        await unkeyed.close()

    assert opened["rollout_id"] == "r1"


async def test_rows_are_read_as_they_arrive(engine):
    """The first row is available before the last is sent; closing the iterator closes the connection."""
    engine.streams([b'{"row": 1}\n{"row"', b": 2}\n"], then="hang")
    async with AsyncClient(engine.url) as client:
        rows = client.export()
        assert [await anext(rows), await anext(rows)] == [{"row": 1}, {"row": 2}]
        await rows.aclose()
        await engine.aborted.wait()


async def test_one_client_sends_concurrent_requests(url):
    """20 rollouts are opened at the same time."""
    async with AsyncClient(url) as client:
        opened = await asyncio.gather(*(client.open_rollout(f"r{number}") for number in range(20)))

    assert len({rollout["api_key"] for rollout in opened}) == 20


def test_both_clients_have_the_same_methods_and_arguments():
    """Except ManagedServer."""

    def methods(kind):
        return {
            name: str(inspect.signature(method).replace(return_annotation=inspect.Signature.empty))
            for name, method in inspect.getmembers(kind, inspect.isfunction)
            if name[0] != "_" or name == "__init__"
        }

    assert methods(AsyncClient).keys() - methods(Client).keys() == {"managed_server", "play_group", "play_rollout"}
    assert methods(Client).items() <= methods(AsyncClient).items()


async def test_a_blocking_client_works_in_a_thread(url):
    """A trainer's data loader uses it like this: opens, finishes and lists rollouts in a `with`."""

    def work():
        with Client(url) as client:
            opened = client.open_rollout(metadata={"task": "sum"})
            client.finish_rollout(opened["rollout_id"], reward=1.0)
            return opened["rollout_id"], [rollout["rollout_id"] for rollout in client.rollouts(status="completed")]

    opened, listed = await asyncio.to_thread(work)

    assert listed == [opened]


async def test_the_blocking_client_reads_rows_as_they_arrive(engine):
    """The first row is available before the last is sent; closing the iterator closes the connection."""
    engine.streams([b'{"row": 1}\n{"row"', b": 2}\n"], then="hang")

    def work():
        with Client(engine.url) as client:
            rows = client.export()
            first = next(rows), next(rows)
            rows.close()
            return first

    assert await asyncio.to_thread(work) == ({"row": 1}, {"row": 2})
    await engine.aborted.wait()


async def test_a_request_of_the_blocking_client_without_a_response_times_out(engine):
    """After `timeout_s`."""
    engine.hangs()

    def work():
        with Client(engine.url, timeout_s=0.05) as client, pytest.raises(ClientError) as caught:
            client.rollout("r1")
        return caught.value.code

    assert await asyncio.to_thread(work) == "connection_lost"


@pytest.mark.parametrize("results", [[False], [True, True, False]])
async def test_a_task_ends_when_the_function_returns_false(results):
    left, ended = list(results), asyncio.Event()

    async def beat():
        if len(left) == 1:
            ended.set()
        return left.pop(0)

    heartbeat = TaskHeartbeat(beat, 0.001)
    await heartbeat.start()
    await ended.wait()
    await heartbeat.stop()

    assert left == []


async def test_a_stopped_task_does_not_call_the_function_again():
    """A heartbeat that was never started can be stopped, too."""
    beats = []

    async def beat():
        beats.append(1)
        return True

    heartbeat = TaskHeartbeat(beat, 60)
    await heartbeat.stop()
    await heartbeat.start()
    await asyncio.sleep(0)
    await heartbeat.stop()
    await asyncio.sleep(0)

    assert beats == []


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "tokentape-heartbeat"]


@pytest.mark.parametrize("results", [[False], [True, True, False]])
def test_a_thread_ends_when_the_function_returns_false(results):
    left = list(results)

    async def beat():
        return left.pop(0)

    heartbeat = ThreadHeartbeat(beat, 0.001)
    run(heartbeat.start())
    for thread in threads():
        thread.join()
    run(heartbeat.stop())

    assert left == []


def test_stopping_a_thread_waits_for_a_call_in_progress():
    """A heartbeat that was never started can be stopped, too."""
    begun, beats = threading.Event(), []

    async def beat():
        begun.set()
        beats.append("begun")
        while not heartbeat._stopped.is_set():
            pass
        beats.append("ended")
        return True

    run(ThreadHeartbeat(beat, 60).stop())
    heartbeat = ThreadHeartbeat(beat, 0.001)
    run(heartbeat.start())
    begun.wait()
    run(heartbeat.stop())

    assert beats == ["begun", "ended"]
    assert threads() == []


@pytest.mark.parametrize("key", ["secret\n", "secret\u20ac"])
def test_a_key_that_no_header_can_have_is_refused_and_not_shown(key):
    """As one of a file that ends with a line break; libraries of HTTP show the header in their errors."""
    for kind in (AsyncClient, Client, Control):
        with pytest.raises(ValueError, match="the API key has a line break") as refused:
            kind("http://127.0.0.1:9", api_key=key)
        assert "secret" not in str(refused.value)


async def played(url, monkeypatch, agent, **options):
    """Play a group of two with this agent; return its ID, and the statuses of all its attempts."""
    monkeypatch.setattr("tokentape.clients.LOOK_S", 0.05)
    async with AsyncClient(url) as client:
        group_id = await client.play_group(2, agent, **options)
        rollouts = [rollout async for rollout in client.rollouts()]
        assert {rollout["group_id"] for rollout in rollouts} == {group_id}
        return await client.group(group_id), sorted(rollout["status"] for rollout in rollouts)


async def test_a_group_is_played_with_the_rewards_of_its_agents(url, monkeypatch):
    numbers = iter(range(2))

    async def agent(rollout):
        return float(next(numbers))

    group, statuses = await played(url, monkeypatch, agent)

    assert group["status"] == "complete"
    assert sorted(member["reward"] for member in group["rollouts"]) == [0.0, 1.0]
    assert statuses == ["completed"] * 2


@pytest.mark.parametrize("error", [ValueError("the agent failed"), asyncio.CancelledError()])
async def test_an_agent_that_raises_runs_again_in_the_rollout_that_replaces_its_own(url, monkeypatch, error):
    """Also if a library of its cancels it; the others continue."""
    numbers = iter(range(9))

    async def agent(rollout):
        if next(numbers) == 0:
            raise error
        return 1.0

    group, statuses = await played(url, monkeypatch, agent, replace=True)

    assert group["status"] == "complete"
    assert statuses == ["aborted", "completed", "completed"]


async def test_an_agent_that_hangs_is_cancelled_once_its_rollout_has_ended(url, monkeypatch):
    """By `start_s` here."""
    monkeypatch.setattr("tokentape.clients.LOOK_S", 0.05)
    cancelled = []

    async def agent(rollout):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(rollout["rollout_id"])
            raise

    async with AsyncClient(url) as client:
        assert None is await client.play_rollout(await client.open_rollout("r1", start_s=0.1), agent)
        assert (await client.rollout("r1"))["status"] == "aborted"
    assert cancelled == ["r1"]


async def test_an_agent_of_a_surplus_rollout_has_not_failed(url, caplog):
    """Its group is complete before it ends, so the proxy refuses its reward: no error is logged."""
    complete, numbers = asyncio.Event(), iter(range(2))
    async with AsyncClient(url) as client:

        async def agent(rollout):
            if next(numbers) == 0:
                await client.finish_rollout(rollout["rollout_id"], reward=1.0)
                complete.set()
            await complete.wait()
            return 1.0

        group = await client.group(await client.play_group(1, agent, over_sample=1, replace=True))

    assert group["status"] == "complete"
    assert [record for record in caplog.records if record.name == LOG.name and record.levelname == "ERROR"] == []


async def test_an_agent_that_always_fails_ends_with_its_group(url, monkeypatch):
    """After the attempts of `replace`, each logged."""

    async def agent(rollout):
        raise ValueError("the agent failed")

    group, statuses = await played(url, monkeypatch, agent, replace=1)

    assert group["status"] == "complete"
    assert statuses == ["aborted"] * 4


async def test_a_rollout_is_played_until_it_is_deleted_or_completed(url, monkeypatch):
    """Its ID is returned only if it is completed with the agent's reward."""
    monkeypatch.setattr("tokentape.clients.LOOK_S", 0.05)
    async with AsyncClient(url) as client:

        async def agent(rollout):
            if rollout["rollout_id"] == "deleted":
                await client.delete_rollout("deleted")
                await asyncio.Event().wait()
            return 0.5

        for name in ("deleted", "kept"):
            assert (None if name == "deleted" else name) == await client.play_rollout(
                await client.open_rollout(name), agent
            )
        assert (await client.rollout("kept"))["reward"] == 0.5


@pytest.mark.parametrize("reward", [True, Fraction(1, 2), np.float32(0.5)])
async def test_a_reward_may_be_any_number(url, reward):
    """As the result of a comparison, or of a computation with numpy."""

    async def agent(rollout):
        return reward

    async with AsyncClient(url) as client:
        assert await client.play_rollout(await client.open_rollout("r1"), agent) == "r1"
        assert float(reward) == (await client.rollout("r1"))["reward"]


@pytest.mark.parametrize("is_carried_out", [True, False])
async def test_a_rollout_whose_finish_is_lost_is_completed(url, monkeypatch, is_carried_out):
    """The same request again changes nothing; the reward of its agent is not thrown away."""
    monkeypatch.setattr("tokentape.clients.LOOK_S", 0.05)
    send, left = AsyncTransport.parts, [None]  # what is lost

    async def lose(self, request):
        lost = request.path.endswith("/finish") and left and not left.clear()
        if is_carried_out or not lost:
            async for part in send(self, request):
                if not lost:
                    yield part
        if lost:
            raise ClientError("the connection was lost", code="connection_lost")

    monkeypatch.setattr(AsyncTransport, "parts", lose)

    async def agent(rollout):
        return 0.5

    async with AsyncClient(url) as client:
        assert await client.play_rollout(await client.open_rollout("r1"), agent) == "r1"
        rollout = await client.rollout("r1")
    assert (rollout["status"], rollout["reward"]) == ("completed", 0.5)


async def test_a_reward_that_is_no_number_aborts_the_rollout(url):
    """At once: no repeated request could change it."""

    async def agent(rollout):
        return float("nan")

    async with AsyncClient(url) as client:
        assert None is await client.play_rollout(await client.open_rollout("r1"), agent)
        assert (await client.rollout("r1"))["status"] == "aborted"
