"""Calls that their engine ends early go on: the client reads one response, and the step has all that was sampled."""

import asyncio
import threading
from contextlib import asynccontextmanager, suppress
from itertools import count, pairwise

import orjson
import pytest
from aiohttp import ClientPayloadError, web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.cut_calls import (
    COUNT,
    MESSAGES,
    REPLIES,
    answer_of,
    content_of,
    ends,
    read,
    replied,
    resuming,
)
from tests.support.fakes import listening, proxying
from tests.support.scripted_engine import PROMPT, REPLY, ScriptedEngine, tokens_of
from tests.support.stored import stored_steps, wait_for_steps

from proxy.api.in_flight import InFlightBytes
from proxy.api.model import relay
from proxy.api.model import resuming as resuming_calls
from proxy.errors import Conflict
from proxy.protocols.response import StreamResponse


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ends=ends,
    is_stream=st.booleans(),
    is_chat=st.booleans(),
    limit=st.sampled_from([99, 20]),
    kind=st.sampled_from(sorted(REPLIES)),
)
async def test_a_call_that_is_cut_anywhere_equals_one_that_was_never_cut(
    store, http, ends, is_stream, is_chat, limit, kind
):
    """Its text, its ids, its logprobs, its token counts and its record; each sampled token is in the step once."""
    reply, stops = REPLIES[kind]
    body = {"model": "m", "max_tokens": limit, "stop": stops}
    body |= {"messages": MESSAGES} if is_chat else {"prompt": "hi"}
    body |= {"stream": True, "stream_options": {"include_usage": True}} if is_stream else {}
    _, expected_raw, expected = await replied(http, store, body, reply)
    status, raw, step = await replied(http, store, body, reply, ends)

    assert (200, *read(expected_raw, is_stream=is_stream)) == (status, *read(raw, is_stream=is_stream))
    ((choice,), (own,)) = step.choices, expected.choices
    assert (step.status, step.problems, [*step.prompts[0]]) == ("complete", (), PROMPT)
    assert (own.ids, own.logprobs, own.finish_reason, own.stop_reason) == (
        choice.ids,
        choice.logprobs,
        choice.finish_reason,
        choice.stop_reason,
    )
    assert [(0, len(own.ids))] == [(span.start, span.end) for span in choice.spans]
    assert expected.usage == step.usage
    assert content_of(expected) == content_of(step)


async def test_the_rest_is_requested_with_the_ids_so_far(store, http):
    """Its limits are reduced, and its seed is another one."""
    engine = ScriptedEngine()
    engine.ends = [(5, "abort")]
    body = {"model": "m", "messages": MESSAGES, "max_tokens": COUNT, "min_tokens": 8, "seed": 7}
    async with listening(engine.handle) as url, resuming(url, store) as served:
        await answer_of(http, served, body)
        (step,) = await stored_steps(store, "r1")

    first, second = engine.requests
    assert {"prompt_token_ids": [*PROMPT, *REPLY[:5].encode()]} == second["kv_transfer_params"]
    assert (second["max_tokens"], second["min_tokens"], second["seed"]) == (COUNT - 5, 3, 12)
    assert first["messages"] == second["messages"]
    assert step.extra["resumed"] == 1
    assert step.extra["attempts"] == [{"endpoint": "fake", "fault": "aborted by the engine", "tokens": 5}]


async def test_a_call_that_cannot_be_resumed_starts_again_if_its_client_has_received_nothing(store, http):
    engine = ScriptedEngine()
    engine.ends = [(5, "abort")]
    body = {"model": "m", "messages": MESSAGES, "frequency_penalty": 0.5}
    async with listening(engine.handle) as url, resuming(url, store) as served:
        _, raw = await answer_of(http, served, body)
        (step,) = await stored_steps(store, "r1")
        counted = await metrics_of(http, served)

    assert read(raw, is_stream=False)[0] == REPLY
    assert tokens_of(REPLY) == [*step.choices[0].ids]
    assert "resumed" not in step.extra
    assert 'tokentape_resumed_calls_total{engine="fake",reason="penalties",result="restarted"} 1.0' in counted
    assert 'tokentape_cut_tokens_total{result="lost"} 5.0' in counted


