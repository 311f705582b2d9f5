"""Calls that their engine ends early go on: the client reads one response, and the step has all that was sampled."""

import asyncio
from itertools import count

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.fakes import listening, proxying
from tests.support.scripted_engine import PROMPT, REPLY, ScriptedEngine
from tests.support.stored import stored_steps

from proxy.api.memory_limit import InFlightBytes

MESSAGES = [{"role": "user", "content": "hi"}]
COUNT = len(REPLY)
NUMBERS = count(1)


def resuming(engine_url: str, store, **agents):
    endpoints = [{"url": engine_url, "name": "fake"}]
    engines = {"endpoints": endpoints, "eject_after": 100, "max_attempts": 9}
    return proxying(engine_url, store, agents={"max_resumes": 9, "resume_timeout_s": 20, **agents}, engines=engines)


async def answer_of(http, served, body: dict, rollout: str = "r1") -> tuple[int, bytes]:
    path = "chat/completions" if "messages" in body else "completions"
    async with http.post(f"{served.url}/rollouts/{rollout}/v1/{path}", json=body) as response:
        return response.status, await response.read()


def read(raw: bytes, *, is_stream: bool) -> tuple[str, list[str], dict, int]:
    """Return the text, the finish reasons, the usage, and the number of ids and roles of the response."""
    if not is_stream:
        whole = orjson.loads(raw)
        (choice,) = whole["choices"]
        message = choice.get("message") or {}
        return message.get("content") or choice.get("text", ""), [choice["finish_reason"]], whole["usage"], 1
    text, reasons, usage, heads = "", [], {}, set()
    for line in raw.split(b"\n\n"):
        if not line.startswith(b"data: {"):
            continue
        event = orjson.loads(line[6:])
        heads.add((event["id"], event["created"]))
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            delta = choice.get("delta") or {}
            heads.add("role" if "role" in delta else None)
            text += delta.get("content") or choice.get("text") or ""
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
            assert choice.get("token_ids") is None
    return text, reasons, usage, len(heads - {None, "role"})


ends = st.lists(st.tuples(st.integers(0, COUNT - 1), st.sampled_from(["abort", "lost"])), max_size=4)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ends=ends, is_stream=st.booleans(), is_chat=st.booleans(), limit=st.sampled_from([None, COUNT, 20]))
async def test_a_call_that_is_cut_anywhere_equals_one_that_was_never_cut(store, http, ends, is_stream, is_chat, limit):
    """Its text, its ids, its logprobs, its token counts and its record; each sampled token is in the step once."""
    body = {"model": "m", "max_tokens": limit or COUNT, "seed": 5}
    body |= {"messages": MESSAGES} if is_chat else {"prompt": "hi"}
    body |= {"stream": True, "stream_options": {"include_usage": True}} if is_stream else {}
    engine = ScriptedEngine()
    engine.ends = [*ends]
    rollout = f"r{next(NUMBERS)}"
    async with listening(engine.handle) as url, resuming(url, store) as served:
        status, raw = await answer_of(http, served, body, rollout)
        (step,) = await stored_steps(store, rollout)

    expected = REPLY[: limit or COUNT]
    text, reasons, usage, heads = read(raw, is_stream=is_stream)
    assert (200, expected, ["length" if limit == 20 else "stop"], 1) == (status, text, reasons, heads)
    assert (len(PROMPT), len(expected)) == (usage["prompt_tokens"], usage["completion_tokens"])
    (choice,) = step.choices
    assert ("complete", (), PROMPT) == (step.status, step.problems, [*step.prompts[0]])
    assert [*map(ord, expected)] == [*choice.ids]
    assert pytest.approx([-0.001 * ord(character) for character in expected]) == [*choice.logprobs]
    assert usage == step.usage
    message = step.response["choices"][0]
    assert expected == (message["message"]["content"] if is_chat else message["text"])


async def test_the_rest_is_requested_with_the_ids_so_far(store, http):
    """Its limits are reduced, and its seed is another one."""
    engine = ScriptedEngine()
    engine.ends = [(5, "abort")]
    body = {"model": "m", "messages": MESSAGES, "max_tokens": COUNT, "min_tokens": 8, "seed": 7}
    async with listening(engine.handle) as url, resuming(url, store) as served:
        await answer_of(http, served, body)
        (step,) = await stored_steps(store, "r1")

    first, second = engine.requests
    assert {"prompt_token_ids": [*PROMPT, *map(ord, REPLY[:5])]} == second["kv_transfer_params"]
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
    assert [*map(ord, REPLY)] == [*step.choices[0].ids]
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

    async def post(path):
        body = None if path == "/policy/resume" else {"in_flight": "resume"}
        async with http.post(f"{served.url}{path}", json=body) as response:
            return await response.json()

    monkeypatch.setattr(InFlightBytes, "interrupt_sampled", interrupt_sampled)
    async with listening(handle) as url, resuming(url, store) as served:
        body = {"model": "m", "messages": MESSAGES, "stream": True}
        answering = asyncio.create_task(answer_of(http, served, body))
        await engine.held.wait()
        paused = await post("/policy/pause?drain_s=20")
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


async def metrics_of(http, served) -> str:
    async with http.get(f"{served.url}/metrics") as response:
        return await response.text()
