"""The relay of a call, over real sockets: an engine that does what the test says, a real client, a real store."""

import asyncio
import re
import socket
import struct
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import orjson
import pytest
from aiohttp import web
from fakes import FailingStore, fake_engine, proxying
from recorded import load
from stored import stored_steps, wait_for_steps, wait_for_undelivered

from proxy.api.model.relay import _end
from proxy.protocols.exchange import Exchange
from proxy.telemetry.logs import LOG, JsonLines

WHOLE, STREAM = load("chat_ids_lp"), load("chat_ids_lp_stream")
CHAT = "/rollouts/r1/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def events(stream: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in stream.split(b"\n\n") if event]


async def no_call_in_flight(http, url: str) -> None:
    """Wait until the proxy has learnt from its socket that its client is gone."""
    async with asyncio.timeout(50):
        while True:
            async with http.get(url + "/metrics") as response:
                if "tokentape_in_flight_calls 0.0" in await response.text():
                    return


async def test_an_unstreamed_call_is_shown_whole_and_recorded_exactly(store, engine, http):
    """The client gets the plain answer with its length; the step has the ids."""
    engine.plays(WHOLE)
    async with proxying(engine.url, store) as served, http.post(served.url + CHAT, json=BODY) as response:
        shown = await response.json()

    (step,) = await stored_steps(store, "r1")
    whole = orjson.loads(WHOLE.response)
    assert (200, "r1", step.step_id) == (
        response.status,
        response.headers["X-Rollout-Id"],
        response.headers["X-Step-Id"],
    )
    assert "Content-Length" in response.headers
    assert shown["prompt_token_ids"] is None
    assert whole["choices"][0]["token_ids"] == step.choices[0].ids.tolist()
    assert (True, "complete", True) == (step.exact, step.status, step.delivered)
    assert {"return_token_ids": True, "logprobs": True} == step.sent["set"]


async def test_stream_events_are_shown_as_they_come(store, engine, http):
    """An event reaches the client while the engine is still at work on the next."""
    go_on = asyncio.Event()
    engine.streams(events(STREAM.response)[:3], then="end", after=go_on)
    async with proxying(engine.url, store) as served, http.post(served.url + CHAT, json=BODY) as response:
        first = await response.content.readuntil(b"\n\n")
        await response.content.readuntil(b"\n\n")
        third = await response.content.readuntil(b"\n\n")
        go_on.set()

    assert b'"role":"assistant"' in first
    assert b'"token_ids":null' in third


async def test_the_end_is_shown_only_after_the_step_is_stored(store, engine, http):
    """The order law: while the store has not answered, no byte tells that the turn is over."""
    failing = FailingStore(store)
    failing.waiting["append"] = asyncio.Event()
    failing.reached["append"] = asyncio.Event()
    engine.plays(STREAM)
    async with proxying(engine.url, failing) as served, http.post(served.url + CHAT, json=BODY) as response:
        await failing.reached["append"].wait()
        before = b""
        while b" port" not in before:
            before += await response.content.readany()
        assert b'"finish_reason":"' not in before
        assert b"[DONE]" not in before
        failing.waiting["append"].set()
        after = await response.content.read()

    assert b'"finish_reason":"length"' in after
    assert after.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("cassette", [WHOLE, STREAM], ids=str)
async def test_a_turn_that_cannot_be_stored_is_not_told_to_be_over(store, engine, http, cassette):
    """A failing store costs the client its end, never the record its step."""
    failing = FailingStore(store)
    engine.plays(cassette)
    async with proxying(engine.url, failing) as served:
        failing.failing.add("append")
        async with http.post(served.url + CHAT, json=BODY) as response:
            if cassette is WHOLE:
                error = await response.json()
                assert (503, "store_unavailable", "1") == (
                    response.status, error["error"]["type"], response.headers["Retry-After"]
                )  # fmt: skip
            else:
                with pytest.raises(aiohttp.ClientPayloadError):
                    await response.read()
    assert [] == await stored_steps(store, "r1")


async def test_a_client_that_leaves_a_stream_stops_the_engine_and_leaves_a_partial_step(store, engine, http):
    """The engine's connection is closed at once; what came is kept, as not delivered."""
    engine.streams(events(STREAM.response)[:5], then="hang")
    async with proxying(engine.url, store) as served:
        async with http.post(served.url + CHAT, json=BODY) as response:
            await response.content.readuntil(b"\n\n")
            response.close()
        await asyncio.wait_for(engine.aborted.wait(), 50)
        (step,) = await wait_for_steps(store, "r1")

    assert ("partial", "the client disconnected", False) == (step.status, step.reason, step.delivered)
    assert "stream_cut" in step.problems