async def test_a_stream_that_cannot_be_resumed_ends_as_its_engine_ended_it(store, http):
    engine = ScriptedEngine()
    engine.ends = [(5, "abort")]
    body = {"model": "m", "messages": MESSAGES, "stream": True, "frequency_penalty": 0.5}
    async with listening(engine.handle) as url, resuming(url, store) as served:
        _, raw = await answer_of(http, served, body)
        (step,) = await stored_steps(store, "r1")

    assert (REPLY[:5], ["abort"]) == read(raw, is_stream=True)[:2]
    assert step.problems == ("aborted",)


async def test_a_stream_without_token_ids_does_not_start_again_once_it_was_shown(store, http):
    """Nothing is known of what was sampled; the client would receive it twice."""
    engine = ScriptedEngine(has_ids=False)
    engine.ends = [(5, "abort")]
    body = {"model": "m", "messages": MESSAGES, "stream": True}
    async with listening(engine.handle) as url, resuming(url, store) as served:
        _, raw = await answer_of(http, served, body)

    assert (REPLY[:5], ["abort"]) == read(raw, is_stream=True)[:2]
    assert len(engine.requests) == 1


async def streamed(request, *choices, **first) -> web.StreamResponse:
    """Send events with these choices, the first one with more fields."""
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await stream.prepare(request)
    for choice in choices:
        event = {"id": "c", "created": 1, "model": "m", "choices": [{"index": 0, **choice}], **first}
        await stream.write(b"data: " + orjson.dumps(event) + b"\n\n")
        first = {}
    await stream.write(b"data: [DONE]\n\n")
    return stream


HELLO = {"delta": {"role": "assistant", "content": "Hello"}, "finish_reason": None}
ABORTED = {"delta": {}, "finish_reason": "abort"}


async def test_a_stream_with_an_unreadable_event_does_not_start_again_once_it_was_shown(store, http):
    """What it had is recorded apart, as unparsed; the client would receive it twice."""
    engine = ScriptedEngine()

    async def handle(request):
        if not request.path.endswith("/completions"):
            return await engine.handle(request)
        engine.requests.append(await request.json())
        return await streamed(request, HELLO, {"delta": "?", "finish_reason": None}, ABORTED)

    body = {"model": "m", "messages": MESSAGES, "stream": True}
    async with listening(handle) as url, resuming(url, store, max_resumes=2) as served:
        _, raw = await answer_of(http, served, body)

    assert len(engine.requests) == raw.count(b"Hello") == 1


async def test_a_rest_may_be_sampled_for_longer_than_a_call_may_wait(store, http):
    """If it is then lost, or interrupted, the call goes on with what it had before."""
    engine, lost = ScriptedEngine(), []
    engine.ends = [(5, "abort")]

    async def handle(request):
        if request.path.endswith("/completions") and engine.requests and not lost:
            lost.append(request)
            await asyncio.sleep(2.5)
            request.transport.close()
            return web.Response()
        return await engine.handle(request)

    async with listening(handle) as url, resuming(url, store, resume_timeout_s=2) as served:
        _, raw = await answer_of(http, served, {"model": "m", "messages": MESSAGES})
        (step,) = await stored_steps(store, "r1")

    assert read(raw, is_stream=False)[:2] == (REPLY, ["stop"])
    assert (1, (), tokens_of(REPLY)) == (len(lost), step.problems, [*step.choices[0].ids])


