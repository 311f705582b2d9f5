"""Failover of three endpoints under load; one of them is killed."""

import asyncio
import sys

import pytest
from openai import AsyncOpenAI
from tests.support.fakes import proxying
from tests.support.stored import stored_steps

from proxy.server.listener import simulating
from proxy.simulator.options import Options


class KillableEngine:
    """The simulator in a process of its own, which can be killed without closing its connections."""

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


async def engines_when(http, served, condition):
    """Return GET /engines by name when the condition holds."""
    async with asyncio.timeout(30):
        while True:
            async with http.get(served.url + "/engines") as response:
                engines = {engine["name"]: engine for engine in (await response.json())["engines"]}
            if condition(engines):
                return engines
            await asyncio.sleep(0.05)


async def test_killing_one_of_three_endpoints_fails_no_call(store, http, killable):
    """Only its rollouts move to other endpoints, and return when it is restored."""
    options = Options(token_delay_s=0.01)
    rollouts = [f"r{n}" for n in range(30)]
    async with simulating("127.0.0.1:0", options) as second, simulating("127.0.0.1:0", options) as third:
        endpoints = [{"url": url, "name": f"e{n}"} for n, url in enumerate((killable.url, second, third))]
        engines = {"endpoints": endpoints, "health_interval_s": 0.2, "base_ejection_s": 0.1, "max_ejection_s": 0.2}
        async with (
            proxying(None, store, engines=engines) as served,
            AsyncOpenAI(base_url=served.url + "/v1", api_key="x", max_retries=0) as agent,
        ):

            async def call(rollout, times):
                for _ in range(times):
                    body = {"model": "simulated", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
                    await agent.chat.completions.create(**body, extra_headers={"X-Rollout-Id": rollout})

            async def call_all(times):
                await asyncio.gather(*(call(rollout, times) for rollout in rollouts))

            await engines_when(http, served, lambda all_of: all(engine["kind"] == "vllm" for engine in all_of.values()))
            await engines_when(http, served, lambda all_of: all_of["e0"]["ejected_until"] is None)
            await call_all(1)
            load = asyncio.create_task(call_all(6))
            await engines_when(http, served, lambda all_of: all_of["e0"]["in_flight"] > 0)
            await killable.kill()
            await load
            await engines_when(http, served, lambda all_of: all_of["e0"]["ejected_until"] is not None)
            await call_all(1)
            await killable.start()
            await engines_when(http, served, lambda all_of: all_of["e0"]["ejected_until"] is None)
            await call_all(1)

    steps = {rollout: await stored_steps(store, rollout) for rollout in rollouts}
    assert {len(of_rollout) for of_rollout in steps.values()} == {9}
    assert all(step.exact for of_rollout in steps.values() for step in of_rollout)
    names = {rollout: [step.engine.name for step in of_rollout] for rollout, of_rollout in steps.items()}
    moved = [rollout for rollout in rollouts if names[rollout][0] == "e0"]
    assert moved
    for rollout, engines_of_steps in names.items():
        assert engines_of_steps[0] == engines_of_steps[-1]
        assert (
            ("e0" not in engines_of_steps[-2:-1])
            if rollout in moved
            else {engines_of_steps[0]} == set(engines_of_steps)
        )
    assert any("attempts" in step.extra for rollout in moved for step in steps[rollout])
