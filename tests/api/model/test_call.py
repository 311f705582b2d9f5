"""The client's side of a call: synthetic streams, keep-alive comments, disconnects, and lookups before the end."""

import asyncio

import orjson
import pytest
from aiohttp import web
from openai import AsyncOpenAI
from tests.support.fakes import proxying
from tests.support.recorded import load, load_http
from tests.support.stored import stored_steps, wait_for_steps

from proxy.server.listener import simulating
from proxy.simulator.options import Options

WHOLE = load("chat_ids_lp")
CHAT = "/rollouts/r1/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}


def proxying_replay(url: str, store, **record):
    return proxying(url, store, record={"streaming": "replay", **record})


def respond_after(event: asyncio.Event, body: bytes, status: int = 200):
    async def respond(request: web.Request, _body: dict) -> web.StreamResponse:
        await event.wait()
        return web.Response(body=body, status=status, content_type="application/json")

    return respond


async def test_the_openai_client_reads_a_synthetic_stream(store, engine):
    """The engine gets an unstreamed request; the stream has the requested usage."""
    engine.plays(WHOLE)
    async with proxying_replay(engine.url, store) as served:
        client = AsyncOpenAI(base_url=f"{served.url}/rollouts/r1/v1", api_key="none")
        stream = await client.chat.completions.create(**BODY, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        await client.close()

    (step,) = await stored_steps(store, "r1")
    whole = orjson.loads(WHOLE.response)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert whole["choices"][0]["message"]["content"] == text
    assert whole["usage"]["total_tokens"] == chunks[-1].usage.total_tokens
    assert not {"stream", "stream_options"} & engine.requests[0].keys()
    assert (True, "replay", True) == (step.exact, step.extra["streaming"], step.delivered)
    assert BODY["stream"] is step.request["stream"]


async def test_a_client_that_waits_for_a_synthetic_stream_gets_keep_alive_comments(store, engine, http):
    """They prevent client timeouts while the engine samples."""
    done = asyncio.Event()
    engine.respond = respond_after(done, WHOLE.response)
    async with (
        proxying_replay(engine.url, store, keep_alive_interval_s=0.01) as served,
        http.post(served.url + CHAT, json=BODY) as response,
    ):
        first = [await response.content.readuntil(b"\n\n") for _ in range(2)]
        done.set()
        remainder = await response.content.read()

    assert [b": keep-alive\n\n"] * 2 == first
    assert "text/event-stream; charset=utf-8" == response.headers["Content-Type"]
    assert "r1" == response.headers["X-Rollout-Id"]
    assert remainder.endswith(b"data: [DONE]\n\n")
    assert (await stored_steps(store, "r1"))[0].exact


async def test_an_engine_error_before_the_first_comment_keeps_its_status(store, engine, http):
    engine.plays(load("err_temp"))
    async with proxying_replay(engine.url, store) as served, http.post(served.url + CHAT, json=BODY) as response:
        body = await response.read()

    assert (400, "application/json") == (response.status, response.content_type)
    assert load("err_temp").response == body


async def test_an_engine_error_after_the_first_comment_is_an_event(store, engine, http):
    """The status was sent already; the step has the engine's status."""
    done = asyncio.Event()
    engine.respond = respond_after(done, load("err_temp").response, status=400)
    async with (
        proxying_replay(engine.url, store, keep_alive_interval_s=0.01) as served,
        http.post(served.url + CHAT, json=BODY) as response,
    ):
        await response.content.readuntil(b"\n\n")
        done.set()
        remainder = (await response.content.read()).rpartition(b": keep-alive\n\n")[2]

    assert b'data: {"error":{"message":' == remainder[:26]
    assert remainder.endswith(b"data: [DONE]\n\n")
    assert 400 == (await stored_steps(store, "r1"))[0].response["status"]


async def test_an_engine_disconnect_after_the_first_comment_is_an_error_event(store, engine, http):
    die = asyncio.Event()

    async def respond(request: web.Request, body: dict) -> web.StreamResponse:
        await die.wait()
        request.transport.close()
        raise ConnectionResetError

    engine.respond = respond
    async with (
        proxying_replay(engine.url, store, keep_alive_interval_s=0.01) as served,
        http.post(served.url + CHAT, json=BODY) as response,
    ):
        await response.content.readuntil(b"\n\n")
        die.set()
        remainder = (await response.content.read()).rpartition(b": keep-alive\n\n")[2]

    assert b"disconnected" in remainder
    assert remainder.endswith(b"data: [DONE]\n\n")


async def test_a_client_disconnect_during_a_synthetic_stream_aborts_the_engines_request(store, engine, http):
    """The step is recorded as not delivered."""
    engine.hangs()
    async with proxying_replay(engine.url, store, keep_alive_interval_s=0.01) as served:
        response = await http.post(served.url + CHAT, json=BODY)
        await response.content.readuntil(b"\n\n")
        response.close()
        await asyncio.wait_for(engine.aborted.wait(), 50)
        (step,) = await wait_for_steps(store, "r1")

    assert ("partial", False, 0) == (step.status, step.delivered, step.sampled)


async def test_a_client_disconnect_before_the_first_comment_aborts_the_engines_request(store, engine, http):
    engine.hangs()
    async with proxying_replay(engine.url, store) as served:
        call = asyncio.ensure_future(http.post(served.url + CHAT, json=BODY))
        await engine.reached.wait()
        call.cancel()
        await asyncio.wait_for(engine.aborted.wait(), 50)
        (step,) = await wait_for_steps(store, "r1")

    assert not step.delivered


async def test_missing_prompt_ids_are_looked_up_before_the_end_is_sent(store, engine, http):
    """llama.cpp returns the prompt as text; its ids come from /tokenize, and the step is exact."""
    verbose = load_http("llamacpp", "chat_verbose")
    lookups: list[dict] = []

    async def respond(request: web.Request, body: dict) -> web.StreamResponse:
        if request.path == "/tokenize":
            lookups.append(body)
            return web.json_response({"tokens": list(range(30))})
        return web.Response(body=verbose.response, content_type="application/json")

    engine.respond = respond
    endpoint = {"url": engine.url, "kind": "llamacpp"}
    async with (
        proxying(None, store, engines={"endpoints": [endpoint]}) as served,
        http.post(served.url + CHAT, json=BODY) as response,
    ):
        stream = await response.read()

    (step,) = await stored_steps(store, "r1")
    assert stream.endswith(b"data: [DONE]\n\n")
    assert () == step.problems
    assert list(range(30)) == step.prompts[0].tolist()
    assert [True] == [body["content"].startswith("<|im_start|>") for body in lookups]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 8}),
    ],
)
async def test_a_translated_stream_is_replayed_where_a_chat_stream_is(store, http, path, body):
    """Such as by an SGLang without a parser; the options of the chat stream are the translation's own."""
    async with simulating("127.0.0.1:0", Options(shape="sglang", has_parser=False)) as engine:
        async with (
            proxying(engine, store) as served,
            http.post(f"{served.url}/rollouts/r1{path}", json=body | {"stream": True}) as response,
        ):
            assert 200 == response.status, await response.text()
            stream = await response.text()
        (step,) = await stored_steps(store, "r1")

    assert ((), "replay") == (step.problems, step.extra["streaming"])
    assert str(len(step.prompts[0])) in stream  # the usage has the length of the prompt


