"""The relay of a call over real sockets: responses, errors, disconnects, failover, and the queue."""

import asyncio
import re
import socket
import struct
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import aiohttp
import orjson
import pytest
from aiohttp import web
from tests.support.fakes import fake_engine, proxying
from tests.support.recorded import load
from tests.support.session import BODY, CHAT, chat_path, one_call, session_with
from tests.support.stored import stored_steps, wait_for_steps, wait_for_undelivered

from proxy.api.model.relay import _end
from proxy.protocols.response import StreamResponse
from proxy.telemetry.logs import LOG, JsonLines

WHOLE, STREAM = load("chat_ids_lp"), load("chat_ids_lp_stream")
BOTH = pytest.mark.parametrize("cassette", [WHOLE, STREAM], ids=str)


def events(stream: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in stream.split(b"\n\n") if event]


EVENTS = events(STREAM.response)


async def wait_until_idle(session) -> None:
    """Wait until no call is in flight: the proxy has noticed that its client disconnected."""
    async with asyncio.timeout(50):
        while b"tokentape_in_flight_calls 0.0" not in (await session.get("/metrics")).text:
            pass


async def test_an_unstreamed_call_returns_the_plain_response_and_records_the_ids(store, engine):
    engine.plays(WHOLE)
    response, step = await one_call(engine, store)
    headers = (response.headers["X-Rollout-Id"], response.headers["X-Step-Id"])

    assert (200, "r1", step.step_id) == (response.status, *headers)
    assert "Content-Length" in response.headers
    assert response.json["prompt_token_ids"] is None
    assert orjson.loads(WHOLE.response)["choices"][0]["token_ids"] == step.choices[0].ids.tolist()
    assert (step.exact, step.status, step.delivered) == (True, "complete", True)
    assert step.sent["set"] == {"return_token_ids": True, "logprobs": True}


def tool_events(*deltas) -> list[bytes]:
    """Return a stream's events with these deltas, then its end."""
    event = {"id": "c", "object": "chat.completion.chunk", "model": "m", "created": 1}
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": "tool_calls"})
    chunks = [orjson.dumps({**event, "choices": [choice]}) for choice in choices]
    return [b"data: " + chunk + b"\n\n" for chunk in [*chunks, b"[DONE]"]]


@pytest.mark.parametrize(
    ("path", "body", "end", "waiting"),
    [
        ("/v1/responses", {"input": "hi", "stream": True}, b"response.output_item.done", b": keep-alive\n\n"),
        ("/v1/messages", {**BODY, "max_tokens": 9, "stream": True}, b"content_block_stop", b": keep-alive\n\n"),
        (
            "/v1beta/models/tiny:streamGenerateContent?alt=sse",
            {"contents": [{"parts": [{"text": "hi"}]}]},
            b"functionCall",
            b"\r\n\r\n",
        ),
    ],
)
async def test_a_client_gets_comments_while_parallel_calls_are_held(store, engine, http, path, body, end, waiting):
    """The first call ends after the step is stored, and the second one follows it."""
    pieces = [
        {"tool_calls": [{"index": index, "id": f"c{index}", "function": {"name": "f", "arguments": text}}]}
        for index, text in [(0, "{}"), (1, "{"), (1, " "), (1, "}")]
    ]
    waited = asyncio.Event()
    *begun, more, closed, last, done = tool_events(*pieces)

    async def respond(request: web.Request, body: dict) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        await stream.write(b"".join(begun))
        while not waited.is_set():
            await stream.write(more)
            with suppress(TimeoutError):
                await asyncio.wait_for(waited.wait(), 0.002)
        await stream.write(closed + last + done)
        return stream

    engine.respond = respond
    record = {"streaming": "live", "keep_alive_interval_s": 0.001}
    async with proxying(engine.url, store, record=record) as served:
        address = f"{served.url}/rollouts/r1{path}"
        async with http.post(address, json={"model": "tiny", **body}) as response:
            before = await response.content.readuntil(waiting)
            waited.set()
            after = await response.content.read()

    assert end not in before
    assert after.count(end) >= 2
    assert [step.status for step in await stored_steps(store, "r1")] == ["complete"]


