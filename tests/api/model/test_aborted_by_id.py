"""Calls to a vLLM that aborts calls by their ids: nothing that was sampled is lost if they are interrupted or left."""

import asyncio
from contextlib import asynccontextmanager

import orjson
import pytest
from tests.support.fakes import proxying
from tests.support.stored import stored_steps, wait_for_steps

from proxy.server.listener import simulating
from proxy.simulator.options import Options

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "Count to a hundred."}]},
    COMPLETIONS: {"prompt": "Once upon a time"},
}
TOKENS = 60
EXACT = {"model": "simulated", "max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
UNSTREAMED = [(CHAT, "auto"), (COMPLETIONS, "auto"), (CHAT, "replay")]


@asynccontextmanager
async def serving(store, *, streaming="auto", **options):
    """Yield the URLs of such an engine and of a proxy in front of it."""
    options = Options(**{"lists_aborts": True, "token_delay_s": 0.01, "has_parser": False, **options})
    sections = {"record": {"streaming": streaming}, "agents": {"max_resumes": 9}}
    async with simulating("127.0.0.1:0", options) as engine_url, proxying(engine_url, store, **sections) as served:
        yield engine_url, served.url


async def until_some_are_sampled(http, engine_url):
    """Wait until the engine has a call, and for a few of its tokens."""
    async with asyncio.timeout(20):
        while True:
            async with http.get(f"{engine_url}/metrics") as response:
                if "} 1.0" in await response.text():
                    break
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)


async def post(http, url, body, **headers):
    async with http.post(url, json=body, headers=headers) as response:
        return await response.read()


@pytest.mark.parametrize(("path", "streaming"), UNSTREAMED, ids=["chat", "completions", "replayed"])
async def test_an_interrupted_call_that_the_engine_does_not_stream_goes_on_with_all_its_tokens(
    store, http, path, streaming
):
    """Nothing is sampled twice: the reply equals that of an engine that was never interrupted."""
    body = BODIES[path] | EXACT | ({"stream": True} if streaming == "replay" else {})
    async with serving(store, streaming=streaming, token_delay_s=0.0) as (_, url):
        await post(http, f"{url}/rollouts/r1{path}", body)
    async with serving(store, streaming=streaming, token_delay_s=0.04) as (engine_url, url):
        calling = asyncio.create_task(post(http, f"{url}/rollouts/r2{path}", body))
        await until_some_are_sampled(http, engine_url)
        await post(http, f"{url}/policy/pause?drain_s=20", {"in_flight": "resume"})
        await post(http, f"{url}/policy/resume", {})
        await calling
        (whole,), (step,) = await stored_steps(store, "r1"), await stored_steps(store, "r2")
        async with http.get(f"{url}/metrics") as response:
            metrics = await response.text()

    assert (step.extra["resumed"], step.sampled) == (1, TOKENS)
    assert 0 < step.extra["attempts"][0]["tokens"] < TOKENS
    assert (whole.prompts, whole.choices[0].ids) == (step.prompts, step.choices[0].ids)
    assert 'cut_tokens_total{result="lost"} 0.0' in metrics
    assert step.problems == ()


async def test_an_interrupted_call_waits_longer_for_its_tokens_than_one_whose_client_has_left(store, http, monkeypatch):
    """The server of a busy engine is behind it; what it has not sent yet would be sampled again."""
    monkeypatch.setattr("proxy.api.model.relay._ABORT_TIMEOUT_S", 0.0)
    body = BODIES[CHAT] | EXACT
    async with serving(store, token_delay_s=0.04) as (engine_url, url):
        calling = asyncio.create_task(post(http, f"{url}/rollouts/r1{CHAT}", body))
        await until_some_are_sampled(http, engine_url)
        await post(http, f"{url}/policy/pause?drain_s=20", {"in_flight": "resume"})
        await post(http, f"{url}/policy/resume", {})
        await calling
        (step,) = await stored_steps(store, "r1")

    assert (step.extra["resumed"], step.sampled) == (1, TOKENS)
    assert 0 < step.extra["attempts"][0]["tokens"] < TOKENS


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", BODIES)
async def test_a_client_that_leaves_leaves_all_that_was_sampled(store, http, path, stream):
    """The engine is requested to abort the call, and its response ends with what it sampled."""
    async with serving(store) as (engine_url, url):
        body = BODIES[path] | EXACT | {"max_tokens": 5000, "stream": stream}
        calling = asyncio.create_task(post(http, f"{url}/rollouts/r1{path}", body))
        await until_some_are_sampled(http, engine_url)
        calling.cancel()
        (step,) = await wait_for_steps(store, "r1")

    assert (step.status, step.delivered, step.reason) == ("partial", False, "the client disconnected")
    assert {"stream_cut", "aborted"} >= {*step.problems}
    (choice,) = step.choices
    assert 0 < len(choice.ids) == len(choice.logprobs) < 5000
    assert step.response["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize("headers", [{}, {"X-Request-Id": "mine"}])
async def test_only_a_client_that_names_its_call_chooses_the_id_of_the_response(store, http, headers):
    """Calls of the same form with and without the header have plans of their own."""
    async with serving(store, token_delay_s=0.0) as (_, url):
        named = [
            orjson.loads(await post(http, f"{url}/rollouts/r1{CHAT}", BODIES[CHAT] | EXACT, **sent))["id"]
            for sent in ({"X-Request-Id": "mine"}, headers, {"X-Request-Id": "mine"})
        ]
        steps = await stored_steps(store, "r1")

    assert ["chatcmpl-mine", bool(headers), "chatcmpl-mine"] == [named[0], named[1] == "chatcmpl-mine", named[2]]
    assert ["request_id" in step.sent["set"] for step in steps] == [False, not headers, False]
    assert all(step.exact for step in steps)