async def test_a_rest_with_a_prompt_that_is_no_list_ends_as_its_engine_ended_it(store, http):
    """The step has no error of TokenTape."""
    engine = ScriptedEngine()
    engine.ends = [(5, "abort")]

    async def handle(request):
        if request.path.endswith("/completions") and engine.requests:
            return await streamed(request, HELLO, ABORTED, prompt_token_ids=5)
        return await engine.handle(request)

    body = {"model": "m", "messages": MESSAGES, "stream": True}
    async with listening(handle) as url, resuming(url, store) as served:
        _, raw = await answer_of(http, served, body)
        (step,) = await stored_steps(store, "r1")

    assert raw.endswith(b"data: [DONE]\n\n")
    assert "internal error" not in (step.reason or "")
    assert "unparsed_event" in step.problems


async def test_a_rest_that_an_engine_rejects_is_not_sent_again(store, http):
    """Its status would be the same until the call has waited for as long as it may."""
    engine = ScriptedEngine()
    engine.ends = [(5, "abort")]

    async def handle(request):
        if request.path.endswith("/completions") and engine.requests:
            engine.requests.append({})
            return web.json_response({"error": {"message": "too long"}}, status=400)
        return await engine.handle(request)

    body = {"model": "m", "messages": MESSAGES, "stream": True}
    async with listening(handle) as url, resuming(url, store) as served:
        with pytest.raises(ClientPayloadError):
            await answer_of(http, served, body)
        (step,) = await stored_steps(store, "r1")

    assert len(engine.requests) == 2
    assert ("partial", [*REPLY[:5].encode()]) == (step.status, [*step.choices[0].ids])


@pytest.mark.parametrize(("at", "stops"), [(5, ["never seen"]), (12, ["brown fox."])])
async def test_a_stream_that_waits_too_long_ends_as_its_engine_ended_it(store, http, at, stops):
    """Each text is shown once, and the step is recorded."""
    engine = ScriptedEngine()
    engine.ends = [(at, "abort")]
    body = {"model": "m", "messages": MESSAGES, "stream": True, "stop": stops}
    paused = asyncio.Event()

    async def handle(request):
        if request.path.endswith("/completions"):
            async with http.post(f"{served.url}/policy/pause?drain_s=0", json={}) as response:
                assert response.status == 200
            paused.set()
        return await engine.handle(request)

    async with listening(handle) as url, resuming(url, store, resume_timeout_s=0.1) as served:
        _, raw = await answer_of(http, served, body)
        (step,) = await stored_steps(store, "r1")

    assert paused.is_set()
    assert (REPLY[:at], ["abort"]) == read(raw, is_stream=True)[:2]
    assert (REPLY[:at], ("aborted",)) == (content_of(step), step.problems)


@pytest.mark.parametrize("at", [20, 38], ids=["before", "within"])
async def test_an_interrupted_stream_goes_on_although_text_was_withheld_for_a_stop_string(store, http, at):
    """Before the stop string and within it: an engine that is disconnected does not send that text."""
    engine = ScriptedEngine()
    engine.ends = [(at, "held")]
    body = {"model": "m", "messages": MESSAGES, "stream": True, "stop": ["lazy dog"]}
    async with listening(engine.handle) as url, resuming(url, store) as served:
        answering = asyncio.create_task(answer_of(http, served, body))
        await engine.held.wait()
        async with http.post(f"{served.url}/policy/pause?drain_s=20", json={"in_flight": "resume"}) as response:
            assert response.status == 200
        async with http.post(f"{served.url}/policy/resume") as response:
            assert response.status == 200
        _, raw = await answering
        engine.released.set()

    assert (REPLY[:35], ["stop"]) == read(raw, is_stream=True)[:2]