async def test_events_of_a_stream_are_forwarded_as_they_arrive(store, engine, http):
    proceed = asyncio.Event()
    engine.streams(EVENTS[:3], then="end", after=proceed)
    async with proxying(engine.url, store) as served, http.post(served.url + CHAT, json=BODY) as response:
        first, _, third = [await response.content.readuntil(b"\n\n") for _ in range(3)]
        proceed.set()

    assert b'"role":"assistant"' in first
    assert b'"token_ids":null' in third


async def test_the_end_of_a_stream_is_sent_only_after_the_step_is_stored(store, engine, http):
    """Until then no byte shows that the turn is over."""
    reached, proceed = store.pauses("append")
    engine.plays(STREAM)
    async with proxying(engine.url, store) as served, http.post(served.url + CHAT, json=BODY) as response:
        await reached.wait()
        before = b""
        while b" port" not in before:
            before += await response.content.readany()
        assert b'"finish_reason":"' not in before
        assert b"[DONE]" not in before
        proceed.set()
        after = await response.content.read()

    assert b'"finish_reason":"length"' in after
    assert after.endswith(b"data: [DONE]\n\n")


@BOTH
async def test_a_response_does_not_end_properly_if_its_step_cannot_be_stored(store, engine, cassette):
    """An unstreamed call is 503; a stream breaks off."""
    engine.plays(cassette)
    async with session_with(engine, store) as session:
        store.failing.add("append")
        if cassette is WHOLE:
            response = await session.post(CHAT, BODY)
            assert (response.status, response.json["error"]["type"]) == (503, "store_unavailable")
            assert response.headers["Retry-After"] == "1"
        else:
            with pytest.raises(aiohttp.ClientPayloadError):
                await session.post(CHAT, BODY)
    assert await stored_steps(store, "r1") == []


async def test_a_client_disconnect_during_a_stream_aborts_the_engines_request(store, engine, http):
    """The received part is recorded as a partial step, not delivered."""
    engine.streams(EVENTS[:5], then="hang")
    async with proxying(engine.url, store) as served:
        async with http.post(served.url + CHAT, json=BODY) as response:
            await response.content.readuntil(b"\n\n")
            response.close()
        await asyncio.wait_for(engine.aborted.wait(), 50)
        (step,) = await wait_for_steps(store, "r1")

    assert (step.status, step.reason, step.delivered) == ("partial", "the client disconnected", False)
    assert "stream_cut" in step.problems


@pytest.mark.parametrize("record", [{}, {"streaming": "replay"}])
async def test_a_client_disconnect_during_an_unstreamed_or_replayed_call_aborts_the_engines_request(
    store, engine, record
):
    engine.hangs()
    async with session_with(engine, store, record=record) as session:
        calling = asyncio.ensure_future(session.post(CHAT, BODY | {"stream": bool(record)}))
        await engine.reached.wait()
        calling.cancel()
        await asyncio.wait_for(engine.aborted.wait(), 50)
        (step,) = await wait_for_steps(store, "r1")

    assert (step.status, step.delivered, step.choices) == ("partial", False, ())


@BOTH
async def test_a_client_disconnect_while_the_step_is_stored_marks_it_as_not_delivered(store, engine, cassette):
    """The step is complete and stored once, whether the client has read a part of its response or not."""
    reached, proceed = store.pauses("append")
    engine.plays(cassette)
    async with session_with(engine, store) as session:
        calling = asyncio.ensure_future(session.post(CHAT, BODY))
        await reached.wait()
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
        await wait_until_idle(session)
        proceed.set()
        undelivered = await wait_for_undelivered(store, "r1")

    (step,) = await stored_steps(store, "r1")
    assert ({step.step_id}, "complete", True) == (undelivered, step.status, step.exact)


async def test_an_engine_disconnect_during_a_stream_breaks_the_clients_stream_off(store, engine, http):
    """The client gets the received events, no terminal event, and an improper end of the connection."""
    engine.streams(EVENTS[:5], then="die")
    async with proxying(engine.url, store) as served, http.post(served.url + CHAT, json=BODY) as response:
        shown = b""
        with pytest.raises(aiohttp.ClientPayloadError):
            while True:
                shown += await response.content.readuntil(b"\n\n")

    (step,) = await wait_for_steps(store, "r1")
    assert len(events(shown)) == 5
    assert (step.status, "disconnected" in step.reason, step.sampled, step.delivered) == ("partial", True, 4, False)


