"""`tokentape tail`: steps, a line each, as they are stored."""

import asyncio
import os
import signal
from contextlib import AsyncExitStack

import orjson
import pytest
from fakes import proxying, settings_for

from proxy.cli import tail as tailing
from proxy.cli.api_client import ControlClient
from proxy.cli.export import Refused
from proxy.cli.tail import Tail, line, tail
from proxy.server.listener import running


class Told(asyncio.Queue):
    """What is told, awaited one by one."""

    async def names(self, count: int) -> list[tuple[str, int]]:
        steps = [await self.get() for _ in range(count)]
        return [(step["rollout_id"], step["index"]) for step in steps]


@pytest.fixture
async def following(http):
    """Following begins with a call of this, and ends with the test."""
    tasks: list[asyncio.Task] = []

    async def begin(url: str, rollout_id: str | None = None, last: int = 10) -> tuple[Tail, Told]:
        told = Told()
        following = Tail(ControlClient(http, url), rollout_id, last, told.put_nowait)
        tasks.append(asyncio.create_task(following.follow()))
        await following.is_connected.wait()
        return following, told

    yield begin
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def call(http, url: str, rollout: str, count: int = 1) -> None:
    for _ in range(count):
        body = {"prompt": "once", "max_tokens": 2}
        async with http.post(f"{url}/rollouts/{rollout}/v1/completions", json=body) as response:
            assert 200 == response.status


async def test_each_step_is_told_once_in_its_order_whoever_stores_it(http, store, address, following):
    """Of every rollout, by two proxies that share the store; what was stored before is not told."""
    await call(http, address.url, "old")
    async with proxying(address.url, store) as other:  # any engine will do, even a proxy
        _, told = await following(address.url)
        await asyncio.gather(call(http, address.url, "a", 5), call(http, other.url, "b", 3))
        heard = [each for each in await told.names(11) if each[0] in {"a", "b"}]

    assert [("a", index) for index in range(5)] == [each for each in heard if each[0] == "a"]
    assert [("b", index) for index in range(3)] == [each for each in heard if each[0] == "b"]


async def test_one_rollout_is_told_with_its_last_steps_first(http, address, following):
    """And nothing of any other."""
    await call(http, address.url, "r", 4)
    _, told = await following(address.url, "r", last=2)
    await call(http, address.url, "other")
    await call(http, address.url, "r")

    assert [("r", 2), ("r", 3), ("r", 4)] == await told.names(3)


async def test_a_rollout_may_come_later_and_come_anew(http, address, following):
    """It is waited for; deleted and opened again, it is told from its new beginning."""
    _, told = await following(address.url, "r")
    await call(http, address.url, "r", 2)
    assert [("r", 0), ("r", 1)] == await told.names(2)
    async with http.delete(f"{address.url}/rollouts/r"):
        await call(http, address.url, "r")

    assert [("r", 0)] == await told.names(1)


@pytest.mark.parametrize("only", [None, "b"])
async def test_what_was_stored_while_the_connection_was_broken_is_told_after_it(
    http, store, address, following, monkeypatch, only
):
    """The proxy was stopped and started again, and another one stored steps meanwhile: each is told, and none twice."""
    monkeypatch.setattr(tailing, "BACKOFF_S", (0.01, 0.05))
    tried = asyncio.Event()
    monkeypatch.setattr(tailing, "print_note", lambda said, _: tried.set() if said.endswith("reconnecting") else None)
    async with AsyncExitStack() as first:
        served = await first.enter_async_context(proxying(address.url, store))
        following, told = await following(served.url, only)
        await call(http, served.url, "b")
        assert ("b", 0) in await told.names(1 if only else 2)
        await first.aclose()
    await tried.wait()
    await call(http, address.url, "b", 2)
    await call(http, address.url, "c")
    settings = settings_for(address.url, listen=served.url.removeprefix("http://"))
    async with running(settings, store):
        await following.is_connected.wait()
        heard = await told.names(2 if only else 3)
        await call(http, address.url, "b")
        heard += await told.names(1)

    assert [("b", 1), ("b", 2), ("b", 3)] == [each for each in heard if each[0] == "b"]
    assert (only is None) == (("c", 0) in heard)


async def test_a_proxy_that_is_not_there_at_first_or_refuses_ends_it(http, store):
    """With the sentence: nothing is tried for ever that cannot come right."""
    with pytest.raises(OSError, match="cannot follow"):
        await Tail(ControlClient(http, "http://127.0.0.1:9"), None, 0, print).follow()
    keys = {"agents": {"api_keys": ["a"]}, "control": {"api_keys": ["c"]}}
    async with proxying(None, store, **keys) as served:
        with pytest.raises(Refused, match="A control key is required"):
            await Tail(ControlClient(http, served.url), None, 0, print).follow()


def test_a_line_says_what_happened_harmlessly():
    """Times are the machine's; ids and models are others'."""
    told = {
        "time": 0.5,
        "rollout_id": "r\x1b[2J",
        "index": 3,
        "dialect": "chat",
        "model": "m\u202e",
        "prompt_tokens": 7,
        "sampled_tokens": 2,
        "finish_reasons": ["stop"],
        "latency_s": 12.34,
        "policy_version": "9",
        "exact": False,
        "problems": ["echo", "no_logprobs"],
        "status": "complete",
        "delivered": False,
    }
    shown = line(told, with_rollout=True).plain

    assert ":00.500  r\\x1b[2J " in shown
    assert shown.endswith(
        "  7 prompt tokens, 2 completion tokens  stop       12.3 s  policy 9  echo no_logprobs  not delivered"
    )
    assert "m\\u202e" in shown
    assert "r\\x1b" not in line(told, with_rollout=False).plain


async def test_it_ends_with_0_when_it_is_told_to_stop(http, address, make_console, capsys):
    """Ctrl-C is how one leaves it; as JSON a step is one line, there at once."""
    await call(http, address.url, "r")
    told = asyncio.create_task(tail(address, "r", 10, make_console(), as_json=True))
    said = ""
    while not said:
        await asyncio.sleep(0.01)
        said = capsys.readouterr().out
    os.kill(os.getpid(), signal.SIGINT)
    await told

    assert ("r", 0, True) == tuple(orjson.loads(said)[name] for name in ("rollout_id", "index", "exact"))
    assert said.endswith("}\n")
