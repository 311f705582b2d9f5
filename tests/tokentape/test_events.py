"""Changes of rollouts are followed across lost connections."""

import asyncio
from contextlib import aclosing, closing

import pytest
from aiohttp import web

from tokentape import AsyncClient, Client, ClientError
from tokentape.control_api import CONNECTED


def change(number):
    return {"rollout_id": f"r\u2028{number}", "index": None, "step_id": None}


def event(number):
    return f'event: changed\ndata: {{"rollout_id": "r\u2028{number}", "index": null, "step_id": null}}\n\n'.encode()


def streaming(*streams):
    """Respond to each request with one of these: reads and how the response ends, or a status."""
    pending = list(streams)

    async def respond(request: web.Request, body: dict) -> web.StreamResponse:
        stream = pending.pop(0)
        if isinstance(stream, int):
            return web.json_response({"error": {"message": "no"}}, status=stream)
        response = web.StreamResponse()
        await response.prepare(request)
        for read in stream[:-1]:
            await response.write(read)
        if stream[-1] == "die":
            request.transport.close()
        return response

    return respond


async def followed(client, count):
    async with aclosing(client.events()) as events:
        return [await anext(events) for _ in range(count)]


OPENED = CONNECTED + b"\n\n"


async def test_changes_follow_the_connection_and_none_each_other_one(engine, delays):
    """Whether the response ends or breaks; comments are skipped, and the delay is short again after a change."""
    engine.respond = streaming(
        (OPENED, event(1), b": quiet\n\n", event(2), "end"), (OPENED, "die"), (OPENED, event(3), "die"), (OPENED, "end")
    )
    async with AsyncClient(engine.url) as client:
        seen = await followed(client, 7)

    assert [None, change(1), change(2), None, None, change(3), None] == seen
    assert delays == [0.25, 0.5, 0.25]


async def test_a_proxy_that_is_away_is_waited_for(engine, delays):
    """Longer than for another request: here one with a single attempt, which finds an unready proxy three times."""
    engine.respond = streaming((OPENED, "end"), 503, 502, 429, (OPENED, event(1), "end"))
    async with AsyncClient(engine.url, attempts=1) as client:
        assert [None, None, change(1)] == await followed(client, 3)

    assert delays == [0.25, 0.5, 1.0, 2.0]


@pytest.mark.parametrize("streams", [(503,), (404,), ((OPENED, "end"), 401)])
async def test_the_first_failure_and_lasting_errors_are_raised(engine, delays, streams):
    """A wrong URL is noticed at once, and a key that is not valid any more later."""
    engine.respond = streaming(*streams)
    async with AsyncClient(engine.url, attempts=1) as client:
        with pytest.raises(ClientError, match="no"):
            await followed(client, 2)


async def test_the_changes_of_a_proxy_are_followed(url):
    """A client follows the changes of one rollout, or of all."""
    async with (
        AsyncClient(url) as client,
        aclosing(client.events()) as every,
        aclosing(client.events("r2")) as one,
    ):
        assert [await anext(every), await anext(one)] == [None, None]
        for name in ("r1", "r2"):
            await client.open_rollout(name)
            await client.finish_rollout(name, reward=1.0)
        named = set()
        while named != {"r1", "r2"}:
            named.add((await asyncio.wait_for(anext(every), 60))["rollout_id"])

        assert await asyncio.wait_for(anext(one), 60) == {"rollout_id": "r2", "index": None, "step_id": None}


async def test_a_long_outage_is_logged_and_ends_with_its_error(engine, delays, monkeypatch, caplog):
    """Every 30 s, and after two hours; a connection begins the time again."""
    now = [0.0]
    monkeypatch.setattr("tokentape.transport.monotonic", lambda: now[0])

    async def passed(self, seconds):
        now[0] += 10.0

    monkeypatch.setattr("tokentape.clients.AsyncTransport.sleep", passed)
    engine.respond = streaming([OPENED, "die"], *[503] * 9, [OPENED, "die"], *[503] * 2000)
    async with AsyncClient(engine.url, attempts=1) as client:
        with pytest.raises(ClientError, match="503"):
            async for _ in client.events():
                assert now[0] < 200

    assert 7100 <= now[0] - 110 < 7300
    assert caplog.messages[0].startswith("waiting for a connection: ")
    assert 200 < len(caplog.messages) < 260


async def test_the_blocking_client_follows_changes_and_closes_its_connection(engine):
    """At the end of the loop."""
    engine.streams([CONNECTED + b"\n\n", b'event: changed\ndata: {"rollout_id": "r1"}\n\n'], then="hang")

    def work():
        with Client(engine.url) as client, closing(client.events("r1")) as events:
            return next(events), next(events)

    assert await asyncio.to_thread(work) == (None, {"rollout_id": "r1"})
    await engine.aborted.wait()
