"""/events: a stream of changes of rollouts."""

import asyncio
from contextlib import asynccontextmanager

import orjson
import pytest
from tests.support.fakes import settings_for

from proxy.api.control.rollouts import to_event
from proxy.server.listener import running
from storage.errors import StoreUnreachable
from storage.types import Change


@asynccontextmanager
async def follow(proxy, query=""):
    """Yield the events from now on, each as its name and its data."""
    async with proxy.http.get(f"{proxy.url}/events{query}") as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"] == "text/event-stream"
        assert await response.content.readline() == b": following\n"

        async def events():
            name = None
            async for line in response.content:
                kind, _, value = line.decode().strip().partition(": ")
                if kind == "data":
                    yield name, orjson.loads(value)
                name = value if kind == "event" else name

        yield events()


async def test_a_call_is_an_event_with_its_step_and_a_finish_one_without(proxy):
    """Events are in order."""
    async with follow(proxy) as events:
        await proxy.chat("r 1")
        await proxy.post("/rollouts/r%201/finish", {"status": "completed"})
        received = [await anext(events) for _ in range(3)]
    (step,) = (await proxy.get("/rollouts/r%201/steps")).json["steps"]

    assert {name for name, _ in received} == {"changed"}
    assert [
        {"rollout_id": "r 1", "index": None, "step_id": None},
        {"rollout_id": "r 1", "index": 0, "step_id": step["step_id"]},
        {"rollout_id": "r 1", "index": None, "step_id": None},
    ] == [data for _, data in received]


async def test_events_can_be_filtered_by_rollout_and_include_changes_by_other_processes(proxy, store):
    async with running(settings_for(None), store) as other, follow(proxy, "?rollout_id=b") as events:
        for name in ("a", "b"):
            async with proxy.http.post(f"{other.url}/rollouts", json={"rollout_id": name}) as response:
                assert response.status == 201

        assert (await anext(events))[1]["rollout_id"] == "b"


async def test_the_shutdown_ends_event_streams(store, http):
    async with running(settings_for(None), store) as served:
        response = await http.get(f"{served.url}/events")
        assert await response.content.readline() == b": following\n"
    async with asyncio.timeout(50):
        assert (await response.content.read()).strip() == b""


async def test_events_are_503_while_the_store_is_unreachable(proxy, store, monkeypatch):
    class Unreachable:
        def subscribe(self):
            raise StoreUnreachable("the test took the store away")

    monkeypatch.setattr(store._store, "changes", Unreachable())

    assert (await proxy.get("/events")).status == 503


async def test_an_unknown_parameter_of_events_is_400_and_named(proxy):
    response = await proxy.get("/events?rollout=r")

    assert response.status == 400
    assert "rollout_id" in str(response.json)


@pytest.mark.parametrize("name", ["a\nb", "\ud800", '"'])
def test_a_rollout_id_with_line_breaks_or_quotes_stays_within_one_event(name):
    event = to_event(Change(name, 3, "s"))

    assert event.count(b"\n") == 3
    assert orjson.loads(event.split(b"data: ")[1])["index"] == 3