async def test_the_step_of_a_stream_that_waits_too_long_after_an_interruption_is_recorded(store, http):
    """It was interrupted within a stop string, so that its rest would have been told."""
    engine = ScriptedEngine()
    engine.ends = [(12, "held")]
    body = {"model": "m", "messages": MESSAGES, "stream": True, "stop": ["brown fox."]}
    async with listening(engine.handle) as url, resuming(url, store, resume_timeout_s=0.1) as served:
        answering = asyncio.create_task(answer_of(http, served, body))
        await engine.held.wait()
        async with http.post(f"{served.url}/policy/pause?drain_s=20", json={"in_flight": "resume"}) as response:
            assert response.status == 200
        with pytest.raises(ClientPayloadError):
            await answering
        engine.released.set()
        (step,) = await stored_steps(store, "r1")

    assert ("partial", [*REPLY[:12].encode()]) == (step.status, [*step.choices[0].ids])


@pytest.mark.parametrize("ends", [[], [(20, "held")]], ids=["whole", "held"])
async def test_what_is_parsed_while_a_call_is_interrupted_is_shown(store, http, monkeypatch, ends):
    """Long reads are parsed in a thread."""
    engine, feeding, interrupted = ScriptedEngine(), asyncio.Event(), threading.Event()
    engine.ends = ends
    interrupt, feed, loop = InFlightBytes.interrupt_sampled, StreamResponse.feed, asyncio.get_running_loop()

    def interrupt_sampled(*args, **options):
        counts = interrupt(*args, **options)
        interrupted.set()
        return counts

    def feed_later(self, read):
        if b'"token_ids"' in read or b"[DONE]" in read:
            loop.call_soon_threadsafe(feeding.set)
            interrupted.wait(20)
        return feed(self, read)

    monkeypatch.setattr(InFlightBytes, "interrupt_sampled", interrupt_sampled)
    monkeypatch.setattr(StreamResponse, "feed", feed_later)
    monkeypatch.setattr(relay, "PLAIN_BYTES", 0)
    async with listening(engine.handle) as url, resuming(url, store) as served:
        body = {"model": "m", "messages": MESSAGES, "stream": True}
        answering = asyncio.create_task(answer_of(http, served, body))
        await feeding.wait()
        async with http.post(f"{served.url}/policy/pause?drain_s=20", json={"in_flight": "resume"}) as response:
            paused = await response.json()
        async with http.post(f"{served.url}/policy/resume") as response:
            assert response.status == 200
        _, raw = await answering
        engine.released.set()

    assert (paused["drained"], paused["in_flight"]) == (True, 0)
    assert read(raw, is_stream=True)[:2] == (REPLY, ["stop"])


async def test_a_pause_does_not_cut_a_stream_that_has_ended(store, http, monkeypatch):
    """Its terminal event has arrived, and the end of its body has not."""
    engine, interrupted, ended = ScriptedEngine(), asyncio.Event(), asyncio.Event()
    interrupt = InFlightBytes.interrupt_sampled

    def interrupt_sampled(*args, **options):
        counts = interrupt(*args, **options)
        interrupted.set()
        return counts

    async def handle(request):
        response = await engine.handle(request)
        if request.path.endswith("/completions"):
            ended.set()
            await interrupted.wait()
        return response

    monkeypatch.setattr(InFlightBytes, "interrupt_sampled", interrupt_sampled)
    monkeypatch.setattr(relay, "_END_TIMEOUT_S", 30)
    async with listening(handle) as url, resuming(url, store) as served:
        body = {"model": "m", "messages": MESSAGES, "stream": True}
        answering = asyncio.create_task(answer_of(http, served, body))
        await ended.wait()
        async with http.get(f"{served.url}/health") as response:  # the last event was read
            assert response.status == 200
        async with http.post(f"{served.url}/policy/pause?drain_s=20", json={"in_flight": "resume"}) as response:
            paused = await response.json()
        _, raw = await answering

    assert (paused["drained"], paused["in_flight"]) == (True, 0)
    assert read(raw, is_stream=True)[:2] == (REPLY, ["stop"])