async def test_a_client_that_leaves_an_unstreamed_call_stops_the_engine(store, engine, http):
    """Nothing was shown yet, and still the engine must not go on for nobody."""
    engine.hangs()
    async with proxying(engine.url, store) as served:
        calling = asyncio.ensure_future(http.post(served.url + CHAT, json=BODY))
        await engine.reached.wait()
        calling.cancel()
        await asyncio.wait_for(engine.aborted.wait(), 50)
        (step,) = await wait_for_steps(store, "r1")

    assert ("partial", False, ()) == (step.status, step.delivered, step.choices)


async def test_a_client_that_leaves_while_its_step_is_stored_did_not_get_its_turn(store, engine, http):
    """The step is complete and stored once, and marked as not delivered."""
    failing = FailingStore(store)
    failing.waiting["append"] = asyncio.Event()
    failing.reached["append"] = asyncio.Event()
    engine.plays(WHOLE)
    async with proxying(engine.url, failing) as served:
        calling = asyncio.ensure_future(http.post(served.url + CHAT, json=BODY))
        await failing.reached["append"].wait()
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
        await no_call_in_flight(http, served.url)
        failing.waiting["append"].set()
        undelivered = await wait_for_undelivered(store, "r1")

    (step,) = await stored_steps(store, "r1")
    assert {step.step_id} == undelivered


async def test_an_engine_that_dies_in_a_stream_ends_the_clients_stream_without_an_end(store, engine, http):
    """As it would directly: what came is shown, no terminal event, and an improper end of the connection."""
    came = events(STREAM.response)[:5]
    engine.streams(came, then="die")
    async with proxying(engine.url, store) as served, http.post(served.url + CHAT, json=BODY) as response:
        shown = b""
        with pytest.raises(aiohttp.ClientPayloadError):
            while True:
                shown += await response.content.readuntil(b"\n\n")

    (step,) = await wait_for_steps(store, "r1")
    assert len(came) == len(events(shown))
    assert ("partial", True, 4, False) == (step.status, "disconnected" in step.reason, step.sampled, step.delivered)


async def test_an_engine_that_dies_in_an_unstreamed_answer_gives_502(store, engine, http):
    """Nothing was shown, so the client can be told in its dialect's shape."""

    async def respond(request, body):
        response = aiohttp.web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "9999"})
        await response.prepare(request)
        await response.write(WHOLE.response[:100])
        request.transport.close()
        return response

    engine.respond = respond
    async with proxying(engine.url, store) as served, http.post(served.url + CHAT, json=BODY) as answer:
        error = await answer.json()

    (step,) = await stored_steps(store, "r1")
    assert (502, "upstream_error", "engine_disconnected") == (
        answer.status,
        error["error"]["type"],
        error["error"]["code"],
    )
    assert ("partial", False) == (step.status, step.delivered)


async def test_a_stream_that_ends_without_its_terminal_event_was_not_delivered(store, engine, http):
    """The engine ended its connection properly, and so is the client's ended; the answer is not whole."""
    came = events(STREAM.response)[:5]
    engine.streams(came, then="end")
    async with proxying(engine.url, store) as served, http.post(served.url + CHAT, json=BODY) as response:
        shown = await response.read()
    (step,) = await stored_steps(store, "r1")

    assert b"[DONE]" not in shown
    assert ("partial", False) == (step.status, step.delivered)


async def test_an_engine_that_cannot_be_reached_gives_503_and_an_error_step(store, http):
    """The client may try again; the step tells what it was told."""
    async with proxying("http://127.0.0.1:9", store) as served, http.post(served.url + CHAT, json=BODY) as response:
        error = await response.json()

    (step,) = await stored_steps(store, "r1")
    assert (503, "engine_unreachable", "1") == (
        response.status,
        error["error"]["code"],
        response.headers["Retry-After"],
    )
    assert ("error", 503) == (step.status, step.response["status"])


async def test_a_silent_engine_gives_504_where_a_time_is_set(store, engine, http):
    """By default nobody waits too long; a configured time is kept."""
    engine.hangs()
    async with (
        proxying(engine.url, store, engines={"read_timeout_s": 0.1}) as served,
        http.post(served.url + CHAT, json=BODY) as response,
    ):
        error = await response.json()

    assert (504, "engine_timeout") == (response.status, error["error"]["code"])