async def test_an_engine_disconnect_during_an_unstreamed_response_is_502(store, engine):
    """The error has the dialect's shape."""

    async def respond(request, body):
        partial = aiohttp.web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "9999"})
        await partial.prepare(request)
        await partial.write(WHOLE.response[:100])
        request.transport.close()
        return partial

    engine.respond = respond
    response, step = await one_call(engine, store)
    error = response.json["error"]

    assert (response.status, error["type"], error["code"]) == (502, "upstream_error", "engine_disconnected")
    assert (step.status, step.delivered) == ("partial", False)


async def test_a_stream_without_a_terminal_event_is_a_partial_step_and_not_delivered(store, engine):
    """The engine closes its connection properly, and the proxy closes the client's in the same way."""
    engine.streams(EVENTS[:5], then="end")
    response, step = await one_call(engine, store)

    assert b"[DONE]" not in response.text
    assert (step.status, step.delivered) == ("partial", False)


DEAD = "http://127.0.0.1:9"


async def test_an_unreachable_engine_is_503_and_an_error_step(store):
    response, step = await one_call(DEAD, store)

    assert (response.status, response.json["error"]["code"]) == (503, "engine_unreachable")
    assert response.headers["Retry-After"] == "1"
    assert (step.status, step.response["status"]) == ("error", 503)


async def test_an_engine_that_exceeds_read_timeout_s_is_504(store, engine):
    engine.hangs()
    response, _ = await one_call(engine, store, engines={"read_timeout_s": 0.1})

    assert (response.status, response.json["error"]["code"]) == (504, "engine_timeout")


@pytest.mark.parametrize(
    "cassette",
    [
        *map(load, ("err_long_chat", "err_badmodel", "err_nomsgs", "err_type")),
        # A gateway in front of the engine may send such a page.
        replace(WHOLE, name="html", response=b"<html>bad gateway</html>", status=502, content_type="text/html"),
    ],
    ids=str,
)
async def test_engine_errors_are_returned_with_unchanged_status_type_and_bytes(store, engine, cassette):
    engine.plays(cassette)
    response, step = await one_call(engine, store)

    assert (cassette.status, cassette.response) == (response.status, response.text)
    assert cassette.content_type == response.kind
    assert ("error", cassette.status) == (step.status, step.response["status"])
    assert cassette.name != "html" or step.response["body"] == "<html>bad gateway</html>"


async def test_a_429_response_keeps_its_retry_after_header(store, engine):
    engine.plays(replace(WHOLE, response=b'{"error":"slow down"}', status=429), **{"Retry-After": "7"})
    response, _ = await one_call(engine, store)

    assert (response.status, response.text) == (429, b'{"error":"slow down"}')
    assert response.headers["Retry-After"] == "7"


async def test_the_agents_key_is_not_sent_to_the_engine(store, engine):
    """The engine gets its own key and the trace headers."""
    engine.plays(WHOLE)
    keys = {"Authorization": "Bearer agent-secret", "X-Api-Key": "agent-secret"}
    traces = {"x-request-id": "t1", "traceparent": "00-1"}
    endpoints = {"endpoints": [{"url": engine.url, "api_key": "engine-key"}]}
    await one_call(None, store, headers=keys | traces, engines=endpoints)

    (headers,) = engine.headers
    assert "agent-secret" not in str(headers)
    assert ({"authorization": "Bearer engine-key"} | traces).items() <= headers.items()


async def test_a_call_is_one_log_line_without_content_and_keys(store, engine, caplog, monkeypatch):
    monkeypatch.setattr(LOG, "propagate", True)
    engine.plays(WHOLE)
    body = {"messages": [{"role": "user", "content": "a secret question"}]}
    caplog.set_level("INFO", "tokentape")
    response, _ = await one_call(engine, store, body, headers={"X-Api-Key": "a-secret-key"})
    message = response.json["choices"][0]["message"]["content"]

    (line,) = [record for record in caplog.records if record.getMessage() == "call"]
    assert {"rollout_id": "r1", "status": 200, "step": "complete", "sampled_tokens": 24}.items() <= line.fields.items()
    assert not any(secret in JsonLines().format(line) for secret in ("secret", message))


