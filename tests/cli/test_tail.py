"""`tokentape tail`: one line per stored step."""

import asyncio
import os
import signal
from contextlib import AsyncExitStack

import orjson
import pytest
from tests.support.fakes import proxying, settings_for

from proxy.cli import tail as tailing
from proxy.cli.control import Control, Refused
from proxy.cli.tail import Tail, line, tail
from proxy.server.listener import running


class Received(asyncio.Queue):
    """A queue of received steps."""

    async def names(self, count: int) -> list[tuple[str, int]]:
        steps = [await self.get() for _ in range(count)]
        return [(step["rollout_id"], step["index"]) for step in steps]


@pytest.fixture
async def follow(http):
    """A function that starts following; it ends after the test."""
    tasks: list[asyncio.Task] = []

    async def begin(url: str, rollout_id: str | None = None, last: int = 10) -> tuple[Tail, Received]:
        received = Received()
        follow = Tail(Control(url), rollout_id, last, received.put_nowait)
        tasks.append(asyncio.create_task(follow.follow()))
        await follow.is_connected.wait()
        return follow, received

    yield begin
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def call(http, url: str, rollout: str, count: int = 1) -> None:
    for _ in range(count):
        body = {"prompt": "once", "max_tokens": 2}
        async with http.post(f"{url}/rollouts/{rollout}/v1/completions", json=body) as response:
            assert response.status == 200


async def test_each_new_step_is_received_once_in_order_from_every_process(http, store, address, follow):
    """Steps that were stored before are not received."""
    await call(http, address.url, "old")
    async with proxying(address.url, store) as other:  # here the other proxy is the engine
        _, received = await follow(address.url)
        await asyncio.gather(call(http, address.url, "a", 5), call(http, other.url, "b", 3))
        steps = [step for step in await received.names(11) if step[0] in {"a", "b"}]

    assert [("a", index) for index in range(5)] == [step for step in steps if step[0] == "a"]
    assert [("b", index) for index in range(3)] == [step for step in steps if step[0] == "b"]


async def test_following_a_rollout_begins_with_its_last_steps(http, address, follow):
    """Other rollouts are not received."""
    await call(http, address.url, "r", 4)
    _, received = await follow(address.url, "r", last=2)
    await call(http, address.url, "other")
    await call(http, address.url, "r")

    assert await received.names(3) == [("r", 2), ("r", 3), ("r", 4)]


async def test_a_rollout_can_be_followed_before_it_exists_and_after_it_was_deleted(http, address, follow):
    """A new incarnation begins at its first step."""
    _, received = await follow(address.url, "r")
    await call(http, address.url, "r", 2)
    assert await received.names(2) == [("r", 0), ("r", 1)]
    async with http.delete(f"{address.url}/rollouts/r"):
        await call(http, address.url, "r")

    assert await received.names(1) == [("r", 0)]


@pytest.mark.parametrize("only", [None, "b"])
async def test_steps_stored_during_a_disconnect_are_received_once_after_it(
    http, store, address, follow, monkeypatch, only
):
    """Another proxy stores them while the first restarts."""
    monkeypatch.setattr(tailing, "BACKOFF_S", (0.01, 0.05))
    tried = asyncio.Event()
    monkeypatch.setattr(tailing, "print_note", lambda note, _: tried.set() if note.endswith("reconnecting") else None)
    async with AsyncExitStack() as first:
        served = await first.enter_async_context(proxying(address.url, store))
        follow, received = await follow(served.url, only)
        await call(http, served.url, "b")
        assert ("b", 0) in await received.names(1 if only else 2)
        await first.aclose()
    await tried.wait()
    await call(http, address.url, "b", 2)
    await call(http, address.url, "c")
    settings = settings_for(address.url, listen=served.url.removeprefix("http://"))
    async with running(settings, store):
        await follow.is_connected.wait()
        steps = await received.names(2 if only else 3)
        await call(http, address.url, "b")
        steps += await received.names(1)

    assert [step for step in steps if step[0] == "b"] == [("b", 1), ("b", 2), ("b", 3)]
    assert (only is None) == (("c", 0) in steps)


async def test_an_unreachable_proxy_at_the_start_or_a_missing_key_is_an_error(http, store):
    """They are not retried."""
    with pytest.raises(OSError, match="/events failed: cannot connect"):
        await Tail(Control("http://127.0.0.1:9"), None, 0, print).follow()
    keys = {"agents": {"api_keys": ["a"]}, "control": {"api_keys": ["c"]}}
    async with proxying(None, store, **keys) as served:
        with pytest.raises(Refused, match="A control key is required"):
            await Tail(Control(served.url), None, 0, print).follow()


def test_a_line_has_the_steps_values_escaped():
    received = {
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
    shown = line(received, with_rollout=True).plain

    assert ":00.500  r\\x1b[2J " in shown
    assert shown.endswith(
        "  7 prompt tokens, 2 completion tokens  stop       12.3 s  policy 9  echo no_logprobs  not delivered"
    )
    assert "m\\u202e" in shown
    assert "  policy planner 9  echo" in line({**received, "policy": "planner"}, with_rollout=True).plain
    assert "r\\x1b" not in line(received, with_rollout=False).plain


async def test_ctrl_c_ends_tail_with_0(http, address, make_console, capsys):
    """With --json a step is one line, printed at once."""
    await call(http, address.url, "r")
    task = asyncio.create_task(tail(address, "r", 10, make_console(), as_json=True))
    output = ""
    while not output:
        await asyncio.sleep(0.01)
        output = capsys.readouterr().out
    os.kill(os.getpid(), signal.SIGINT)
    await task

    assert tuple(orjson.loads(output)[name] for name in ("rollout_id", "index", "exact")) == ("r", 0, True)
    assert output.endswith("}\n")
