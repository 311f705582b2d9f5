"""Playbacks while proxies are killed: no step is used twice or lost, and no retry is answered with another step."""

import asyncio
import os
import signal
from contextlib import suppress
from random import Random
from secrets import token_hex

import aiohttp
import openai
import pytest
from tests.support.stored import stored_steps
from tests.system.faults.fleet import Fleet

from storage import StoreOptions, open_store
from storage.embedded.server import start_embedded

CALLS, POLLS, AGENTS, KILLS = 18, 3, 3, 6


async def agent(fleet: Fleet, rollout: str, dice: Random) -> list[str]:
    """Ask on, and every third question several times with the same messages; return the replies, of which none is lost."""
    messages, replies = [], []
    clients = [
        openai.AsyncOpenAI(base_url=f"{url}/rollouts/{rollout}/v1", api_key="none", max_retries=50)
        for url in fleet.urls[2:]
    ]
    for number in range(CALLS):
        messages.append({"role": "user", "content": f"Question {number}?"})
        for _ in range(POLLS if number % 3 == 0 else 1):
            create = dice.choice(clients).chat.completions.create
            response = await create(model="simulated", messages=messages, max_tokens=8)
            replies.append(response.choices[0].message.content)
        messages.append({"role": "assistant", "content": replies[-1]})
    for client in clients:
        await client.close()
    return replies


@pytest.mark.timeout(120)
async def test_each_step_answers_one_call_whatever_is_killed(tmp_path):
    server = await start_embedded(tmp_path / "store", "acknowledged")
    prefix, dice = token_hex(8), Random(5)
    fleet = Fleet(tmp_path, server, prefix)
    names = [f"p{number}" for number in range(AGENTS)]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:
        try:
            await fleet.start(http)
            recorded = await agent(fleet, "r1", Random(1))
            for name in names:
                body = {"rollout_id": name, "playback": {"of": "r1"}}
                async with http.post(f"{fleet.urls[2]}/rollouts", json=body) as response:
                    assert response.status == 201
            for engine in fleet.engines:  # no call needs one
                engine.process.kill()
            playing = asyncio.gather(*(agent(fleet, name, Random(name)) for name in names))
            for _ in range(KILLS):
                await asyncio.wait([playing], timeout=dice.random() / 20)
                if not playing.done():
                    await fleet.kill(http, dice.choice(fleet.proxies))
                    with suppress(ProcessLookupError):  # killed before, and not yet restarted
                        os.kill(server._process.pid, signal.SIGKILL)
            played = await playing
        finally:
            await fleet.stop()
    store = await open_store(f"unix:{server.socket}", StoreOptions(prefix=prefix))
    try:
        sources, *steps = [await stored_steps(store, name) for name in ("r1", *names)]
    finally:
        await store.close()
        await server.stop()
    for replies, own in zip(played, steps, strict=True):
        assert sorted(step.step_id for step in own) == sorted(step.step_id for step in sources)
        assert sorted(replies) == sorted(recorded)
        assert all(step.inherited == ("r1", step.step_id) for step in own)