@pytest.mark.parametrize("name", ["err_long_chat", "err_badmodel", "err_nomsgs", "err_type"])
async def test_errors_of_the_engine_reach_the_client_as_they_were(store, engine, http, name):
    """Status and bytes are the engine's."""
    cassette = load(name)
    engine.plays(cassette)
    async with proxying(engine.url, store) as served, http.post(served.url + CHAT, json=BODY) as response:
        shown = await response.read()

    assert (cassette.status, cassette.response) == (response.status, shown)


async def test_a_429_keeps_its_retry_after(store, engine, http):
    """So that agents wait as long as the engine says."""
    cassette = load("err_badmodel")
    engine.plays(
        cassette.__class__("429", cassette.path, {}, b'{"error":"slow down"}', 429, "application/json"),
        **{"Retry-After": "7"},
    )
    async with proxying(engine.url, store) as served, http.post(served.url + CHAT, json=BODY) as response:
        shown = await response.read()

    assert (429, "7", b'{"error":"slow down"}') == (response.status, response.headers["Retry-After"], shown)


async def test_an_html_page_passes_as_it_came(store, engine, http):
    """A gateway before the engine may answer anything."""
    page = WHOLE.__class__("html", CHAT, {}, b"<html>bad gateway</html>", 502, "text/html")
    engine.plays(page)
    async with proxying(engine.url, store) as served, http.post(served.url + CHAT, json=BODY) as response:
        assert (502, "text/html", page.response) == (response.status, response.content_type, await response.read())
    (step,) = await stored_steps(store, "r1")
    assert ("error", "<html>bad gateway</html>") == (step.status, step.response["body"])


async def test_the_agents_key_never_reaches_the_engine(store, engine, http):
    """The engine gets its own key, the trace headers, and nothing of the agent's secrets."""
    engine.plays(WHOLE)
    sent = {
        "Authorization": "Bearer agent-secret",
        "X-Api-Key": "agent-secret",
        "X-Request-Id": "t1",
        "traceparent": "00-1",
    }
    endpoints = {"endpoints": [{"url": engine.url, "api_key": "engine-key"}]}
    async with (
        proxying(None, store, engines=endpoints) as served,
        http.post(served.url + CHAT, json=BODY, headers=sent) as response,
    ):
        assert 200 == response.status

    (headers,) = engine.headers
    assert "agent-secret" not in str(headers)
    assert ("Bearer engine-key", "t1", "00-1") == (
        headers["authorization"],
        headers["x-request-id"],
        headers["traceparent"],
    )


async def test_a_call_is_logged_in_one_line_without_content_or_keys(store, engine, http, caplog, monkeypatch):
    """Names, counts and durations; neither what was said nor by whose key."""
    monkeypatch.setattr(LOG, "propagate", True)
    engine.plays(WHOLE)
    body = {"messages": [{"role": "user", "content": "a secret question"}]}
    caplog.set_level("INFO", "tokentape")
    async with (
        proxying(engine.url, store) as served,
        http.post(served.url + CHAT, json=body, headers={"X-Api-Key": "a-secret-key"}) as response,
    ):
        said = (await response.json())["choices"][0]["message"]["content"]

    (line,) = [record for record in caplog.records if record.getMessage() == "call"]
    assert {"rollout_id": "r1", "status": 200, "step": "complete", "sampled_tokens": 24}.items() <= line.fields.items()
    assert not any(secret in JsonLines().format(line) for secret in ("secret", said))


async def test_a_client_that_is_gone_before_the_end_is_written_did_not_get_its_turn(store, engine, http):
    """It left after it had seen a part, while the step was being stored: stored whole, and marked."""
    store.waiting["append"], store.reached["append"] = asyncio.Event(), asyncio.Event()
    engine.plays(STREAM)
    async with proxying(engine.url, store) as served:
        response = await http.post(served.url + CHAT, json=BODY)
        await response.content.readuntil(b"\n\n")
        await store.reached["append"].wait()
        response.close()
        await no_call_in_flight(http, served.url)
        store.waiting["append"].set()
        assert 1 == len(await wait_for_undelivered(store, "r1"))

    (step,) = await stored_steps(store, "r1")
    assert ("complete", True) == (step.status, step.exact)