async def test_an_engine_that_samples_more_than_the_limit_of_the_whole_is_noticed(store, http):
    engine = ScriptedEngine()
    engine.ends, engine.overshoots = [(5, "abort")], 2
    async with listening(engine.handle) as url, resuming(url, store) as served:
        await answer_of(http, served, {"model": "m", "messages": MESSAGES, "max_tokens": 20})
        (step,) = await stored_steps(store, "r1")

    assert (step.sampled, step.problems) == (22, ("too_many_tokens",))


async def test_a_lost_endpoint_is_tried_less_and_less_often(store, http):
    """Until it is back: after as long as the call has waited, and every two seconds at last."""
    engine, lost = ScriptedEngine(), []

    async def handle(request):
        if request.path.endswith("/completions") and len(lost) < 4:
            lost.append(asyncio.get_running_loop().time())
            request.transport.close()
            return web.Response()
        return await engine.handle(request)

    async with listening(handle) as url, resuming(url, store) as served:
        _, raw = await answer_of(http, served, {"model": "m", "messages": MESSAGES})

    assert read(raw, is_stream=False)[0] == REPLY
    assert len(lost) == 4
    assert all(later - earlier > 0.09 for earlier, later in pairwise(lost))


async def test_a_call_is_resumed_so_often_and_then_ends(store, http):
    engine = ScriptedEngine()
    engine.ends = [(2, "abort")] * 9
    body = {"model": "m", "messages": MESSAGES}
    async with listening(engine.handle) as url, resuming(url, store, max_resumes=3) as served:
        _, raw = await answer_of(http, served, body)

    assert (REPLY[:8], ["abort"]) == read(raw, is_stream=False)[:2]


async def test_another_endpoint_goes_on_with_a_stream_whose_engine_is_lost(store, http):
    first, second = ScriptedEngine(), ScriptedEngine()
    first.ends, second.ends = [(9, "lost")], [(9, "lost")]
    body = {"model": "m", "messages": MESSAGES, "stream": True}
    async with listening(first.handle) as one, listening(second.handle) as other:
        engines = {"endpoints": [{"url": one, "name": "a"}, {"url": other, "name": "b"}]}
        async with proxying(None, store, engines=engines, agents={"max_resumes": 9}) as served:
            _, raw = await answer_of(http, served, body)
            (step,) = await stored_steps(store, "r1")

    assert read(raw, is_stream=True)[:2] == (REPLY, ["stop"])
    assert {*(attempt["endpoint"] for attempt in step.extra["attempts"]), step.engine.name} == {"a", "b"}


async def test_a_pause_while_the_text_is_looked_up_does_not_cut_a_stream(store, http, monkeypatch):
    """It interrupts calls again and again; this one has left its engine already, and goes on after the pause."""
    engine, interrupted = ScriptedEngine(), asyncio.Event()
    engine.ends = [(5, "held")]
    interrupt = InFlightBytes.interrupt_sampled

    def interrupt_sampled(*args, **options):
        interrupted.set()
        return interrupt(*args, **options)

    async def handle(request):
        if request.path == "/detokenize":
            interrupted.clear()
            await interrupted.wait()
        return await engine.handle(request)

    async def post(path, **body):
        async with http.post(f"{served.url}{path}", json=body) as response:
            return await response.json()

    monkeypatch.setattr(InFlightBytes, "interrupt_sampled", interrupt_sampled)
    async with listening(handle) as url, resuming(url, store) as served:
        body = {"model": "m", "messages": MESSAGES, "stream": True}
        answering = asyncio.create_task(answer_of(http, served, body))
        await engine.held.wait()
        paused = await post("/policy/pause?drain_s=20", in_flight="resume")
        interrupted.set()
        await post("/policy/resume")
        _, raw = await answering
        engine.released.set()

    assert (paused["drained"], paused["in_flight"]) == (True, 0)
    assert read(raw, is_stream=True)[:2] == (REPLY, ["stop"])


