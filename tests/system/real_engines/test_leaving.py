"""Calls that end early: agents that disconnect, and updates of weights. Nothing that was sampled is lost."""

import asyncio

import aiohttp
import pytest

from .calls import CHAT, COMPLETIONS, QUESTION, THINKING_OFF
from .through import through_proxy

LONG = {"model": "tiny", "messages": QUESTION, "max_tokens": 1900, "ignore_eos": True}
WORDS = {"max_tokens": 1500, "temperature": 0, "logit_bias": {str(token): 100 for token in range(300, 320)}}
BODIES = {
    CHAT: {"model": "tiny", "messages": QUESTION, **THINKING_OFF, **WORDS},
    COMPLETIONS: {"model": "tiny", "prompt": "Once upon a time", **WORDS},
    "vllm": {"token_ids": [46, 77, 306], "sampling_params": WORDS},
    "sglang": {
        "input_ids": [46, 77, 306],
        "sampling_params": {"max_new_tokens" if name == "max_tokens" else name: WORDS[name] for name in WORDS},
    },
}
GENERATE = {"vllm": "/inference/v1/generate", "sglang": "/generate"}
TIMEOUT_S = 30


@pytest.fixture(autouse=True)
async def described(engine):
    """Have vLLM describe its routes once: the first time may take longer than a detection waits for it."""
    async with aiohttp.ClientSession() as http, http.get(f"{engine.url}/openapi.json") as response:
        await response.read()


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

    assert (step["status"], step["delivered"], step["reason"]) == ("partial", False, "the client disconnected")
    assert "stream_cut" in step["fidelity"]["problems"]
    assert sum(len(choice["ids"]) for choice in step["choices"]) < 1900
    (choice,) = step["choices"]  # the call is aborted by its id, and its response has what was sampled
    assert 0 < len(choice["ids"]) == len(choice["logprobs"])
    assert choice["finish_reason"] == "abort"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "generate"])
async def test_an_unstreamed_call_that_is_interrupted_loses_no_token(engine, tmp_path, path):
    """It goes on after the pause, and is recorded as a call that was never interrupted."""
    async with through_proxy(engine.url, tmp_path) as proxy, aiohttp.ClientSession() as http:

        async def post(path, body):
            async with http.post(proxy.url + path, json=body) as response:
                assert response.status == 200, await response.text()
                return await response.json()

        await until(lambda kind: kind == engine.kind, proxy.kind)
        body, path = (BODIES[engine.kind], GENERATE[engine.kind]) if path == "generate" else (BODIES[path], path)
        whole = await post(f"/rollouts/r1{path}", body)
        before = await engine.metric("sampled")
        calling = asyncio.ensure_future(post(f"/rollouts/r2{path}", body))
        await until(lambda sampled: sampled > before, lambda: engine.metric("sampled"))
        await post("/policy/pause?drain_s=20", {"in_flight": "resume"})
        await post("/policy/resume", {})
        resumed = await calling
        (first,), (second,) = await proxy.steps("r1"), await proxy.steps("r2")

    assert second["extra"]["resumed"] == 1
    assert 0 < second["extra"]["attempts"][0]["tokens"] < 1500 == len(second["choices"][0]["ids"])
    assert first["choices"][0]["ids"] == second["choices"][0]["ids"]
    assert second["fidelity"]["problems"] == []
    for each in (whole, resumed):
        each.get("choices", [{}])[0].pop("logprobs", None)
    names = ("choices", "text", "output_ids")
    assert [whole.get(name) for name in names] == [resumed.get(name) for name in names]


async def _steps(proxy):
    """Return the recorded steps; none if the rollout does not exist yet."""
    return await proxy.steps("r1")
