"""Which endpoints there are; and a fleet of them under load, of which one dies."""

import asyncio
import sys

import orjson
import pytest
from fakes import proxying
from openai import AsyncOpenAI
from stored import stored_steps

from proxy.config.sections import EndpointSettings
from proxy.server.listener import simulating
from proxy.simulator.options import Options
from proxy.upstream.registry import ENGINES_ANNOUNCEMENT, EndpointRegistry
from storage.types import Announcement

CONFIGURED = [EndpointSettings(url="http://127.0.0.1:1", name="configured")]
PUT = [EndpointSettings(url="http://127.0.0.1:2", name="put", api_key="planted", kind="vllm", max_in_flight=8)]


@pytest.fixture
def fleet(store):
    told = []
    fleet = EndpointRegistry(store.announcements, CONFIGURED, [told.append])
    fleet.heard = told
    return fleet


async def test_what_is_put_comes_back_as_it_was(store, fleet):
    """With its key; and with None the configured ones."""
    await fleet.put(PUT)
    assert ([PUT], True) == (fleet.heard, fleet.is_overridden)
    assert "planted" == fleet.heard[0][0].api_key.get_secret_value()

    later = EndpointRegistry(store.announcements, CONFIGURED, [])
    later.apply(await store.announcements.read())
    assert later.is_overridden
    await fleet.put(None)
    assert (CONFIGURED, False) == (fleet.heard[-1], fleet.is_overridden)


async def test_what_is_older_changes_nothing(fleet):
    """Answers of the store may overtake each other."""
    await fleet.put(PUT)
    fleet.apply({ENGINES_ANNOUNCEMENT: Announcement(b"null", fleet.number)})
    fleet.apply({})

    assert ([PUT], True) == (fleet.heard, fleet.is_overridden)


async def test_what_cannot_be_read_is_left_alone(fleet, caplog):
    """A process of a later version may know fields that this one does not: its calls go on, and no key is logged."""
    said = orjson.dumps([{"url": "http://x", "api_key": "planted", "weight": "planted-too"}])
    fleet.apply({ENGINES_ANNOUNCEMENT: Announcement(said, 7)})

    assert ([], False, 7) == (fleet.heard, fleet.is_overridden, fleet.number)
    assert "0.weight" in caplog.text
    assert "planted" not in caplog.text


class KillableEngine:
    """The simulator as a process of its own on a port of its own: what is killed leaves no goodbye."""

    def __init__(self, port: int) -> None:
        self.port, self.url = port, f"http://127.0.0.1:{port}"
        self.process = None

    async def start(self) -> None:
        words = ("-m", "proxy", "simulate", "--listen", f"127.0.0.1:{self.port}", "--token-delay-s", "0.01")
        nothing = asyncio.subprocess.DEVNULL
        self.process = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=nothing, stderr=nothing)

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


@pytest.fixture
async def killable(unused_tcp_port):
    engine = KillableEngine(unused_tcp_port)
    await engine.start()
    yield engine
    await engine.kill()


async def shown_until(http, served, condition):
    """GET /engines, by name, once it is so."""
    async with asyncio.timeout(30):
        while True:
            async with http.get(served.url + "/engines") as answer:
                engines = {one["name"]: one for one in (await answer.json())["engines"]}
            if condition(engines):
                return engines
            await asyncio.sleep(0.05)


async def test_of_three_endpoints_one_dies_under_load_and_comes_back(store, http, killable):
    """No call fails; its rollouts alone leave the dead endpoint, and are at their own again when it is back."""
    options = Options(token_delay_s=0.01)
    rollouts = [f"r{n}" for n in range(30)]
    async with simulating("127.0.0.1:0", options) as one, simulating("127.0.0.1:0", options) as other:
        endpoints = [{"url": url, "name": f"e{n}"} for n, url in enumerate((killable.url, one, other))]
        engines = {"endpoints": endpoints, "health_interval_s": 0.2, "base_ejection_s": 0.1, "max_ejection_s": 0.2}
        async with (
            proxying(None, store, engines=engines) as served,
            AsyncOpenAI(base_url=served.url + "/v1", api_key="x", max_retries=0) as agent,
        ):

            async def ask(rollout, times):
                for _ in range(times):
                    said = {"model": "simulated", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
                    await agent.chat.completions.create(**said, extra_headers={"X-Rollout-Id": rollout})

            async def ask_all(times):
                await asyncio.gather(*(ask(rollout, times) for rollout in rollouts))

            await shown_until(http, served, lambda all_of: all(each["kind"] == "vllm" for each in all_of.values()))
            await shown_until(http, served, lambda all_of: all_of["e0"]["ejected_until"] is None)
            await ask_all(1)
            load = asyncio.create_task(ask_all(6))
            await shown_until(http, served, lambda all_of: all_of["e0"]["in_flight"] > 0)
            await killable.kill()
            await load
            await shown_until(http, served, lambda all_of: all_of["e0"]["ejected_until"] is not None)
            await ask_all(1)
            await killable.start()
            await shown_until(http, served, lambda all_of: all_of["e0"]["ejected_until"] is None)
            await ask_all(1)

    steps = {rollout: await stored_steps(store, rollout) for rollout in rollouts}
    assert {9} == {len(each) for each in steps.values()}
    assert all(step.exact for each in steps.values() for step in each)
    names = {rollout: [step.engine.name for step in each] for rollout, each in steps.items()}
    moved = [rollout for rollout in rollouts if names[rollout][0] == "e0"]
    assert moved
    for rollout, each in names.items():
        assert each[0] == each[-1]
        assert ("e0" not in each[-2:-1]) if rollout in moved else {each[0]} == set(each)
    assert any("attempts" in step.extra for rollout in moved for step in steps[rollout])