@pytest.mark.parametrize(
    ("settings", "status", "lines"),
    [
        ({"sample": 0}, 200, 0),
        ({"sample": 0}, 400, 2),
        ({"sample": 0, "slow_s": 1e-9}, 200, 2),
        ({"sample": 1}, 200, 2),
    ],
    ids=["successful", "failed", "slow", "all"],
)
async def test_calls_outside_the_sample_of_the_log_are_logged_if_they_failed_or_are_slow(
    store, engine, caplog, monkeypatch, settings, status, lines
):
    """A rollout is logged whole or not at all."""
    monkeypatch.setattr(LOG, "propagate", True)
    caplog.set_level("INFO", "tokentape")
    engine.plays(replace(WHOLE, status=status))
    async with session_with(engine, store, log=settings) as session:
        assert [(await session.post(CHAT, BODY)).status for _ in range(2)] == [status] * 2

    assert lines == len([record for record in caplog.records if record.getMessage() == "call"])


async def test_in_flight_rollouts_counts_each_rollout_once(store, engine):
    proceed = asyncio.Event()
    engine.streams(EVENTS[:3], then="end", after=proceed)
    async with session_with(engine, store) as session:

        async def metric() -> str:
            return re.search(rb"\ntokentape_in_flight_rollouts (\S+)", (await session.get("/metrics")).text)[1]

        calls = [await session.http.post(session.url + chat_path(name), json=BODY) for name in ("r1", "r1", "r2")]
        during = await metric()
        proceed.set()
        for call in calls:
            await call.read()
        after = await metric()

    assert (during, after) == (b"2.0", b"0.0")


def failing_after(times: int):
    """Return a method that works this many times, then raises an unexpected exception."""

    def fails(self, *args, real=StreamResponse.feed):
        self.__dict__["calls"] = self.__dict__.get("calls", 0) + 1
        if self.__dict__["calls"] > times:
            raise ZeroDivisionError
        return real(self, *args)

    return fails


async def test_an_unexpected_exception_during_a_stream_records_a_partial_step(store, engine, http, monkeypatch, caplog):
    """The client gets an error event in the dialect's shape; it, the step and the log have the same error id."""
    shown = asyncio.Event()

    async def respond(request, body):
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await stream.prepare(request)
        await stream.write(b"".join(EVENTS[:5]))
        await shown.wait()
        await stream.write(b"".join(EVENTS[5:]))
        return stream

    engine.respond = respond
    monkeypatch.setattr("proxy.protocols.response.StreamResponse.feed", failing_after(1))
    async with proxying(engine.url, store) as served, http.post(served.url + CHAT, json=BODY) as response:
        await response.content.readuntil(b"\n\n")
        shown.set()
        remainder = await response.read()
    (step,) = await stored_steps(store, "r1")
    *_, error, done = events(remainder)
    payload = orjson.loads(error.removeprefix(b"data: "))["error"]

    assert done == b"data: [DONE]\n\n"
    assert (payload["type"], payload["code"]) == ("server_error", "internal_error")
    assert (step.status, step.sampled, step.delivered) == ("partial", 4, False)
    assert "stream_cut" in step.problems
    error_id = step.reason.removeprefix("internal error ")
    assert error_id in payload["message"]
    assert [record.fields["error_id"] for record in caplog.records if record.exc_info] == [error_id]


@pytest.mark.parametrize(
    ("method", "sampled"),
    [("exchange.Exchange.finish", 24), ("exchange.Exchange.missing", 24), ("whole_response.WholeResponse.finish", 0)],
)
async def test_an_unexpected_exception_in_an_unstreamed_call_records_a_partial_step(
    store, engine, monkeypatch, method, sampled
):
    """The client gets an error in the dialect's shape, and no part of the response; what cannot be parsed has no tokens."""

    def broken(*args):
        raise ValueError("odd")

    engine.plays(WHOLE)
    monkeypatch.setattr(f"proxy.protocols.{method}", broken)
    response, step = await one_call(engine, store)

    assert (response.status, response.json["error"]["code"]) == (500, "internal_error")
    assert (step.status, step.sampled, step.delivered) == ("partial", sampled, False)
    assert step.reason.startswith("internal error ")


