"""The client's side of a call: synthetic streams, keep-alive comments, disconnects, and lookups before the end."""

import asyncio

import orjson
import pytest
from aiohttp import web
from openai import AsyncOpenAI
from tests.support.fakes import proxying
from tests.support.recorded import load, load_http
from tests.support.session import BODY, CHAT, one_call, session_with
from tests.support.stored import stored_steps, wait_for_steps

from proxy.server.listener import simulating
from proxy.simulator.options import Options

WHOLE = load("chat_ids_lp")
STREAMED = BODY | {"stream": True}
REPLAYED = {"record": {"streaming": "replay", "keep_alive_interval_s": 0.01}}


async def test_the_openai_client_reads_a_synthetic_stream(store, engine):
    """The engine gets an unstreamed request; the stream has the requested usage."""
    engine.plays(WHOLE)
    async with proxying(engine.url, store, record={"streaming": "replay"}) as served:
        client = AsyncOpenAI(base_url=f"{served.url}/rollouts/r1/v1", api_key="none")
        stream = await client.chat.completions.create(**STREAMED, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        await client.close()

    (step,) = await stored_steps(store, "r1")
    whole = orjson.loads(WHOLE.response)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert whole["choices"][0]["message"]["content"] == text
    assert whole["usage"]["total_tokens"] == chunks[-1].usage.total_tokens
    assert not {"stream", "stream_options"} & engine.requests[0].keys()
    assert (step.exact, step.extra["streaming"], step.delivered) == (True, "replay", True)
    assert step.request["stream"] is True


async def after_comments(engine, store, http, *, status=200, body=None, count=1):
    """Return the response of a replayed call, its first comments, and what follows the last one.

    The engine answers after the comments, or disconnects.
    """
    done = asyncio.Event()

    async def respond(request: web.Request, _body: dict) -> web.StreamResponse:
        await done.wait()
        if body is None:
            request.transport.close()
            raise ConnectionResetError
        return web.Response(body=body, status=status, content_type="application/json")

    engine.respond = respond
    async with (
        proxying(engine.url, store, **REPLAYED) as served,
        http.post(served.url + CHAT, json=STREAMED) as response,
    ):
        first = [await response.content.readuntil(b"\n\n") for _ in range(count)]
        done.set()
        return response, first, (await response.content.read()).rpartition(b": keep-alive\n\n")[2]


async def test_a_client_that_waits_for_a_synthetic_stream_gets_keep_alive_comments(store, engine, http):
    """They prevent client timeouts while the engine samples."""
    response, first, remainder = await after_comments(engine, store, http, body=WHOLE.response, count=2)

    assert first == [b": keep-alive\n\n"] * 2
    assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert response.headers["X-Rollout-Id"] == "r1"
    assert remainder.endswith(b"data: [DONE]\n\n")
    assert (await stored_steps(store, "r1"))[0].exact


async def test_an_engine_error_before_the_first_comment_keeps_its_status(store, engine):
    engine.plays(load("err_temp"))
    response, _ = await one_call(engine, store, STREAMED, record={"streaming": "replay"})

    assert (response.status, response.kind) == (400, "application/json")
    assert load("err_temp").response == response.text


async def test_an_engine_error_after_the_first_comment_is_an_event(store, engine, http):
    """The status was sent already; the step has the engine's status."""
    _, _, remainder = await after_comments(engine, store, http, body=load("err_temp").response, status=400)

    assert remainder[:26] == b'data: {"error":{"message":'
    assert remainder.endswith(b"data: [DONE]\n\n")
    assert (await stored_steps(store, "r1"))[0].response["status"] == 400


async def test_an_engine_disconnect_after_the_first_comment_is_an_error_event(store, engine, http):
    _, _, remainder = await after_comments(engine, store, http)

    assert b"disconnected" in remainder
    assert remainder.endswith(b"data: [DONE]\n\n")


async def test_a_client_disconnect_during_a_synthetic_stream_aborts_the_engines_request(store, engine, http):
    """The step is recorded as not delivered."""
    engine.hangs()
    async with proxying(engine.url, store, **REPLAYED) as served:
        response = await http.post(served.url + CHAT, json=STREAMED)
        await response.content.readuntil(b"\n\n")
        response.close()
        await asyncio.wait_for(engine.aborted.wait(), 50)
        (step,) = await wait_for_steps(store, "r1")

    assert (step.status, step.delivered, step.sampled) == ("partial", False, 0)


async def call_llamacpp(engine, store, lookup):
    """Make a streamed call; llama.cpp returns the prompt as text, and answers /tokenize with `lookup`."""
    verbose, lookups = load_http("llamacpp", "chat_verbose"), []

    async def respond(request: web.Request, body: dict) -> web.StreamResponse:
        if request.path == "/tokenize":
            lookups.append(body)
            return lookup
        return web.Response(body=verbose.response, content_type="application/json")

    engine.respond = respond
    endpoint = {"url": engine.url, "kind": "llamacpp"}
    return *(await one_call(None, store, STREAMED, engines={"endpoints": [endpoint]})), lookups


async def test_missing_prompt_ids_are_looked_up_before_the_end_is_sent(store, engine):
    """They come from /tokenize, and the step is exact."""
    found = web.json_response({"tokens": list(range(30))})
    response, step, lookups = await call_llamacpp(engine, store, found)

    assert response.text.endswith(b"data: [DONE]\n\n")
    assert step.problems == ()
    assert step.prompts[0].tolist() == list(range(30))
    assert [body["content"].startswith("<|im_start|>") for body in lookups] == [True]


@pytest.mark.parametrize("status", [200, 500])
async def test_a_failed_lookup_flags_the_step(store, engine, status):
    """The client's response is unaffected."""
    response, step, _ = await call_llamacpp(engine, store, web.Response(body=b"no JSON", status=status))

    assert response.status == 200
    assert "no_prompt_ids" in step.problems


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 8}),
    ],
)
async def test_a_translated_stream_is_replayed_where_a_chat_stream_is(store, path, body):
    """Such as by an SGLang without a parser; the options of the chat stream are the translation's own."""
    async with simulating("127.0.0.1:0", Options(shape="sglang", has_parser=False)) as engine:
        response, step = await one_call(engine, store, body | {"stream": True}, f"/rollouts/r1{path}")

    assert response.status == 200, response.text
    assert (step.problems, step.extra["streaming"]) == ((), "replay")
    assert str(len(step.prompts[0])).encode() in response.text  # the usage has the length of the prompt


LOST = 'tokentape_unexpected_losses_total{code="no_token_ids",engine="fake"} '


async def test_an_unexpected_loss_is_counted(store, engine):
    """vLLM without token ids is unexpected; for a completion with `echo`, TokenTape does not request ids."""
    text = {"object": "text_completion", "choices": [{"index": 0, "text": "hi there", "finish_reason": "stop"}]}
    async with session_with(engine, store) as session:
        engine.answers(text)
        await session.post("/rollouts/r1/v1/completions", {"model": "tiny", "prompt": "hi", "echo": True})
        before = (await session.get("/metrics")).text.decode()
        engine.plays(load("chat_plain"))
        await session.post(CHAT, BODY)
        after = (await session.get("/metrics")).text.decode()

    assert {"echo", "no_token_ids"} <= {*(await stored_steps(store, "r1"))[0].problems}
    assert LOST + "0.0" in before
    assert LOST + "1.0" in after