@pytest.mark.parametrize(("fields", "agents"), [({"frequency_penalty": 0.5}, {}), ({}, {"max_resumes": 0})])
async def test_a_pause_lets_a_stream_end_that_cannot_be_resumed(store, http, monkeypatch, fields, agents):
    """As long as it drains: an interruption would end the stream with what the client has received."""
    engine, interrupted, beats = ScriptedEngine(), asyncio.Event(), count()
    engine.ends = [(5, "held")]
    interrupt = InFlightBytes.interrupt_sampled

    def interrupt_sampled(*args, **options):
        if next(beats) > 1:
            engine.released.set()
        interrupted.set()
        return interrupt(*args, **options)

    monkeypatch.setattr(InFlightBytes, "interrupt_sampled", interrupt_sampled)
    async with listening(engine.handle) as url, resuming(url, store, **agents) as served:
        body = {"model": "m", "messages": MESSAGES, "stream": True, **fields}
        answering = asyncio.create_task(answer_of(http, served, body))
        await engine.held.wait()
        async with http.post(f"{served.url}/policy/pause?drain_s=20", json={"in_flight": "resume"}) as response:
            paused = await response.json()
        _, raw = await answering

    assert interrupted.is_set()
    assert (paused["drained"], paused["in_flight"]) == (True, 0)
    assert read(raw, is_stream=True)[:2] == (REPLY, ["stop"])


async def test_a_pause_does_not_cut_a_call_whose_response_is_whole(store, http, monkeypatch):
    """The models of the engine are requested for its step meanwhile: the pause waits, again and again."""
    engine, interrupted, asked = ScriptedEngine(), asyncio.Event(), asyncio.Event()
    interrupt = InFlightBytes.interrupt_sampled

    def interrupt_sampled(*args, **options):
        interrupted.set()
        return interrupt(*args, **options)

    async def handle(request):
        if request.path == "/v1/models" and engine.requests:
            asked.set()
            for _ in range(2):
                interrupted.clear()
                await interrupted.wait()
        return await engine.handle(request)

    monkeypatch.setattr(InFlightBytes, "interrupt_sampled", interrupt_sampled)
    async with listening(handle) as url, resuming(url, store) as served:
        body = {"model": "another", "messages": MESSAGES, "stream": True}
        answering = asyncio.create_task(answer_of(http, served, body))
        await asyncio.wait([answering, asyncio.create_task(asked.wait())], return_when=asyncio.FIRST_COMPLETED)
        assert asked.is_set()
        async with http.post(f"{served.url}/policy/pause?drain_s=20", json={"in_flight": "resume"}) as response:
            paused = await response.json()
        _, raw = await answering

    assert (paused["drained"], paused["in_flight"]) == (True, 0)
    assert read(raw, is_stream=True)[:2] == (REPLY, ["stop"])


async def metrics_of(http, served) -> str:
    async with http.get(f"{served.url}/metrics") as response:
        return await response.text()


@pytest.mark.parametrize("lost", ["closed", 503])
async def test_a_stream_goes_on_at_its_engine_once_that_is_restarted(store, http, lost):
    """Until then nothing of it responds, not even with the text of what was sampled; a gateway before it may."""
    engine, refused = ScriptedEngine(), []
    engine.ends = [(12, "lost")]

    async def handle(request):
        if engine.requests and len(refused) < 2:
            refused.append(request.path)
            if lost == 503:
                return web.Response(status=lost)
            request.transport.close()
        return await engine.handle(request)

    body = {"model": "m", "messages": MESSAGES, "stream": True}
    async with listening(handle) as url, resuming(url, store) as served:
        _, raw = await answer_of(http, served, body)
        (step,) = await stored_steps(store, "r1")

    assert read(raw, is_stream=True)[:2] == (REPLY, ["stop"])
    assert (tokens_of(REPLY), 1) == ([*step.choices[0].ids], step.extra["resumed"])
    assert "/detokenize" in refused


