"""Agents that disconnect: the engine stops, and the received tokens are recorded."""

import asyncio

import aiohttp
import pytest

from .calls import CHAT, QUESTION
from .through import through_proxy

LONG = {"model": "tiny", "messages": QUESTION, "max_tokens": 1900, "ignore_eos": True}
TIMEOUT_S = 30


async def until(reached, what):
    """Wait until a metric of the engine satisfies the condition; it has no notification."""
    async with asyncio.timeout(TIMEOUT_S):
        while not reached(await what()):
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_client_disconnect_stops_the_engine(engine, tmp_path, stream):
    """The engine's running requests return to zero long before the reply would have ended."""
    async with through_proxy(engine.url, tmp_path) as proxy, aiohttp.ClientSession() as http:
        await until(lambda running: running == 0, engine.running)
        calling = asyncio.ensure_future(http.post(f"{proxy.url}/rollouts/r1{CHAT}", json=LONG | {"stream": stream}))
        await until(lambda running: running == 1, engine.running)
        if stream:
            response = await calling
            await response.content.readuntil(b"\n\n")
            response.close()
        else:
            calling.cancel()
        await until(lambda running: running == 0, engine.running)
        await until(lambda steps: len(steps) == 1, lambda: _steps(proxy))
        (step,) = await proxy.steps("r1")

    assert ("partial", False, "the client disconnected") == (step["status"], step["delivered"], step["reason"])
    assert "stream_cut" in step["fidelity"]["problems"]
    assert sum(len(choice["ids"]) for choice in step["choices"]) < 1900
    # A call to SGLang is aborted, and its response has the ids; vLLM's ids come with the events.
    assert all(len(choice["ids"]) in (0, len(choice["logprobs"])) for choice in step["choices"])
    assert (stream or engine.kind == "sglang") == any(choice["ids"] for choice in step["choices"])


async def _steps(proxy):
    """Return the recorded steps; none if the rollout does not exist yet."""
    return await proxy.steps("r1")