@pytest.mark.parametrize("field", ["delta", "usage", "x"])
async def test_a_deeply_nested_chunk_is_forwarded_and_flags_the_step(store, engine, field):
    """The tokens before and after it are recorded."""
    depths = (250, 254, 600, 1023, 5000)
    async with session_with(engine, store) as session:
        for depth in depths:
            nested = b"[" * depth + b"]" * depth
            in_choice = b"," + b'"delta":{"a":' + nested + b"}" if field == "delta" else b""
            field_text = b"" if field == "delta" else b',"%s":' % field.encode() + nested
            deep = b'data: {"id":"i","choices":[{"index":0' + in_choice + b"}]" + field_text + b"}\n\n"
            engine.streams([*EVENTS[:3], deep, *EVENTS[3:]], then="end")
            assert (await session.post(CHAT, BODY)).text.endswith(b"data: [DONE]\n\n"), depth
    steps = await stored_steps(store, "r1")

    assert [(24, "complete", False)] * len(depths) == [(step.sampled, step.status, step.exact) for step in steps]


@asynccontextmanager
async def byte_engine(response: bytes, *, closes: bool = False):
    """Yield settings with an engine that responds to each POST with these bytes, and to GETs with 404."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = re.search(rb"(?i)content-length: (\d+)", head)
                await reader.readexactly(int(length[1]) if length else 0)
                writer.write(response if head.startswith(b"POST") else b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n")
                if closes and head.startswith(b"POST"):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield {"endpoints": [{"url": url, "kind": "vllm", "name": "bare"}]}
    finally:
        server.close()


@BOTH
async def test_a_response_header_with_control_characters_is_dropped(store, cassette):
    """The response and the step are otherwise unchanged."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nX-Odd: a\x07b\r\nX-Even: ab\r\nContent-Length: %d\r\n\r\n"
    sent = head % (cassette.content_type.encode(), len(cassette.response)) + cassette.response
    async with byte_engine(sent) as engines:
        response, step = await one_call(None, store, engines=engines)

    assert (response.status, response.headers["X-Even"], "X-Odd" in response.headers) == (200, "ab", False)
    assert (step.exact, step.delivered) == (True, True)


@pytest.mark.parametrize("status", [b"099", b"101", b"199", b"600", b"999"])
async def test_an_invalid_status_code_of_the_engine_is_502(store, status):
    sent = b"HTTP/1.1 %s Odd\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}" % status
    async with byte_engine(sent, closes=True) as engines:
        response, step = await one_call(None, store, engines=engines)

    assert (response.status, response.json["error"]["type"], step.status) == (502, "upstream_error", "error")


