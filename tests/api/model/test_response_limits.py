"""The limits of engines' responses: bytes, the memory of their parsed form, and what other calls leave of it."""

import asyncio
import gzip
import re
from contextlib import suppress

import aiohttp
import orjson
import pytest
from aiohttp import web
from tests.support.fakes import fake_engine
from tests.support.recorded import load
from tests.support.session import BODY, CHAT, one_call, session_with
from tests.support.stored import stored_steps, wait_for_steps

WHOLE, STREAM = load("chat_ids_lp"), load("chat_ids_lp_stream")
LIMITS = {"max_response_bytes": 300_000}
PIECE = b"[]," * 2**14


def sends(engine, *, status=200, head=b"", pieces=10**6, piece=PIECE, headers=None):
    """Let an engine send a response in pieces, until it is disconnected. Return the sizes of what was sent."""
    sent = []

    async def respond(request: web.Request, body: dict) -> web.StreamResponse:
        response = web.StreamResponse(status=status, headers={"Content-Type": "application/json", **(headers or {})})
        await response.prepare(request)
        with suppress(ConnectionError):
            await response.write(head)
            for _ in range(pieces):
                await response.write(piece)
                sent.append(len(piece))
            await response.write_eof()
        return response

    engine.respond = respond
    return sent


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [(CHAT, BODY, "upstream_error"), ("/rollouts/r1/v1/messages", {**BODY, "max_tokens": 9}, "api_error")],
)
@pytest.mark.parametrize("status", [200, 400])
async def test_a_response_without_end_is_502_and_its_step_is_partial(store, engine, path, body, kind, status):
    """Errors too, in each dialect; agents see no details. The endpoint gets no second call, and is not ejected."""
    sent = sends(engine, status=status, head=b'{"choices":[', piece=b" " * 2**16)
    async with fake_engine() as other:
        both = {"endpoints": [{"url": engine.url, "name": "a"}, {"url": other.url, "name": "b"}]}
        other.respond = engine.respond
        async with session_with(None, store, engines={**both, **LIMITS}) as session:
            response = await session.post(path, body)
            metrics = (await session.get("/metrics")).text.decode()

    (step,) = await stored_steps(store, "r1")
    assert (response.status, response.json["error"]["type"]) == (502, kind)
    assert f"The engine's response is too large (step {step.step_id})." == response.json["error"]["message"]
    assert (step.status, step.response) == ("partial", None)
    assert "(engines.max_response_bytes)" in step.reason
    assert len([request for request in (*engine.requests, *other.requests) if "messages" in request]) == 1
    assert sum(sent) < 2**26
    assert re.findall(r"tokentape_engine_healthy{[^}]*} (.*)", metrics) == ["1.0", "1.0"]


async def test_a_small_response_with_many_values_is_refused_before_it_is_parsed(store, engine):
    """290 kB of empty lists would take 14 MB."""
    sends(engine, head=b'{"choices":[', pieces=5, piece=b"[]," * 19_000)
    response, step = await one_call(engine, store, engines=LIMITS)

    assert (response.status, response.json["error"]["code"]) == (502, "engine_response_too_large")
    assert "4 times engines.max_response_bytes" in step.reason


async def test_a_compressed_response_is_limited_by_its_decompressed_bytes(store, engine):
    sends(engine, head=gzip.compress(b" " * 2**24), pieces=0, headers={"Content-Encoding": "gzip"})
    response, step = await one_call(engine, store, engines=LIMITS)

    assert (response.status, step.status) == (502, "partial")


async def test_a_stream_without_end_is_cut_at_the_limit(store, engine):
    """What was parsed is in the partial step. The client's connection ends as the engine's would."""
    first, *_ = STREAM.response.split(b"\n\n")
    sends(engine, head=first + b"\n\n", piece=b": x\n\n" * 999, headers={"Content-Type": "text/event-stream"})
    async with session_with(engine, store, engines=LIMITS) as session:
        with pytest.raises(aiohttp.ClientPayloadError):
            await session.post(CHAT, BODY | {"stream": True})
        (step,) = await wait_for_steps(store, "r1")

    assert (step.status, len(step.prompts)) == ("partial", 1)
    assert "(engines.max_response_bytes)" in step.reason


async def test_bytes_after_the_end_of_a_stream_are_not_kept(store, engine):
    """The step is complete although the engine never ends its body."""
    sent = sends(engine, head=STREAM.response, piece=b"\n" * 2**16, headers={"Content-Type": "text/event-stream"})
    response, step = await one_call(engine, store, BODY | {"stream": True})

    assert step.status == "complete"
    assert len(response.text) < 2**20
    assert sum(sent) < 2**26


async def test_a_large_response_is_refused_if_other_calls_use_the_memory(store, engine):
    """It is accepted if it is the only one, and an ordinary one always."""
    large = orjson.loads(WHOLE.response) | {"prompt_logprobs": [{"1": {"logprob": -1.0}}] * 60_000}
    bodies = {"large": orjson.dumps(large), "ordinary": WHOLE.response}
    reached = asyncio.Event()

    async def respond(request: web.Request, body: dict) -> web.StreamResponse:
        if body["model"] == "waits":
            reached.set()
            await asyncio.Event().wait()
        return web.Response(body=bodies[body["model"]], content_type="application/json")

    engine.respond = respond
    async with session_with(engine, store, agents={"max_bytes_in_flight": 20 * 2**20}) as session:

        async def send(model: str) -> int:
            return (await session.post(CHAT, BODY | {"model": model})).status

        found = [await send("large")]
        waiting = asyncio.get_running_loop().create_task(send("waits"))
        await reached.wait()
        found += [await send("large"), await send("ordinary")]
        waiting.cancel()
        await asyncio.wait([waiting])

    assert found == [200, 502, 200]


async def test_a_client_that_leaves_during_a_large_response_costs_no_parsing(store, engine):
    """The step is partial, without a response."""
    reached = asyncio.Event()

    async def respond(request: web.Request, body: dict) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        await response.write(b'{"choices":[' + PIECE * 40)
        reached.set()
        await asyncio.Event().wait()
        raise AssertionError

    engine.respond = respond
    async with session_with(engine, store) as session:
        waiting = asyncio.get_running_loop().create_task(session.post(CHAT, BODY))
        await reached.wait()
        waiting.cancel()
        (step,) = await wait_for_steps(store, "r1")

    assert (step.status, step.response) == ("partial", None)