async def test_rollouts_with_a_call_in_flight_are_counted(store, engine, http):
    """Each once, however many calls it has, and none when they are over."""
    go_on = asyncio.Event()
    engine.streams(events(STREAM.response)[:3], then="end", after=go_on)
    async with proxying(engine.url, store) as served:

        async def metric() -> str:
            async with http.get(served.url + "/metrics") as response:
                return re.search(r"\ntokentape_in_flight_rollouts (\S+)", await response.text())[1]

        paths = [CHAT, CHAT, CHAT.replace("r1", "r2")]
        calls = [await http.post(served.url + path, json=BODY) for path in paths]
        during = await metric()
        go_on.set()
        for call in calls:
            await call.read()
        after = await metric()

    assert ("2.0", "0.0") == (during, after)


def failing(times: int):
    """A method that fails the given time, in a way nobody named, and does its work before."""

    def fails(self, *given, real=Exchange.feed):
        self.__dict__["calls"] = self.__dict__.get("calls", 0) + 1
        if self.__dict__["calls"] > times:
            raise ZeroDivisionError
        return real(self, *given)

    return fails


async def test_a_failure_nobody_named_amid_a_stream_leaves_a_partial_step(store, engine, http, monkeypatch, caplog):
    """What came is kept, the client gets the dialect's error as an event, and the log has the id that both name."""
    shown = asyncio.Event()
    first, *others = events(STREAM.response)

    async def respond(request, body):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        await response.write(b"".join([first, *others[:4]]))
        await shown.wait()
        await response.write(b"".join(others[4:]))
        return response

    engine.respond = respond
    monkeypatch.setattr("proxy.protocols.exchange.Exchange.feed", failing(1))
    async with proxying(engine.url, store) as served, http.post(served.url + CHAT, json=BODY) as answer:
        await answer.content.readuntil(b"\n\n")
        shown.set()
        rest = await answer.read()
    (step,) = await stored_steps(store, "r1")
    *_, error, done = events(rest)
    told = orjson.loads(error.removeprefix(b"data: "))["error"]

    assert b"data: [DONE]\n\n" == done
    assert ("server_error", "internal_error") == (told["type"], told["code"])
    assert ("partial", 4, False) == (step.status, step.sampled, step.delivered)
    assert "stream_cut" in step.problems
    error_id = step.reason.removeprefix("internal error ")
    assert error_id in told["message"]
    assert [error_id] == [record.fields["error_id"] for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("method", ["finish", "other_model"])
async def test_a_failure_nobody_named_in_an_unstreamed_call_leaves_a_partial_step(
    store, engine, http, monkeypatch, method
):
    """The client gets the dialect's error, and no half of an answer."""

    def broken(*args):
        raise ZeroDivisionError

    engine.plays(WHOLE)
    monkeypatch.setattr(f"proxy.protocols.exchange.Exchange.{method}", broken)
    async with proxying(engine.url, store) as served, http.post(served.url + CHAT, json=BODY) as response:
        told = await response.json()
    (step,) = await stored_steps(store, "r1")

    assert (500, "internal_error") == (response.status, told["error"]["code"])
    assert ("partial", 24, False) == (step.status, step.sampled, step.delivered)
    assert step.reason.startswith("internal error ")


async def test_a_failure_in_understanding_leaves_a_step_without_tokens(store, engine, http, monkeypatch):
    """Where that is what fails, the step still says that there was a call, and why it has nothing."""

    def broken(*args):
        raise ValueError("odd")

    engine.plays(WHOLE)
    monkeypatch.setattr("proxy.protocols.response.WholeResponse.finish", broken)
    async with proxying(engine.url, store) as served, http.post(served.url + CHAT, json=BODY) as response:
        await response.read()
    (step,) = await stored_steps(store, "r1")

    assert (500, "partial", 0) == (response.status, step.status, step.sampled)
    assert step.reason.startswith("internal error ")


@pytest.mark.parametrize("depth", [250, 254, 600, 1023, 5000])
@pytest.mark.parametrize("field", ["delta", "usage", "x"])
async def test_a_chunk_that_is_nested_deeply_costs_no_step(store, engine, http, depth, field):
    """It is passed on as it came; the tokens before and after it are kept, and the step is flagged."""
    nested = b"[" * depth + b"]" * depth
    in_choice = b"," + b'"delta":{"a":' + nested + b"}" if field == "delta" else b""
    beside = b"" if field == "delta" else b',"%s":' % field.encode() + nested
    deep = b'data: {"id":"i","choices":[{"index":0' + in_choice + b"}]" + beside + b"}\n\n"
    sent = events(STREAM.response)
    engine.streams([*sent[:3], deep, *sent[3:]], then="end")
    async with proxying(engine.url, store) as served, http.post(served.url + CHAT, json=BODY) as response:
        shown = await response.read()
    (step,) = await stored_steps(store, "r1")

    assert shown.endswith(b"data: [DONE]\n\n")
    assert (24, "complete", False) == (step.sampled, step.status, step.exact)


@pytest.mark.parametrize("cassette", [WHOLE, STREAM], ids=str)
async def test_a_header_with_control_characters_is_left_out(store, cassette):
    """No server may write it on; the answer and the step are as without it."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nX-Odd: a\x07b\r\nX-Even: ab\r\nContent-Length: %d\r\n\r\n"
    sent = head % (cassette.content_type.encode(), len(cassette.response)) + cassette.response
    async with bare_engine(sent) as url, before_vllm(url, store) as served, posted(served) as response:
        await response.read()
    (step,) = await stored_steps(store, "r1")

    assert (200, "ab", False) == (response.status, response.headers["X-Even"], "X-Odd" in response.headers)
    assert (True, True) == (step.exact, step.delivered)


def before_vllm(url: str, store):
    """The proxy before an engine that need not say what it is."""
    return proxying(None, store, engines={"endpoints": [{"url": url, "kind": "vllm", "name": "bare"}]})


@asynccontextmanager
async def posted(served):
    async with aiohttp.ClientSession() as http, http.post(served.url + CHAT, json=BODY) as response:
        yield response


@asynccontextmanager
async def bare_engine(response: bytes, *, closes: bool = False):
    """An engine that answers each POST with these bytes, whatever they are, and GETs with 404."""

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
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@pytest.mark.parametrize("status", [b"099", b"101", b"199", b"600", b"999"])
async def test_a_status_that_is_none_is_an_engine_that_broke(store, status):
    """No client could make anything of it."""
    sent = b"HTTP/1.1 %s Odd\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}" % status
    async with bare_engine(sent, closes=True) as url, before_vllm(url, store) as served, posted(served) as response:
        told = await response.json()
    (step,) = await stored_steps(store, "r1")

    assert (502, "upstream_error", "error") == (response.status, told["error"]["type"], step.status)


async def test_an_answer_that_is_cut_short_is_an_error(store):
    """An engine without a Content-Length that dies: its connection ends as if all had come."""
    half = WHOLE.response[: len(WHOLE.response) // 2]
    sent = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n" + half
    async with bare_engine(sent, closes=True) as url, before_vllm(url, store) as served, posted(served) as response:
        told = await response.json()
    (step,) = await stored_steps(store, "r1")

    assert (502, "upstream_error") == (response.status, told["error"]["type"])
    assert ("error", False) == (step.status, step.exact)
    assert step.response["body"].encode() == half


async def test_a_stream_is_over_when_its_end_came(store, engine, http):
    """An engine that keeps the connection open is not waited for."""
    engine.streams([STREAM.response], then="hang")
    async with proxying(engine.url, store) as served, http.post(served.url + CHAT, json=BODY) as response:
        shown = await response.read()
        await engine.aborted.wait()
    (step,) = await stored_steps(store, "r1")

    assert shown.endswith(b"data: [DONE]\n\n")
    assert (True, "complete", True) == (step.exact, step.status, step.delivered)


async def test_a_call_that_our_own_stop_ends_says_so(store, engine, http):
    """Nobody left: the step does not blame its client."""
    engine.streams(events(STREAM.response)[:5], then="hang")
    async with proxying(engine.url, store, drain_timeout_s=0.1) as served:
        response = await http.post(served.url + CHAT, json=BODY)
        await response.content.readuntil(b"\n\n")
    with pytest.raises(aiohttp.ClientPayloadError):
        await response.read()
    (step,) = await stored_steps(store, "r1")

    assert ("partial", "the proxy shut down", False) == (step.status, step.reason, step.delivered)


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
async def test_an_answer_of_a_model_that_the_engine_does_not_serve_is_flagged(store, engine, http, listed, problems):
    """Compared with the engine's own list, if it has one, and not with the name that the client used."""
    if listed is not None:
        engine.fixed_responses["/v1/models"] = {"object": "list", "data": listed}
    engine.plays(replace(WHOLE, response=WHOLE.response.replace(b'"model":"tiny"', b'"model":"policy"')))
    async with proxying(engine.url, store) as served, http.post(served.url + CHAT, json=BODY) as response:
        await response.read()
    (step,) = await stored_steps(store, "r1")

    assert problems == step.problems


async def test_an_engine_that_names_an_unlisted_model_is_asked_for_its_list_once(store, engine, http):
    """Not once for each call, nor by each of the calls that run at once."""
    engine.plays(replace(WHOLE, response=WHOLE.response.replace(b'"model":"tiny"', b'"model":"policy"')))

    async def call(served):
        async with http.post(served.url + CHAT, json=BODY) as response:
            await response.read()

    async with proxying(engine.url, store) as served:
        await call(served)
        known = engine.probes
        await asyncio.gather(*(call(served) for _ in range(20)))

    assert known == engine.probes


async def test_a_server_that_always_sends_usage_is_remembered(store, engine, http):
    """A later stream of several choices is not asked for usage, and so none is hidden from its client."""
    engine.plays(load("forced_usage/si3_utf8_stream"))
    async with proxying(engine.url, store) as served:
        for _ in range(2):
            async with http.post(served.url + CHAT, json=BODY | {"stream": True}) as response:
                await response.read()

    assert [True, False] == ["stream_options" in body for body in engine.requests]


async def test_every_stored_step_of_parallel_calls_is_there_once(store, engine, http):
    """Sixty calls at once: sixty steps, each named in one reply."""
    engine.plays(WHOLE)
    async with proxying(engine.url, store) as served:

        async def call() -> str:
            async with http.post(served.url + CHAT, json=BODY) as response:
                await response.read()
                return response.headers["X-Step-Id"]

        told = await asyncio.gather(*(call() for _ in range(60)))
        metrics = await (await http.get(served.url + "/metrics")).text()

    steps = await stored_steps(store, "r1")
    assert sorted(told) == sorted(step.step_id for step in steps)
    assert re.search(r'tokentape_steps_total{fidelity="exact",status="complete"} 60.0', metrics)
    assert "tokentape_in_flight_calls 0.0" in metrics


@pytest.mark.parametrize("cassette", [WHOLE, STREAM], ids=str)
async def test_a_client_that_is_lost_just_before_the_end_did_not_get_its_turn(
    store, engine, http, monkeypatch, cassette
):
    """Its step is stored whole already, and nobody has noticed yet: the write finds out."""

    async def lost(context, call, client, outcome):
        call.request.transport.abort()
        return await _end(context, call, client, outcome)

    monkeypatch.setattr("proxy.api.model.relay._end", lost)
    engine.plays(cassette)
    async with proxying(engine.url, store) as served:
        with pytest.raises(aiohttp.ClientError):
            async with http.post(served.url + CHAT, json=BODY) as response:
                await response.read()
        undelivered = await wait_for_undelivered(store, "r1")

    (step,) = await stored_steps(store, "r1")
    assert ({step.step_id}, "complete") == (undelivered, step.status)


@pytest.mark.parametrize("cassette", [WHOLE, STREAM], ids=str)
async def test_a_client_whose_machine_went_away_did_not_get_its_turn(store, engine, http, cassette):
    """Its socket is reset amid the call, without a goodbye: the engine stops, and the step is neither whole nor delivered."""
    engine.streams(events(STREAM.response)[:3], then="hang") if cassette.is_stream else engine.hangs()
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

    assert ("partial", False, "the client disconnected") == (step.status, step.delivered, step.reason)


def two_endpoints(*urls: str, **said) -> dict:
    """Settings: these endpoints, as engines of their own."""
    return {"engines": {"endpoints": [{"url": url, "name": url[-5:]} for url in urls], **said}}


DEAD = "http://127.0.0.1:9"


async def test_with_one_of_two_endpoints_dead_no_call_fails(store, engine, http):
    """Whichever endpoint a rollout is sent to, its call is answered, and its step says where it was tried in vain."""
    engine.plays(WHOLE)
    async with proxying(None, store, **two_endpoints(DEAD, engine.url, eject_after=99)) as served:
        for n in range(12):
            path = f"/rollouts/f{n}/v1/chat/completions"
            async with http.post(served.url + path, json=BODY) as response:
                assert 200 == response.status

    steps = [step for n in range(12) for step in await stored_steps(store, f"f{n}")]
    tried = [step.extra["attempts"] for step in steps if "attempts" in step.extra]
    assert 12 == len(steps)
    assert all(step.exact and step.engine.name == engine.url[-5:] for step in steps)
    assert 0 < len(tried) < 12
    assert all(len(attempts) == 1 and "is unreachable" in attempts[0]["fault"] for attempts in tried)


async def test_a_dead_endpoint_costs_the_first_calls_an_attempt_and_no_later_one(store, engine, http):
    """It is passed over after engines.eject_after faults in a row: nobody pays for its refused connections again."""
    engine.plays(WHOLE)
    async with proxying(None, store, **two_endpoints(DEAD, engine.url, eject_after=2)) as served:
        for n in range(20):
            async with http.post(f"{served.url}/rollouts/d{n}/v1/chat/completions", json=BODY) as response:
                assert 200 == response.status

    steps = [step for n in range(20) for step in await stored_steps(store, f"d{n}")]
    assert sum("attempts" in step.extra for step in steps) <= 2


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_an_engine_that_is_away_by_its_own_word_is_passed_over(store, engine, http, status):
    """A 502, 503 or 504 goes to the client only from the last endpoint; none is asked twice."""
    async with fake_engine() as other:

        async def away(request, body):
            return web.json_response({"error": {"message": "loading"}}, status=status)

        engine.respond = away
        other.plays(WHOLE)
        async with proxying(None, store, **two_endpoints(engine.url, other.url, eject_after=99)) as served:
            for n in range(40):
                async with http.post(f"{served.url}/rollouts/a{n}/v1/chat/completions", json=BODY) as response:
                    assert 200 == response.status
            assert 0 < len(engine.requests) < 40
            other.respond = away
            before = len(engine.requests) + len(other.requests)
            async with http.post(served.url + CHAT, json=BODY) as response:
                assert status == response.status
            assert before + 2 == len(engine.requests) + len(other.requests)


async def test_attempts_are_bounded(store, engine, http):
    """With engines.max_attempts 1, the fault of the one endpoint is the client's."""
    engine.plays(WHOLE)
    async with proxying(None, store, **two_endpoints(DEAD, engine.url, max_attempts=1, eject_after=99)) as served:
        statuses = set()
        for n in range(40):  # by their names, so that each endpoint surely has some
            async with http.post(f"{served.url}/rollouts/b{n}/v1/chat/completions", json=BODY) as response:
                statuses.add(response.status)
    assert {200, 503} == statuses


async def test_after_a_shown_byte_no_other_endpoint_is_asked(store, engine, http):
    """A stream that breaks off once it was shown breaks off for the client; its turn is not begun anew."""
    async with fake_engine() as other:
        for one in (engine, other):
            one.streams(events(STREAM.response)[:5], then="die")
        proxy = proxying(None, store, **two_endpoints(engine.url, other.url))
        async with proxy as served, http.post(served.url + CHAT, json=BODY) as response:
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
        assert 1 == len(engine.requests) + len(other.requests)


async def test_the_call_is_planned_anew_for_an_engine_of_another_kind(store, engine, http):
    """What one kind is asked for is not asked of another: the plan is the answering engine's own."""
    engine.plays(WHOLE)
    endpoints = [{"url": DEAD, "name": "dead", "kind": "sglang"}, {"url": engine.url, "name": "live"}]
    said = {"endpoints": endpoints, "eject_after": 99}
    async with proxying(None, store, engines=said) as served:
        for n in range(12):
            async with http.post(f"{served.url}/rollouts/k{n}/v1/chat/completions", json=BODY) as response:
                assert 200 == response.status
    steps = [step for n in range(12) for step in await stored_steps(store, f"k{n}")]
    assert any("attempts" in step.extra for step in steps)
    assert all(step.exact and step.engine.kind == "vllm" for step in steps)
    assert all(body["return_token_ids"] for body in engine.requests)


def one_at_once(url: str, **said) -> dict:
    """Settings: an endpoint that takes one call at once."""
    return {"engines": {"endpoints": [{"url": url, "name": "fake", "max_in_flight": 1}], **said}}


async def shown_engine(http, url) -> dict:
    async with http.get(url + "/engines") as response:
        (shown,) = (await response.json())["engines"]
    return shown


async def test_past_the_queue_a_call_is_refused_and_leaves_no_step(store, engine, http):
    """429 with Retry-After in the dialect's shape, by length and by time; nothing is sent."""
    for bound, waits in ({"max_queued": 1}, True), ({"queue_timeout_s": 0.01}, False):
        (setting,) = bound
        engine.reached.clear()
        engine.aborted.clear()
        engine.requests.clear()
        engine.hangs()
        async with proxying(None, store, **one_at_once(engine.url, **bound)) as served:
            calls = [asyncio.ensure_future(http.post(served.url + CHAT, json=BODY))]
            await engine.reached.wait()
            if waits:
                path = "/rollouts/r2/v1/chat/completions"
                calls.append(asyncio.ensure_future(http.post(served.url + path, json=BODY)))
                while (await shown_engine(http, served.url))["queued"] != 1:
                    pass
            async with http.post(served.url + "/rollouts/r3/v1/chat/completions", json=BODY) as response:
                error = (await response.json())["error"]
            assert (429, "1", "engine_busy") == (response.status, response.headers["Retry-After"], error["code"])
            assert f"engines.{setting}" in error["message"]
            async with http.get(served.url + "/metrics") as shown:
                assert 'tokentape_calls_total{dialect="chat",engine="fake",status="429"} 1.0' in await shown.text()
            for call in reversed(calls):
                call.cancel()
            await engine.aborted.wait()
            assert 1 == len(engine.requests)

    assert [[], []] == [await stored_steps(store, name) for name in ("r2", "r3")]


async def test_a_client_that_leaves_the_queue_is_not_called_for(store, engine, http):
    """Nothing is sent for it and nothing recorded; whoever is behind it has its turn."""
    go_on = asyncio.Event()
    engine.plays(WHOLE)
    played = engine.respond

    async def respond(request, body):
        await go_on.wait()
        return await played(request, body)

    engine.respond = respond
    async with proxying(None, store, **one_at_once(engine.url)) as served:
        calls = []
        for n in range(3):
            path = f"{served.url}/rollouts/q{n}/v1/chat/completions"
            calls.append(asyncio.ensure_future(http.post(path, json=BODY)))
            while (shown := await shown_engine(http, served.url))["queued"] != n or not shown["in_flight"]:
                pass
        calls[1].cancel()
        while (await shown_engine(http, served.url))["queued"] != 1:
            pass
        go_on.set()
        assert [200, 200] == [(await calls[n]).status for n in (0, 2)]
        shown = await shown_engine(http, served.url)
        assert (0, 0) == (shown["in_flight"], shown["queued"])

    assert 2 == len(engine.requests)
    assert [1, 0, 1] == [len(await stored_steps(store, f"q{n}")) for n in range(3)]


async def test_a_turn_is_given_back_however_a_call_ends(store, engine, http):
    """Answered, broken off, left by its client before and after the first byte: the next call has it."""
    async with proxying(None, store, **one_at_once(engine.url)) as served:
        engine.plays(WHOLE)
        await http.post(served.url + CHAT, json=BODY)
        engine.streams(events(STREAM.response)[:5], then="die")
        async with http.post(served.url + CHAT, json=BODY) as response:
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
        engine.streams(events(STREAM.response)[:5], then="hang")
        async with http.post(served.url + CHAT, json=BODY) as response:
            await response.content.readuntil(b"\n\n")
            response.close()
        await engine.aborted.wait()
        engine.reached.clear()
        engine.hangs()
        calling = asyncio.ensure_future(http.post(served.url + CHAT, json=BODY))
        await engine.reached.wait()
        calling.cancel()
        while (await shown_engine(http, served.url))["in_flight"]:
            pass
        engine.plays(WHOLE)
        async with http.post(served.url + CHAT, json=BODY) as response:
            assert 200 == response.status
        assert 0 == (await shown_engine(http, served.url))["in_flight"]


async def test_a_client_of_a_replayed_call_hears_while_it_waits_for_its_turn(store, engine, http):
    """Comments, so that no timeout bites; a refusal is then told as an event of its stream, and is a step."""
    engine.hangs()
    settings = one_at_once(engine.url, queue_timeout_s=1)
    async with proxying(
        None, store, **settings, record={"keep_alive_interval_s": 0.01, "streaming": "replay"}
    ) as served:
        hanging = asyncio.ensure_future(http.post(served.url + CHAT, json=BODY))
        await engine.reached.wait()
        async with http.post(f"{served.url}/rollouts/k/v1/chat/completions", json={**BODY, "stream": True}) as response:
            text = await response.read()
        hanging.cancel()

    (step,) = await stored_steps(store, "k")
    assert text.startswith(b":")
    assert b"engines.queue_timeout_s" in text
    assert "error" == step.status