async def test_a_truncated_json_response_is_502(store):
    """Without Content-Length the connection of a crashed engine ends like a complete response."""
    half = WHOLE.response[: len(WHOLE.response) // 2]
    sent = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n" + half
    async with byte_engine(sent, closes=True) as engines:
        response, step = await one_call(None, store, engines=engines)

    assert (response.status, response.json["error"]["type"]) == (502, "upstream_error")
    assert (step.status, step.exact) == ("error", False)
    assert step.response["body"].encode() == half


async def test_a_stream_ends_with_its_terminal_event_even_if_the_engine_keeps_the_connection_open(store, engine):
    engine.streams([STREAM.response], then="hang")
    response, step = await one_call(engine, store)
    await engine.aborted.wait()

    assert response.text.endswith(b"data: [DONE]\n\n")
    assert (step.exact, step.status, step.delivered) == (True, "complete", True)


async def test_a_call_that_the_shutdown_ends_has_the_shutdown_as_its_reason(store, engine, http):
    engine.streams(EVENTS[:5], then="hang")
    async with proxying(engine.url, store, drain_timeout_s=0.1) as served:
        response = await http.post(served.url + CHAT, json=BODY)
        await response.content.readuntil(b"\n\n")
    with pytest.raises(aiohttp.ClientPayloadError):
        await response.read()
    (step,) = await stored_steps(store, "r1")

    assert (step.status, step.reason, step.delivered) == ("partial", "the proxy shut down", False)


POLICY = replace(WHOLE, response=WHOLE.response.replace(b'"model":"tiny"', b'"model":"policy"'))


@pytest.mark.parametrize(
    ("listed", "problems"),
    [
        ([{"id": "tiny"}], ("other_model",)),
        ([{"id": "policy", "root": "/models/other"}], ()),
        ([{"id": "a", "root": "policy"}], ()),
        ([{"id": "a", "aliases": ["policy"]}], ()),
        ([{"id": 7}, 8], ()),
        (None, ()),
    ],
)
async def test_a_response_of_a_model_that_the_engine_does_not_list_flags_the_step(store, engine, listed, problems):
    """The model is compared with the engine's list, if it has one, not with the requested name."""
    if listed is not None:
        engine.fixed_responses["/v1/models"] = {"object": "list", "data": listed}
    engine.plays(POLICY)

    assert problems == (await one_call(engine, store))[1].problems


async def test_the_models_of_an_engine_are_requested_once_for_an_unlisted_model(store, engine):
    """Concurrent and later calls do not request them again."""
    engine.plays(POLICY)
    async with session_with(engine, store) as session:
        await session.post(CHAT, BODY)
        probes = engine.probes
        await asyncio.gather(*(session.post(CHAT, BODY) for _ in range(20)))

    assert probes == engine.probes


async def test_a_stream_with_usage_beside_a_choice_does_not_end_the_check_of_counts(store, engine):
    """Usage is requested of every stream; a later one that lost an event is flagged, also of the same rollout."""
    lost = b"".join([*EVENTS[:3], *EVENTS[4:]])
    async with session_with(engine, store) as session:
        for response_bytes in (load("forced_usage/si3_utf8_stream").response, lost):
            engine.streams([response_bytes], then="end")
            await session.post(CHAT, BODY | {"stream": True})
    steps = await stored_steps(store, "r1")

    assert ["stream_options" in body for body in engine.requests] == [True, True]
    assert list(steps[1].problems) == ["completion_count"]


async def test_usage_that_three_rollouts_saw_in_each_event_is_not_stripped(store, engine):
    """A stream of several choices then shows its client what the server sends anyway; two rollouts are not enough."""
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": None}
    counted = b"data: " + orjson.dumps({"id": "c", "choices": [choice], "usage": usage}) + b"\n\n"
    shown = []
    async with session_with(engine, store) as session:
        for rollout in ("a", "b", "c"):
            engine.streams([load("forced_usage/si3_utf8_stream").response], then="end")
            await session.post(chat_path(rollout), BODY | {"stream": True})
            engine.streams([counted], then="end")
            shown.append(await session.post(chat_path(f"new-{rollout}"), BODY | {"stream": True, "n": 2}))

    assert [b"usage" in response.text for response in shown] == [False, False, True]


async def test_parallel_calls_store_one_step_each(store, engine):
    """Each response names its step."""
    engine.plays(WHOLE)
    async with session_with(engine, store) as session:
        responses = await asyncio.gather(*(session.post(CHAT, BODY) for _ in range(60)))
        metrics = (await session.get("/metrics")).text

    steps = await stored_steps(store, "r1")
    assert sorted(response.headers["X-Step-Id"] for response in responses) == sorted(step.step_id for step in steps)
    assert b'tokentape_steps_total{fidelity="exact",status="complete"} 60.0' in metrics
    assert b"tokentape_in_flight_calls 0.0" in metrics


@BOTH
async def test_a_connection_lost_before_the_last_write_marks_the_step_as_not_delivered(
    store, engine, monkeypatch, cassette
):
    """The complete step is stored already; the write fails."""

    async def lost(call, client, outcome):
        call.request.transport.abort()
        return await _end(call, client, outcome)

    monkeypatch.setattr("proxy.api.model.relay._end", lost)
    engine.plays(cassette)
    async with session_with(engine, store) as session:
        with pytest.raises(aiohttp.ClientError):
            await session.post(CHAT, BODY)
        undelivered = await wait_for_undelivered(store, "r1")

    (step,) = await stored_steps(store, "r1")
    assert ({step.step_id}, "complete") == (undelivered, step.status)


@BOTH
async def test_a_connection_reset_during_a_call_is_a_partial_step_and_not_delivered(store, engine, cassette):
    """The engine's request is aborted."""
    engine.streams(EVENTS[:3], then="hang") if cassette.is_stream else engine.hangs()
    async with proxying(engine.url, store) as served:
        host, port = served.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        text = orjson.dumps(BODY | {"stream": cassette.is_stream})
        writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text)
        if cassette.is_stream:
            await reader.readuntil(b"data: ")
        await engine.reached.wait()
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()
        await asyncio.wait_for(engine.aborted.wait(), 50)
        (step,) = await wait_for_steps(store, "r1")

    assert (step.status, step.delivered, step.reason) == ("partial", False, "the client disconnected")


