"""Updates of the weights while engines, proxies and the trainer are killed: no reply is cut, nothing acknowledged is lost."""

import asyncio
import signal
from collections import Counter
from contextlib import suppress
from random import Random
from secrets import token_hex
from types import SimpleNamespace

import aiohttp
import orjson
import pytest
from tests.support.stored import stored_steps
from tests.system.faults.fleet import Fleet

from proxy.simulator.model import load_model
from proxy.simulator.options import Options
from proxy.simulator.prompts import chat_prompt
from proxy.simulator.requests import read_chat, read_common
from storage import StoreOptions, open_store

AGENTS, TOKENS = 5, 40
UPDATES = {"in_flight": "resume"}


def body_of(number: int, *, stream: bool) -> dict:
    """Return a call with a prompt and a seed of its own."""
    messages = [{"role": "user", "content": f"Call number {number}"}]
    limits = {"max_tokens": TOKENS, "ignore_eos": True, "seed": number}
    return {"model": "simulated", "messages": messages, "stream": stream, **limits}


def uninterrupted(number: int) -> tuple[list[int], list[float], str]:
    """Return the ids, the logprobs and the text that an engine samples for a call that nothing interrupts."""
    body, options, model = body_of(number, stream=False), Options(), load_model()
    common = read_common(body, options)
    prompt = chat_prompt(read_chat(body), common, model, options)
    tokens = list(model.generate(prompt.ids, common, prompt.options, number))
    return [t.id for t in tokens], [t.logprobs[0].logprob for t in tokens], "".join(t.text for t in tokens)


class Agents:
    """Agents that make calls at either proxy. `ended` has what their clients read to its end."""

    def __init__(self, http: aiohttp.ClientSession, fleet: Fleet) -> None:
        self._http, self._fleet, self._dice = http, fleet, Random(3)
        self.ended: dict[int, SimpleNamespace] = {}
        self.cut: list[str] = []
        self._stopped = False
        self._tasks = [asyncio.create_task(self._agent(number)) for number in range(AGENTS)]

    async def stop(self) -> None:
        self._stopped = True
        await asyncio.gather(*self._tasks)

    async def _agent(self, agent: int) -> None:
        number = agent
        while not self._stopped:
            number += AGENTS
            url = self._dice.choice(self._fleet.urls[2:])
            before = self._fleet.kills[url]
            failure = await self._call(url, number)
            if failure is not None:
                if before == self._fleet.kills[url] and before % 2 == 0:  # its proxy was not killed meanwhile
                    self.cut.append(f"call {number}: {failure}")
                await asyncio.sleep(0.05)

    async def _call(self, url: str, number: int) -> str | None:
        """Make a call; return why its reply was cut, if it was."""
        body = body_of(number, stream=number % 3 != 0)
        try:
            async with self._http.post(f"{url}/rollouts/a{number % AGENTS}/v1/chat/completions", json=body) as response:
                raw = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            return repr(error)
        if response.status != 200:
            return raw.decode()
        if body["stream"]:
            chunks = [orjson.loads(block[6:]) for block in raw.split(b"\n\n") if block.startswith(b"data: {")]
            choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
            text = "".join(choice["delta"].get("content") or "" for choice in choices)
            reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        else:
            (choice,) = orjson.loads(raw)["choices"]
            text, reasons = choice["message"]["content"], [choice["finish_reason"]]
        self.ended[number] = SimpleNamespace(step_id=response.headers["X-Step-Id"], text=text)
        return None if reasons == ["length"] else raw.decode()


async def update(http: aiohttp.ClientSession, urls: list[str], version: int, *, dies: bool) -> None:
    """Update the weights as a trainer does, which may die before it resumes: the next one repeats all."""
    for method, path, body in (
        ("POST", "/policy/pause?drain_s=5", UPDATES),
        ("PUT", "/policy", {"version": version}),
        ("POST", "/policy/resume", {}),
    ):
        if dies and path == "/policy/resume":
            return
        for url in urls * 40:
            with suppress(aiohttp.ClientError, OSError):
                async with http.request(method, url + path, json=body) as response:
                    if response.status == 200:
                        break
            await asyncio.sleep(0.05)


async def updates(http: aiohttp.ClientSession, urls: list[str], dice: Random) -> None:
    version = 0
    while True:
        version += 1
        await update(http, urls, version, dies=version % 4 == 3)
        await asyncio.sleep(0.1 + dice.random() / 5)


@pytest.mark.timeout(120)
async def test_no_reply_is_cut_and_no_token_is_sampled_twice(server, tmp_path):
    """Each reply is the one of an engine that was never interrupted, and is stored once, with the same ids."""
    prefix, dice = token_hex(8), Random(11)
    fleet = Fleet(tmp_path, server, prefix)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:
        try:
            await fleet.start(http)
            agents = Agents(http, fleet)
            trainer = asyncio.create_task(updates(http, fleet.urls[2:], dice))
            for part in dice.sample([*fleet.engines * 2, *fleet.proxies], 6):
                await asyncio.sleep(0.3 + dice.random() / 2)
                await fleet.kill(http, part)
            trainer.cancel()
            await update(http, fleet.urls[2:], 10_000, dies=False)
            await agents.stop()
            assert {await part.end(signal.SIGTERM) for part in fleet.proxies} == {
                0
            }  # steps of lost clients are written
        finally:
            await fleet.stop()
    store = await open_store(f"unix:{server.socket}", StoreOptions(prefix=prefix))
    try:
        steps = [step for number in range(AGENTS) for step in await stored_steps(store, f"a{number}")]
    finally:
        await store.close()
    stored, versions = Counter(), Counter()
    for step in steps:
        number = int(step.request["messages"][0]["content"].split()[-1])
        ids, logprobs, text = uninterrupted(number)
        for choice in step.choices:
            assert choice.ids.tolist() == ids[: len(choice.ids)], f"call {number}"
            assert choice.logprobs.tolist() == logprobs[: len(choice.ids)], f"call {number}"
            assert [span.start for span in choice.spans[1:]] == [span.end for span in choice.spans[:-1]]
            versions[len(choice.spans)] += 1
        if (ended := agents.ended.get(number)) is not None and ended.step_id == step.step_id:
            stored[number] += 1
            assert (step.status, step.exact, step.sampled) == ("complete", True, TOKENS), f"call {number}"
            assert text == ended.text

    assert agents.cut == []
    assert set(stored.values()) == {1}
    assert stored.keys() == agents.ended.keys()
    assert versions[2] > 3, versions
