"""Rolling updates of two real vLLMs while calls are in flight."""

import asyncio
from collections import Counter
from itertools import count

import aiohttp
import pytest

from proxy.config.settings import load
from proxy.server.listener import running
from tokentape import AsyncClient

from . import environment
from .calls import THINKING_OFF
from .conftest import OWN_TEMPLATES, PARSERS, SCALE_OUT, start_vllm
from .test_leaving import until
from .test_resume import counted, no_broken_text, trained
from .through import Through

TOKENS, CALLS, UPDATES = 400, 3, 3
BODY = {"model": "tiny", "temperature": 0}


@pytest.fixture(scope="module")
def second_vllm(tmp_path_factory):
    log = tmp_path_factory.mktemp("engine") / "vllm.log"
    with start_vllm(environment.ensure().model, "tiny", log, *PARSERS, SCALE_OUT, OWN_TEMPLATES) as engine:
        yield engine


async def reply(proxy, number, extra):
    """Return the text of a reply, which is streamed for every other number."""
    request = {"messages": [{"role": "user", "content": f"Tell story {number}."}], "max_tokens": TOKENS, **BODY}
    async with proxy.agent(f"r{number}") as agent:
        if number % 2:
            stream = await agent.chat.completions.create(**request, extra_body=extra, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
        response = await agent.chat.completions.create(**request, extra_body=extra)
        return response.choices[0].message.content


async def replies_of(proxy, extra):
    """Return a reply for some rollouts of each endpoint, by their numbers."""
    found, counts = {}, Counter()
    numbers = count()
    while len(found) < 2 * CALLS:
        text = await reply(proxy, number := next(numbers), extra)
        (step,) = await proxy.steps(f"r{number}")
        if counts[step["engine"]["name"]] < CALLS:
            found[number] = text
            counts[step["engine"]["name"]] += 1
    return found


async def test_agents_do_not_notice_rolling_updates(vllm, second_vllm, tmp_path):
    """The calls of an endpoint move to the other one: no reply is another, no token is lost, and each has its version."""
    engines = {"first": vllm, "second": second_vllm}
    endpoints = [{"url": engine.url, "name": name} for name, engine in engines.items()]
    store = {"url": f"embedded:{tmp_path / 'store'}"}
    settings = load(listen="127.0.0.1:0", engines={"endpoints": endpoints}, store=store)
    extra, replies, is_over = THINKING_OFF | {"ignore_eos": True, "logit_bias": no_broken_text()}, [], asyncio.Event()
    async with aiohttp.ClientSession() as http:
        for engine in engines.values():  # the first time may take longer than a detection waits for it
            async with http.get(f"{engine.url}/openapi.json") as response:
                await response.read()
        async with running(settings) as served, AsyncClient(served.url) as client:
            proxy = Through(served.url, http)
            expected = await replies_of(proxy, extra)

            async def play(number):
                while not is_over.is_set():
                    replies.append((await reply(proxy, number, extra), expected[number]))

            async with asyncio.TaskGroup() as agents:
                for number in expected:
                    agents.create_task(play(number))
                for version in range(UPDATES):
                    for engine in engines.values():
                        await until(lambda count: count >= 1, engine.running)

                    async def update(endpoint, version=version):
                        await trained(http, engines[endpoint["label"]], version)

                    await client.update_policy(version, update, rolling=True)
                is_over.set()
            steps = [step for number in expected for step in await proxy.steps(f"r{number}")]
            tokens = await counted(http, proxy, "tokentape_cut_tokens_total")
        for engine in engines.values():
            await trained(http, engine, "default")

    assert [pair for pair in replies if pair[0] != pair[1]] == []
    assert len(replies) + len(expected) == len(steps)
    assert {(step["status"], len(step["choices"][0]["ids"])) for step in steps} == {("complete", TOKENS)}
    assert tokens.keys() == {("kept",)}
    cut = [attempt["endpoint"] for step in steps for attempt in step["extra"].get("attempts", ())]
    assert {"first", "second"} == {*cut}
    assert any(len(step["choices"][0]["spans"]) > 1 for step in steps)