def two_endpoints(*endpoints, **options) -> dict:
    """Return settings with these endpoints, named by the ends of their URLs, as separate engines."""
    urls = [endpoint if isinstance(endpoint, str) else endpoint.url for endpoint in endpoints]
    return {"endpoints": [{"url": url, "name": url[-5:]} for url in urls], **options}


async def rollouts_of_one_call(session, count: int, prefix: str = "f"):
    """Make a call of each of many rollouts, whose names decide the endpoint; return the statuses."""
    return [(await session.post(chat_path(f"{prefix}{n}"), BODY)).status for n in range(count)]


async def steps_of(store, count: int, prefix: str = "f"):
    return [step for n in range(count) for step in await stored_steps(store, f"{prefix}{n}")]


async def test_calls_fail_over_from_an_unreachable_endpoint(store, engine):
    """The step lists the failed attempts."""
    engine.plays(WHOLE)
    async with session_with(None, store, engines=two_endpoints(DEAD, engine, eject_after=99)) as session:
        assert await rollouts_of_one_call(session, 12) == [200] * 12

    steps = await steps_of(store, 12)
    tried = [step.extra["attempts"] for step in steps if "attempts" in step.extra]
    assert len(steps) == 12
    assert all(step.exact and step.engine.name == engine.url[-5:] for step in steps)
    assert 0 < len(tried) < 12
    assert all(len(attempts) == 1 and "is unreachable" in attempts[0]["fault"] for attempts in tried)


async def test_an_endpoint_is_ejected_after_eject_after_consecutive_faults(store, engine):
    """Later calls do not try it."""
    engine.plays(WHOLE)
    async with session_with(None, store, engines=two_endpoints(DEAD, engine, eject_after=2)) as session:
        assert await rollouts_of_one_call(session, 20) == [200] * 20

    assert sum("attempts" in step.extra for step in await steps_of(store, 20)) <= 2


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_calls_fail_over_from_502_503_and_504(store, engine, status):
    """The client gets such a response only from the last endpoint; each endpoint is tried once."""
    async with fake_engine() as other:
        engine.answers({"error": {"message": "loading"}}, status)
        other.plays(WHOLE)
        async with session_with(None, store, engines=two_endpoints(engine, other, eject_after=99)) as session:
            assert await rollouts_of_one_call(session, 40) == [200] * 40
            assert 0 < len(engine.requests) < 40
            other.respond = engine.respond
            before = len(engine.requests) + len(other.requests)
            assert status == (await session.post(CHAT, BODY)).status
            assert len(engine.requests) + len(other.requests) == before + 2


async def test_with_max_attempts_1_calls_do_not_fail_over(store, engine):
    engine.plays(WHOLE)
    engines = two_endpoints(DEAD, engine, max_attempts=1, eject_after=99)
    async with session_with(None, store, engines=engines) as session:
        assert set(await rollouts_of_one_call(session, 40)) == {200, 503}


async def test_after_the_first_byte_calls_do_not_fail_over(store, engine):
    """The client's stream breaks off."""
    async with fake_engine() as other:
        for server in (engine, other):
            server.streams(EVENTS[:5], then="die")
        async with session_with(None, store, engines=two_endpoints(engine, other)) as session:
            with pytest.raises(aiohttp.ClientPayloadError):
                await session.post(CHAT, BODY)
        assert len(engine.requests) + len(other.requests) == 1


async def test_after_failover_the_request_is_planned_for_the_other_engine_type(store, engine):
    engine.plays(WHOLE)
    endpoints = [{"url": DEAD, "name": "dead", "kind": "sglang"}, {"url": engine.url, "name": "live"}]
    async with session_with(None, store, engines={"endpoints": endpoints, "eject_after": 99}) as session:
        assert await rollouts_of_one_call(session, 12, "k") == [200] * 12

    steps = await steps_of(store, 12, "k")
    assert any("attempts" in step.extra for step in steps)
    assert all(step.exact and step.engine.kind == "vllm" for step in steps)
    assert all(body["return_token_ids"] for body in engine.requests)


def one_in_flight(engine, **options) -> dict:
    """Return settings with an endpoint that accepts one call at a time."""
    return {"engines": {"endpoints": [{"url": engine.url, "name": "fake", "max_in_flight": 1}], **options}}


async def shown_engine(session) -> dict:
    (shown,) = (await session.get("/engines")).json["engines"]
    return shown


