"""Rollouts, followed as they change."""

import asyncio
from contextlib import asynccontextmanager

import orjson
import pytest
from fakes import settings_for

from proxy.api.control.events import to_event
from proxy.server.listener import running
from storage.errors import StoreUnreachable
from storage.types import Change


@asynccontextmanager
async def following(proxy, query=""):
    """The events from now on, each as its name and what it tells."""
    async with proxy.http.get(f"{proxy.url}/events{query}") as response:
        assert 200 == response.status, await response.text()
        assert "text/event-stream" == response.headers["Content-Type"]
        assert b": following\n" == await response.content.readline()

        async def events():
            name = None
            async for line in response.content:
                kind, _, said = line.decode().strip().partition(": ")
                if kind == "data":
                    yield name, orjson.loads(said)
                name = said if kind == "event" else name

        yield events()


async def test_a_call_is_told_with_its_step_and_a_finish_without(proxy):
    """In the order in which they happened."""
    async with following(proxy) as events:
        await proxy.chat("r 1")
        await proxy.post("/rollouts/r%201/finish", {"status": "completed"})
        told = [await anext(events) for _ in range(3)]
    (step,) = (await proxy.get("/rollouts/r%201/steps")).json["steps"]

    assert {"changed"} == {name for name, _ in told}
    assert [
        {"rollout_id": "r 1", "index": None, "step_id": None},
        {"rollout_id": "r 1", "index": 0, "step_id": step["step_id"]},
        {"rollout_id": "r 1", "index": None, "step_id": None},
    ] == [said for _, said in told]


async def test_one_rollout_may_be_followed_alone_at_any_process(proxy, store):
    """What another process does to it is told, what happens to others is not."""
    async with running(settings_for(None), store) as other, following(proxy, "?rollout_id=b") as events:
        for name in ("a", "b"):
            async with proxy.http.post(f"{other.url}/rollouts", json={"rollout_id": name}) as response:
                assert 201 == response.status

        assert "b" == (await anext(events))[1]["rollout_id"]


async def test_a_stop_ends_the_stream(store, http):
    """Nobody who looks on holds up a stop."""
    async with running(settings_for(None), store) as served:
        response = await http.get(f"{served.url}/events")
        assert b": following\n" == await response.content.readline()
    async with asyncio.timeout(50):
        assert b"" == (await response.content.read()).strip()


async def test_a_store_that_is_away_is_said(proxy, store, monkeypatch):
    """503, as with every other route."""

    class Away:
        def subscribe(self):
            raise StoreUnreachable("the test took the store away")

    monkeypatch.setattr(store._store, "changes", Away())

    assert 503 == (await proxy.get("/events")).status


async def test_an_unknown_option_is_refused(proxy):
    """400, naming it."""
    response = await proxy.get("/events?rollout=r")

    assert 400 == response.status
    assert "rollout_id" in str(response.json)


@pytest.mark.parametrize("name", ["a\nb", "\ud800", '"'])
def test_a_hostile_name_stays_within_its_event(name):
    """One event, one line of data."""
    event = to_event(Change(name, 3, "s"))

    assert 3 == event.count(b"\n")
    assert 3 == orjson.loads(event.split(b"data: ")[1])["index"]
