"""The client's side of a call: replayed streams over real sockets, with what keeps them alive."""

import asyncio

import orjson
import pytest
from aiohttp import web
from fakes import proxying
from openai import AsyncOpenAI
from recorded import load, load_http
from stored import stored_steps, wait_for_steps

WHOLE = load("chat_ids_lp")
CHAT = "/rollouts/r1/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}


def replaying(url: str, store, **record):
    return proxying(url, store, record={"streaming": "replay", **record})


def answering_after(event: asyncio.Event, body: bytes, status: int = 200):
    async def respond(request: web.Request, asked: dict) -> web.StreamResponse:
        await event.wait()
        return web.Response(body=body, status=status, content_type="application/json")

    return respond


async def test_a_replayed_call_is_a_stream_to_the_official_client(store, engine):
    """The engine is asked unstreamed; the client reads its chunks as ever, with the usage that it asked for."""
    engine.plays(WHOLE)
    async with replaying(engine.url, store) as served:
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


async def test_a_waiting_client_hears_comments(store, engine, http):
    """So that no timeout bites while the engine is at work on the whole answer."""
    done = asyncio.Event()
    engine.respond = answering_after(done, WHOLE.response)
    async with (
        replaying(engine.url, store, keep_alive_interval_s=0.01) as served,
        http.post(served.url + CHAT, json=BODY) as response,
    ):
        first = [await response.content.readuntil(b"\n\n") for _ in range(2)]
        done.set()
        rest = await response.content.read()

    assert [b": keep-alive\n\n"] * 2 == first
    assert "text/event-stream; charset=utf-8" == response.headers["Content-Type"]
    assert "r1" == response.headers["X-Rollout-Id"]
    assert rest.endswith(b"data: [DONE]\n\n")
    assert (await stored_steps(store, "r1"))[0].exact


async def test_an_error_of_the_engine_keeps_its_status_before_the_first_comment(store, engine, http):
    """As it would without us."""
    engine.plays(load("err_temp"))
    async with replaying(engine.url, store) as served, http.post(served.url + CHAT, json=BODY) as response:
        body = await response.read()

    assert (400, "application/json") == (response.status, response.content_type)
    assert load("err_temp").response == body


async def test_an_error_after_the_first_comment_is_an_event(store, engine, http):
    """The status was given already; the step keeps the engine's own."""
    done = asyncio.Event()
    engine.respond = answering_after(done, load("err_temp").response, status=400)
    async with (
        replaying(engine.url, store, keep_alive_interval_s=0.01) as served,
        http.post(served.url + CHAT, json=BODY) as response,
    ):
        await response.content.readuntil(b"\n\n")
        done.set()
        rest = (await response.content.read()).rpartition(b": keep-alive\n\n")[2]

    assert b'data: {"error":{"message":' == rest[:26]
    assert rest.endswith(b"data: [DONE]\n\n")
    assert 400 == (await stored_steps(store, "r1"))[0].response["status"]


async def test_an_engine_that_breaks_off_after_the_first_comment_is_an_event_too(store, engine, http):
    """The client learns what happened."""
    die = asyncio.Event()

    async def respond(request: web.Request, asked: dict) -> web.StreamResponse:
        await die.wait()
        request.transport.close()
        raise ConnectionResetError

    engine.respond = respond
    async with (
        replaying(engine.url, store, keep_alive_interval_s=0.01) as served,
        http.post(served.url + CHAT, json=BODY) as response,
    ):
        await response.content.readuntil(b"\n\n")
        die.set()
        rest = (await response.content.read()).rpartition(b": keep-alive\n\n")[2]

    assert b"disconnected" in rest
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_a_client_that_leaves_a_replayed_call_stops_the_engine(store, engine, http):
    """As it would with a live stream; the step says that nobody got it."""
    engine.hangs()
    async with replaying(engine.url, store, keep_alive_interval_s=0.01) as served:
        response = await http.post(served.url + CHAT, json=BODY)
        await response.content.readuntil(b"\n\n")
        response.close()
        await asyncio.wait_for(engine.aborted.wait(), 50)
        (step,) = await wait_for_steps(store, "r1")

    assert ("partial", False, 0) == (step.status, step.delivered, step.sampled)


async def test_a_client_that_leaves_before_any_comment_stops_the_engine_as_well(store, engine, http):
    """The engine is at work on a whole answer that nobody wants."""
    engine.hangs()
    async with replaying(engine.url, store) as served:
        call = asyncio.ensure_future(http.post(served.url + CHAT, json=BODY))
        await engine.reached.wait()
        call.cancel()
        await asyncio.wait_for(engine.aborted.wait(), 50)
        (step,) = await wait_for_steps(store, "r1")

    assert not step.delivered


async def test_what_an_answer_leaves_out_is_asked_for_before_the_end_is_shown(store, engine, http):
    """llama.cpp gives the prompt as text; its ids come by /tokenize, and the step is exact."""
    verbose = load_http("llamacpp", "chat_verbose")
    looked_up: list[dict] = []

    async def respond(request: web.Request, asked: dict) -> web.StreamResponse:
        if request.path == "/tokenize":
            looked_up.append(asked)
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
    assert [True] == [asked["content"].startswith("<|im_start|>") for asked in looked_up]


@pytest.mark.parametrize("status", [200, 500])
async def test_what_cannot_be_found_out_is_flagged(store, engine, http, status):
    """A lookup that fails costs the client nothing."""
    verbose = load_http("llamacpp", "chat_verbose")

    async def respond(request: web.Request, asked: dict) -> web.StreamResponse:
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


async def test_what_the_table_did_not_know_is_counted_as_a_new_fact(store, engine, http):
    """A vLLM that gives no ids is not the one that we know."""
    engine.plays(load("chat_plain"))
    async with proxying(engine.url, store) as served:
        async with http.post(served.url + CHAT, json=BODY | {"stream": False}) as response:
            await response.read()
        async with http.get(served.url + "/metrics") as shown:
            metrics = await shown.text()

    assert 'tokentape_unexpected_losses_total{code="no_token_ids",engine="fake"} 1.0' in metrics


async def test_what_a_known_request_costs_is_no_new_fact(store, engine, http):
    """A completion that echoes its prompt is asked for without ids: that it has none says nothing of the engine."""
    text = {"object": "text_completion", "choices": [{"index": 0, "text": "hi there", "finish_reason": "stop"}]}

    async def respond(request: web.Request, asked: dict) -> web.StreamResponse:
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
