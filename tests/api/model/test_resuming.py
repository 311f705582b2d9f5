"""Calls that their engine ends early go on: the client reads one response, and the step has all that was sampled."""

import asyncio
from itertools import count, pairwise

from aiohttp import web
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
from tests.support.stored import stored_steps

from proxy.api.memory_limit import InFlightBytes


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
    assert ("complete", (), PROMPT) == (step.status, step.problems, [*step.prompts[0]])
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
    assert (COUNT - 5, 3, 12) == (second["max_tokens"], second["min_tokens"], second["seed"])
    assert first["messages"] == second["messages"]
    assert 1 == step.extra["resumed"]
    assert [{"endpoint": "fake", "fault": "aborted by the engine", "tokens": 5}] == step.extra["attempts"]


async def test_a_call_that_cannot_be_resumed_starts_again_if_its_client_has_received_nothing(store, http):
    engine = ScriptedEngine()
    engine.ends = [(5, "abort")]
    body = {"model": "m", "messages": MESSAGES, "frequency_penalty": 0.5}
    async with listening(engine.handle) as url, resuming(url, store) as served:
        _, raw = await answer_of(http, served, body)
        (step,) = await stored_steps(store, "r1")
        counted = await metrics_of(http, served)

    assert REPLY == read(raw, is_stream=False)[0]
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
    assert ("aborted",) == step.problems


async def test_a_stream_without_token_ids_does_not_start_again_once_it_was_shown(store, http):
    """Nothing is known of what was sampled; the client would receive it twice."""
    engine = ScriptedEngine(has_ids=False)
    engine.ends = [(5, "abort")]
    body = {"model": "m", "messages": MESSAGES, "stream": True}
    async with listening(engine.handle) as url, resuming(url, store) as served:
        _, raw = await answer_of(http, served, body)

    assert (REPLY[:5], ["abort"]) == read(raw, is_stream=True)[:2]
    assert 1 == len(engine.requests)


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

    assert REPLY == read(raw, is_stream=False)[0]
    assert 4 == len(lost)
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

    assert (REPLY, ["stop"]) == read(raw, is_stream=True)[:2]
    assert {"a", "b"} == {*(attempt["endpoint"] for attempt in step.extra["attempts"]), step.engine.name}


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

    assert (True, 0) == (paused["drained"], paused["in_flight"])
    assert (REPLY, ["stop"]) == read(raw, is_stream=True)[:2]


async def test_a_pause_lets_a_stream_end_that_cannot_be_resumed(store, http, monkeypatch):
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
    async with listening(engine.handle) as url, resuming(url, store) as served:
        body = {"model": "m", "messages": MESSAGES, "stream": True, "frequency_penalty": 0.5}
        answering = asyncio.create_task(answer_of(http, served, body))
        await engine.held.wait()
        async with http.post(f"{served.url}/policy/pause?drain_s=20", json={"in_flight": "resume"}) as response:
            paused = await response.json()
        _, raw = await answering

    assert interrupted.is_set()
    assert (True, 0) == (paused["drained"], paused["in_flight"])
    assert (REPLY, ["stop"]) == read(raw, is_stream=True)[:2]


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

    assert (True, 0) == (paused["drained"], paused["in_flight"])
    assert (REPLY, ["stop"]) == read(raw, is_stream=True)[:2]


async def metrics_of(http, served) -> str:
    async with http.get(f"{served.url}/metrics") as response:
        return await response.text()