async def test_a_pause_does_not_wait_for_a_call_whose_text_is_requested_again(store, http):
    """Its engine is lost; the pause is for its restart with other weights."""
    engine, asked, is_lost = ScriptedEngine(), asyncio.Event(), True
    engine.ends = [(12, "lost")]

    async def handle(request):
        if engine.requests and is_lost:
            asked.set()
            request.transport.close()
        return await engine.handle(request)

    body = {"model": "m", "messages": MESSAGES, "stream": True}
    async with listening(handle) as url, resuming(url, store) as served:
        answering = asyncio.create_task(answer_of(http, served, body))
        await asked.wait()
        async with http.post(f"{served.url}/policy/pause?drain_s=20", json={"in_flight": "resume"}) as response:
            paused = await response.json()
        is_lost = False
        async with http.post(f"{served.url}/policy/resume") as response:
            assert response.status == 200
        _, raw = await answering

    assert (paused["drained"], paused["in_flight"]) == (True, 0)
    assert read(raw, is_stream=True)[:2] == (REPLY, ["stop"])


async def test_a_stream_that_is_cut_when_no_endpoint_serves_its_model_any_more_has_a_step(store, http):
    """The endpoints were replaced before: it ends with what was sampled, which is recorded."""
    engine = ScriptedEngine()
    engine.ends = [(12, "held")]
    body = {"model": "m", "messages": MESSAGES, "stream": True}
    async with listening(engine.handle) as url:
        endpoint = {"url": url, "name": "fake", "models": ["m"]}
        keys, headers = {"api_keys": ["control-key"]}, {"Authorization": "Bearer control-key"}
        async with proxying(
            None, store, engines={"endpoints": [endpoint]}, control=keys, agents={"max_resumes": 9}
        ) as served:
            answering = asyncio.create_task(answer_of(http, served, body))
            await engine.held.wait()
            others = {"endpoints": [endpoint | {"models": ["another"]}]}
            async with http.put(f"{served.url}/engines", json=others, headers=headers) as response:
                assert response.status == 200
            pause = f"{served.url}/policy/pause?drain_s=20"
            async with http.post(pause, json={"in_flight": "resume"}, headers=headers) as response:
                assert response.status == 200
            with suppress(ClientPayloadError):
                await answering
            engine.released.set()
            (step,) = await wait_for_steps(store, "r1")

    assert ("partial", [*REPLY[:12].encode()]) == (step.status, [*step.choices[0].ids])


@asynccontextmanager
async def with_a_queued_call(store, http, **agents):
    """Yield a proxy, its engine, a call that the engine holds, and one that is queued behind it."""
    engine = ScriptedEngine()
    engine.ends = [(5, "held")]
    async with listening(engine.handle) as url:
        endpoints = [{"url": url, "name": "fake", "max_in_flight": 1}]
        agents = {"max_resumes": 0, **agents}
        async with proxying(None, store, engines={"endpoints": endpoints}, agents=agents) as served:
            body = {"model": "m", "messages": MESSAGES, "stream": True}
            first = asyncio.create_task(answer_of(http, served, body, "r1"))
            await engine.held.wait()
            second = asyncio.create_task(answer_of(http, served, body, "r2"))
            await waiting(http, served, 1)
            yield served, engine, first, second


async def test_a_queued_call_is_sent_after_a_pause_although_calls_are_not_resumed(store, http):
    """With `agents.max_resumes` 0 as well: nothing of it was sampled."""
    async with with_a_queued_call(store, http) as (served, engine, first, second):
        pausing = asyncio.create_task(http.post(f"{served.url}/policy/pause?drain_s=20", json={"in_flight": "resume"}))
        await waiting(http, served, 0)
        engine.released.set()
        (await pausing).release()
        async with http.post(f"{served.url}/policy/resume") as response:
            assert response.status == 200
        replies = [await first, await second]

    assert [read(raw, is_stream=True)[:2] for _, raw in replies] == [(REPLY, ["stop"])] * 2


