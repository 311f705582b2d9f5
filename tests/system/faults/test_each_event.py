"""Calls that break off at every point: by the engine around each of its events, by the client at each stage."""

import asyncio
from urllib.parse import urlsplit

import aiohttp
import orjson
import pytest
from tests.support.fakes import proxying
from tests.support.recorded import Cassette, load, plan_of, play
from tests.support.stored import stored_steps, wait_for_steps

STREAMS = [
    load(name) for name in ("chat_ids_lp_stream", "chat_n3_stream", "cmpl_ids_lp1_stream", "scale_out/generate_stream")
]
STREAM, WHOLE = STREAMS[0], load("chat_ids_lp")
AT_ONCE = 24
END = b"data: [DONE]\n\n"


def events(stream: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in stream.split(b"\n\n") if event]


def cuts(stream: bytes) -> dict[str, bytes]:
    """Return every way to cut the response, by name: before, in and after each event."""
    parts, sent = {"before": b""}, b""
    for number, event in enumerate(events(stream)):
        parts[f"in-{number}"] = sent + event[: len(event) // 2]
        sent += event
        parts[f"after-{number}"] = sent
    return parts


def request_from(cassette: Cassette) -> dict:
    return cassette.body | {"stream": True}


def respond_with_parts(engine, parts: dict[str, bytes], *, then_hangs: bool) -> None:
    """Answer with the part of the response that the call's X-Request-Id selects."""

    async def respond(request, body):
        response = aiohttp.web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(parts[request.headers["X-Request-Id"]])
        if then_hangs:
            await asyncio.Event().wait()
        request.transport.close()
        return response

    engine.respond = respond


def is_prefix(step, whole) -> bool:
    """Return whether each recorded choice is a prefix of the sampled one."""
    return all(
        choice.ids.tolist() == whole.choices[choice.index].ids.tolist()[: len(choice.ids)] for choice in step.choices
    )


@pytest.mark.parametrize("cassette", STREAMS, ids=str)
async def test_a_stream_that_the_engine_cuts_anywhere_leaves_one_step_of_its_tokens(store, engine, http, cassette):
    """If the client got the end, the step is complete; otherwise the step is partial and has a flag."""
    parts, gate = cuts(cassette.response), asyncio.Semaphore(AT_ONCE)
    respond_with_parts(engine, parts, then_hangs=False)

    async def forwarded(url: str, name: str) -> tuple[bytes, bool]:
        shown, named = b"", {"X-Request-Id": name}
        path = f"{url}/rollouts/{name}{cassette.path}"
        async with gate, http.post(path, json=request_from(cassette), headers=named) as response:
            try:
                async for read in response.content.iter_any():
                    shown += read
            except aiohttp.ClientPayloadError:
                return shown, False
        return shown, response.status == 200

    async with proxying(engine.url, store) as served:
        seen = dict(
            zip(
                parts,
                await asyncio.gather(*(forwarded(served.url, name) for name in parts)),
                strict=True,
            )
        )

    *_, whole = play(plan_of(cassette.path, request_from(cassette)), cassette)
    for name, (shown, properly) in seen.items():
        (step,) = await stored_steps(store, name)
        is_last = name == f"after-{len(events(cassette.response)) - 1}"
        assert (properly, shown.endswith(END)) == (is_last, is_last), name
        assert ("complete" if is_last else "partial") == step.status, name
        assert is_last or "stream_cut" in step.problems, name
        assert is_prefix(step, whole), name
        assert not is_last or whole.sampled == step.sampled


async def test_a_client_disconnect_after_any_event_leaves_one_step_of_its_tokens(store, engine):
    """The call at the engine is aborted; the step is partial, and flagged as not delivered."""
    sent = {f"after-{number}": events(STREAM.response)[:number] for number in range(1, len(events(STREAM.response)))}
    respond_with_parts(engine, {name: b"".join(read) for name, read in sent.items()}, then_hangs=True)

    async def leaves(url: str, name: str, shown_events: int) -> None:
        named, path = {"X-Request-Id": name}, f"{url}/rollouts/{name}{STREAM.path}"
        async with (
            aiohttp.ClientSession() as http,
            http.post(path, json=request_from(STREAM), headers=named) as response,
        ):
            for _ in range(shown_events):
                await response.content.readuntil(b"\n\n")
            response.close()

    *_, whole = play(plan_of(STREAM.path, request_from(STREAM)), STREAM)
    async with proxying(engine.url, store) as served:
        for name, read in sent.items():
            shown_events = sum(b'"finish_reason":"' not in event and b'"usage":{' not in event for event in read)
            await leaves(served.url, name, shown_events)
            await asyncio.wait_for(engine.aborted.wait(), 50)
            engine.aborted.clear()
            (step,) = await wait_for_steps(store, name)
            assert (step.status, step.reason, step.delivered) == ("partial", "the client disconnected", False), name
            assert is_prefix(step, whole), name
            assert shown_events - 1 <= step.sampled <= len(read) - 1, name  # the first event has no token


async def test_a_client_disconnect_at_any_stage_of_an_unstreamed_call_leaves_one_step(store, engine, http):
    """Before the engine answers, at the headers, and at each part of the body: partial and not delivered."""
    stages = {
        f"after-{size}": WHOLE.response[:size] for size in range(0, len(WHOLE.response), len(WHOLE.response) // 8)
    }
    fed = asyncio.Event()

    async def respond(request, body):
        fed.set()
        response = aiohttp.web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        await response.write(stages[request.headers["X-Request-Id"]])
        await asyncio.Event().wait()

    engine.respond = respond
    async with proxying(engine.url, store) as served:
        for stage in stages:
            path, named = f"{served.url}/rollouts/{stage}{WHOLE.path}", {"X-Request-Id": stage}
            calling = asyncio.ensure_future(http.post(path, json=WHOLE.body, headers=named))
            await fed.wait()
            calling.cancel()
            await asyncio.wait_for(engine.aborted.wait(), 50)
            fed.clear()
            engine.aborted.clear()
            (step,) = await wait_for_steps(store, stage)
            assert (step.status, step.delivered, step.choices) == ("partial", False, ()), stage


async def test_a_client_disconnect_within_the_request_leaves_nothing(store, engine, http):
    """Cut at every byte of head and body: the engine gets no request, no step is stored, and the next call works."""
    body = orjson.dumps({"model": "tiny", "messages": []})
    engine.plays(WHOLE)
    async with proxying(engine.url, store) as served:
        where = urlsplit(served.url)
        head = (
            f"POST /rollouts/r1{WHOLE.path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        )
        for size in range(len(head + body)):
            reader, writer = await asyncio.open_connection(where.hostname, where.port)
            writer.write((head + body)[:size])
            writer.write_eof()
            response = await asyncio.wait_for(
                reader.read(), 50
            )  # at most an error response, then the connection is closed
            assert not response.startswith(b"HTTP/1.1 200"), size
            writer.close()
            await writer.wait_closed()
        asked_before = len(engine.requests)
        async with http.post(f"{served.url}/rollouts/r1{WHOLE.path}", json=WHOLE.body) as whole:
            assert whole.status == 200

    assert (asked_before, len(await stored_steps(store, "r1"))) == (0, 1)