@pytest.mark.parametrize("status", [200, 500])
async def test_a_failed_lookup_flags_the_step(store, engine, http, status):
    """The client's response is unaffected."""
    verbose = load_http("llamacpp", "chat_verbose")

    async def respond(request: web.Request, body: dict) -> web.StreamResponse:
        if request.path == "/tokenize":
            return web.Response(body=b"no JSON", status=status)
        return web.Response(body=verbose.response, content_type="application/json")

    engine.respond = respond
    endpoint = {"url": engine.url, "kind": "llamacpp"}
    async with (
        proxying(None, store, engines={"endpoints": [endpoint]}) as served,
        http.post(served.url + CHAT, json=BODY) as response,
    ):
        await response.read()

    (step,) = await stored_steps(store, "r1")
    assert 200 == response.status
    assert "no_prompt_ids" in step.problems


async def test_an_unexpected_loss_is_counted(store, engine, http):
    """vLLM without token ids is unexpected."""
    engine.plays(load("chat_plain"))
    async with proxying(engine.url, store) as served:
        async with http.post(served.url + CHAT, json=BODY | {"stream": False}) as response:
            await response.read()
        async with http.get(served.url + "/metrics") as shown:
            metrics = await shown.text()

    assert 'tokentape_unexpected_losses_total{code="no_token_ids",engine="fake"} 1.0' in metrics


async def test_a_loss_caused_by_the_request_is_not_counted_as_unexpected(store, engine, http):
    """For a completion with `echo`, TokenTape does not request ids."""
    text = {"object": "text_completion", "choices": [{"index": 0, "text": "hi there", "finish_reason": "stop"}]}

    async def respond(request: web.Request, body: dict) -> web.StreamResponse:
        return web.json_response(text)

    engine.respond = respond
    body = {"model": "tiny", "prompt": "hi", "echo": True}
    async with proxying(engine.url, store) as served:
        async with http.post(served.url + "/rollouts/r1/v1/completions", json=body) as response:
            await response.read()
        async with http.get(served.url + "/metrics") as shown:
            metrics = await shown.text()

    (step,) = await stored_steps(store, "r1")
    assert {"echo", "no_token_ids"} <= {*step.problems}
    assert 'tokentape_unexpected_losses_total{code="no_token_ids",engine="fake"} 0.0' in metrics