async def test_a_queued_call_waits_for_the_end_of_each_pause(store, http, monkeypatch):
    """Its time in the queue between two is no part of `agents.resume_timeout_s`."""
    calls, add = [], InFlightBytes.add
    monkeypatch.setattr(InFlightBytes, "add", lambda limit, call: (calls.append(call), add(limit, call)))
    async with with_a_queued_call(store, http) as (served, engine, first, second):
        for _ in range(2):
            await waiting(http, served, 1)
            calls[-1].go_on_until = 0.0  # long ago
            async with http.post(f"{served.url}/policy/pause?drain_s=0", json={"in_flight": "keep"}) as response:
                assert response.status == 200
            calls[-1].interrupt("the weights change", is_last=False)
            await waiting(http, served, 0)
            async with http.post(f"{served.url}/policy/resume") as response:
                assert response.status == 200
        engine.released.set()
        replies = [await first, await second]

    assert [read(raw, is_stream=True)[:2] for _, raw in replies] == [(REPLY, ["stop"])] * 2


async def test_a_queued_call_that_no_pause_lets_pass_in_time_can_be_sent_again(store, http):
    """Its response has the status of other calls that wait too long; no step is recorded."""
    async with with_a_queued_call(store, http, resume_timeout_s=0.1) as (served, engine, first, second):
        pausing = asyncio.create_task(http.post(f"{served.url}/policy/pause?drain_s=20", json={"in_flight": "resume"}))
        status, raw = await second
        engine.released.set()
        (await pausing).release()
        await first
        counted = await metrics_of(http, served)

    assert (status, orjson.loads(raw)["error"]["code"]) == (429, "paused")
    assert 'engine="fake",status="429"} 1.0' in counted
    assert await stored_steps(store, "r2") == []


async def waiting(http, served, calls: int) -> None:
    """Return once so many calls wait for a slot of the engine."""
    while f'queued_calls{{engine="fake"}} {calls}.0' not in await metrics_of(http, served):
        await asyncio.sleep(0.01)


async def test_an_unexpected_error_while_a_cut_call_waits_leaves_its_step(store, http, monkeypatch):
    """Also an error that has a response of its own."""
    engine = ScriptedEngine()
    engine.ends = [(12, "abort")]

    async def refuses(*_):
        raise Conflict("unexpected")

    monkeypatch.setattr(resuming_calls, "text_of", refuses)
    body = {"model": "m", "messages": MESSAGES, "stream": True}
    async with listening(engine.handle) as url, resuming(url, store) as served:
        with suppress(ClientPayloadError):
            await answer_of(http, served, body)
        (step,) = await wait_for_steps(store, "r1")

    assert ("partial", [*REPLY[:12].encode()]) == (step.status, [*step.choices[0].ids])


async def test_a_pause_does_not_cut_a_stream_that_lacks_only_its_terminal_event(store, http, monkeypatch):
    """Its engine samples no more, but the server of the engine is behind."""
    engine, interrupt = ScriptedEngine(), InFlightBytes.interrupt_sampled
    engine.holds_usage = True

    def interrupt_sampled(*args, **options):
        counts = interrupt(*args, **options)
        engine.released.set()
        return counts

    monkeypatch.setattr(InFlightBytes, "interrupt_sampled", interrupt_sampled)
    async with listening(engine.handle) as url, resuming(url, store) as served:
        body = {"model": "m", "messages": MESSAGES, "stream": True}
        answering = asyncio.create_task(answer_of(http, served, body))
        await engine.held.wait()
        async with http.get(f"{served.url}/health") as response:  # the last event was read
            assert response.status == 200
        async with http.post(f"{served.url}/policy/pause?drain_s=20", json={"in_flight": "resume"}) as response:
            paused = await response.json()
        _, raw = await answering

    assert (paused["drained"], paused["in_flight"]) == (True, 0)
    assert read(raw, is_stream=True)[:2] == (REPLY, ["stop"])