async def wait_for_queued(session, count: int, *, is_busy: bool = False) -> None:
    while (shown := await shown_engine(session))["queued"] != count or (is_busy and not shown["in_flight"]):
        pass


@pytest.mark.parametrize(("limit", "is_queued"), [({"max_queued": 1}, True), ({"queue_timeout_s": 0.01}, False)])
async def test_a_call_that_exceeds_the_queue_is_429_and_not_recorded(store, engine, limit, is_queued):
    """The limits are max_queued and queue_timeout_s; the response has Retry-After and the dialect's shape."""
    engine.hangs()
    async with session_with(None, store, **one_in_flight(engine, **limit)) as session:
        calls = [asyncio.ensure_future(session.post(CHAT, BODY))]
        await engine.reached.wait()
        if is_queued:
            calls.append(asyncio.ensure_future(session.post(chat_path("r2"), BODY)))
            await wait_for_queued(session, 1)
        response = await session.post(chat_path("r3"), BODY)
        assert (response.status, response.headers["Retry-After"]) == (429, "1")
        assert response.json["error"]["code"] == "engine_busy"
        assert f"engines.{next(iter(limit))}" in response.json["error"]["message"]
        counted = b'tokentape_calls_total{dialect="chat",engine="fake",status="429"} 1.0'
        assert counted in (await session.get("/metrics")).text
        for call in reversed(calls):
            call.cancel()
        await engine.aborted.wait()
        assert len(engine.requests) == 1

    assert [await stored_steps(store, name) for name in ("r2", "r3")] == [[], []]


async def test_a_client_disconnect_in_the_queue_sends_and_records_nothing(store, engine):
    """The next call in the queue proceeds."""
    proceed = asyncio.Event()
    engine.plays(WHOLE)
    played = engine.respond

    async def respond(request, body):
        if request.path != "/v1/models":  # `/engines` waits for it
            await proceed.wait()
        return await played(request, body)

    engine.respond = respond
    async with session_with(None, store, **one_in_flight(engine)) as session:
        calls = []
        for n in range(3):
            calls.append(asyncio.ensure_future(session.post(chat_path(f"q{n}"), BODY)))
            await wait_for_queued(session, n, is_busy=True)
        calls[1].cancel()
        await wait_for_queued(session, 1)
        proceed.set()
        assert [(await calls[n]).status for n in (0, 2)] == [200, 200]
        shown = await shown_engine(session)
        assert (shown["in_flight"], shown["queued"]) == (0, 0)

    assert len(engine.requests) == 2
    assert [len(await stored_steps(store, f"q{n}")) for n in range(3)] == [1, 0, 1]


async def test_a_call_releases_its_slot_however_it_ends(store, engine):
    """It completes, breaks off, or its client disconnects before or after the first byte."""
    async with session_with(None, store, **one_in_flight(engine)) as session:
        engine.plays(WHOLE)
        await session.post(CHAT, BODY)
        engine.streams(EVENTS[:5], then="die")
        with pytest.raises(aiohttp.ClientPayloadError):
            await session.post(CHAT, BODY)
        engine.streams(EVENTS[:5], then="hang")
        async with session.http.post(session.url + CHAT, json=BODY) as response:
            await response.content.readuntil(b"\n\n")
            response.close()
        await engine.aborted.wait()
        engine.reached.clear()
        engine.hangs()
        calling = asyncio.ensure_future(session.post(CHAT, BODY))
        await engine.reached.wait()
        calling.cancel()
        while (await shown_engine(session))["in_flight"]:
            pass
        engine.plays(WHOLE)
        assert (await session.post(CHAT, BODY)).status == 200
        assert (await shown_engine(session))["in_flight"] == 0


async def test_a_queued_call_with_a_synthetic_stream_gets_keep_alive_comments(store, engine):
    """A queue timeout is then an error event, and is recorded."""
    engine.hangs()
    record = {"keep_alive_interval_s": 0.01, "streaming": "replay"}
    async with session_with(None, store, record=record, **one_in_flight(engine, queue_timeout_s=1)) as session:
        hanging = asyncio.ensure_future(session.post(CHAT, BODY))
        await engine.reached.wait()
        text = (await session.post(chat_path("k"), {**BODY, "stream": True})).text
        hanging.cancel()

    (step,) = await stored_steps(store, "k")
    assert text.startswith(b":")
    assert b"engines.queue_timeout_s" in text
    assert step.status == "error"
