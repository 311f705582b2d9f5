"""The traces of calls, as a collector on a real socket receives them."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import openai
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import propagate
from opentelemetry.instrumentation.httpx import HTTPX2ClientInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from tests.support.collector import collecting
from tests.support.fakes import fake_engine, proxying
from tests.support.recorded import load
from tests.support.session import BODY, CHAT, chat_path
from tests.support.stored import stored_rollout, stored_steps, wait_for_steps

from proxy.rollouts.policy import Pause
from proxy.server.listener import simulating
from proxy.simulator.options import Options
from proxy.telemetry.logs import LOG

WHOLE, STREAM = load("chat_ids_lp"), load("chat_ids_lp_stream")
POST = "POST /v1/chat/completions"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
CLIENT, INTERNAL, ERROR = 3, 1, 2


@asynccontextmanager
async def tracing(engine_url, store, *, content=False, **sections):
    """Yield a running proxy and the collector of its traces. All spans have arrived once the block has ended."""
    async with collecting() as collector:
        trace = {"endpoint": collector.url, "content": content}
        async with proxying(engine_url, store, tracing=trace, **sections) as served:
            yield served, collector


async def post(http, url, body=BODY, path=CHAT, **headers):
    async with http.post(url + path, json=body, headers=headers) as response:
        return response.status, await response.read()


@pytest.fixture
async def traced(store, engine, http):
    """Return a function that makes calls of an engine with one completion; it returns their responses and the collector."""

    async def make(*calls, sections=None, **headers):
        engine.plays(WHOLE)
        async with tracing(engine.url, store, **(sections or {})) as (served, collector):
            answers = [await post(http, served.url, *call, **headers) for call in calls or [()]]
        return answers, collector

    return make


async def test_a_call_has_one_span_by_the_genai_conventions(store, engine, http):
    engine.plays(WHOLE)
    body = {**BODY, "temperature": 1, "top_p": 0.5, "max_tokens": 24, "seed": 7, "stop": ["END"]}
    async with tracing(engine.url, store) as (served, collector):
        await http.post(served.url + "/rollouts", json={"rollout_id": "r1", "group_id": "g1"})
        await post(http, served.url, body)

    (step,) = await stored_steps(store, "r1")
    span = collector.one("chat tiny")
    port = int(engine.url.rpartition(":")[2])
    usage = orjson.loads(WHOLE.response)["usage"]
    assert (span.kind, span.status) == (CLIENT, 0)
    assert {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.conversation.id": "r1",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_p": 0.5,
        "gen_ai.request.max_tokens": 24,
        "gen_ai.request.seed": 7,
        "gen_ai.response.id": step.response["id"],
        "gen_ai.response.model": step.response["model"],
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "server.address": "127.0.0.1",
        "server.port": port,
        "tokentape.step.id": step.step_id,
        "tokentape.step.status": "complete",
        "tokentape.step.exact": True,
        "tokentape.step.problems": [],
        "tokentape.group.id": "g1",
        "tokentape.policy": "default",
        "tokentape.dialect": "chat",
        "tokentape.engine": "fake",
    } == span.attributes


async def test_the_request_to_the_engine_and_the_store_are_children_within_its_time(engine, traced):
    _, collector = await traced()

    span, sent, stored = collector.one("chat tiny"), collector.one(POST), collector.one("store")
    assert {span.span_id} == {sent.parent, stored.parent}
    assert {span.trace_id} == {sent.trace_id, stored.trace_id}
    assert (sent.kind, stored.kind) == (CLIENT, INTERNAL)
    assert span.start <= sent.start <= sent.end <= stored.start <= stored.end <= span.end
    assert sent.attributes["http.response.status_code"] == 200
    assert f"{engine.url}/v1/chat/completions" == sent.attributes["url.full"]
    assert set(collector.scopes) == {"tokentape"}
    assert collector.resources[0]["service.name"] == "tokentape"


async def test_a_streamed_call_has_the_time_to_the_first_chunk(store, engine, http):
    engine.plays(STREAM)
    async with tracing(engine.url, store) as (served, collector):
        await post(http, served.url, {**BODY, "stream": True})

    span = collector.one("chat tiny")
    assert span.attributes["gen_ai.request.stream"]
    assert 0 < span.attributes["gen_ai.response.time_to_first_chunk"] < (span.end - span.start) / 1e9


async def test_the_call_is_a_child_of_the_agents_span_and_the_engines_span_one_of_the_request(engine, traced):
    _, collector = await traced(traceparent=SAMPLED, tracestate="vendor=1", baggage="team=a")

    span, sent = collector.one("chat tiny"), collector.one(POST)
    assert (span.trace_id, span.parent, span.state) == (TRACE, PARENT, "vendor=1")
    assert f"00-{TRACE}-{sent.span_id}-01" == engine.headers[-1]["traceparent"]
    assert (engine.headers[-1]["tracestate"], engine.headers[-1]["baggage"]) == ("vendor=1", "team=a")


async def finish(http, url, name="r1", **body):
    async with http.post(f"{url}/rollouts/{name}/finish", json=body) as response:
        assert response.status == 200


@pytest.mark.parametrize(
    ("status", "reward", "error"), [("completed", 0.5, 0), ("truncated", None, 0), ("failed", None, ERROR)]
)
async def test_a_rollout_that_was_opened_has_one_span_above_those_of_its_calls(
    store, engine, http, status, reward, error
):
    """By any process, which knows the span's ID before the rollout is finished; a call of an agent's span stays below that."""
    engine.plays(WHOLE)
    async with (
        tracing(engine.url, store) as (served, collector),
        proxying(engine.url, store, tracing={"endpoint": collector.url}) as other,
    ):
        await http.post(served.url + "/rollouts", json={"rollout_id": "r1", "group_id": "g1"})
        for url in (served.url, other.url):
            await post(http, url)
        await post(http, served.url, traceparent=SAMPLED)
        for _ in range(2):
            await finish(http, other.url, status=status, **({} if reward is None else {"reward": reward}))

    root, calls = collector.one("invoke_agent"), collector.named("chat tiny")
    rollout = await stored_rollout(store, "r1")
    assert ({(root.trace_id, root.span_id), (TRACE, PARENT)}, "") == (
        {(it.trace_id, it.parent) for it in calls},
        root.parent,
    )
    assert (root.kind, root.status) == (INTERNAL, error)
    assert (rollout.created_ms * 10**6, rollout.finished_ms * 10**6) == (root.start, root.end)
    assert root.attributes == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.conversation.id": "r1",
        "tokentape.rollout.status": status,
        "tokentape.rollout.steps": 3,
        "tokentape.group.id": "g1",
        **({} if reward is None else {"tokentape.rollout.reward": reward}),
    } | ({"error.type": status} if error else {})


async def test_a_rollout_that_a_call_opened_has_no_span(store, engine, http):
    """Most of them are never finished: their calls would have no root."""
    engine.plays(WHOLE)
    async with tracing(engine.url, store) as (served, collector):
        await post(http, served.url)
        await finish(http, served.url, status="completed")

    assert collector.named("invoke_agent") == []
    assert collector.one("chat tiny").parent == ""


@pytest.mark.parametrize(("ratio", "spans"), [("0.0", 0), ("1.0", 1)])
async def test_the_sampler_decides_once_for_a_rollout(store, engine, http, monkeypatch, ratio, spans):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", ratio)
    engine.plays(WHOLE)
    async with tracing(engine.url, store) as (served, collector):
        await http.post(served.url + "/rollouts", json={"rollout_id": "r1"})
        await post(http, served.url)
        await finish(http, served.url, status="completed")

    assert [len(collector.named(name)) for name in ("invoke_agent", "chat tiny")] == [spans, spans]


async def test_an_agent_with_opentelemetry_has_its_calls_in_its_own_trace(store, engine, sdk):
    """OpenAI's client over httpx2, with the instrumentation of OpenTelemetry."""
    engine.plays(WHOLE)
    provider = TracerProvider(shutdown_on_exit=False)
    async with tracing(engine.url, store) as (served, collector):
        client = sdk(openai.AsyncOpenAI, served.url + "/rollouts/r1/v1")
        HTTPX2ClientInstrumentor.instrument_client(client._client, tracer_provider=provider)
        with provider.get_tracer("agent").start_as_current_span("agent") as agent:
            await client.chat.completions.create(**BODY)

    span = collector.one("chat tiny")
    assert format(agent.context.trace_id, "032x") == span.trace_id
    assert span.parent not in ("", format(agent.context.span_id, "016x"))  # the span of the HTTP request is between


async def test_a_call_without_sampling_has_no_spans_and_its_engine_receives_the_decision(store, engine, http):
    engine.plays(WHOLE)
    async with tracing(engine.url, store) as (served, collector):
        status, _ = await post(http, served.url, traceparent=UNSAMPLED)
        await post(http, served.url, path=chat_path("r2"))

    assert status == 200
    assert [span.attributes["gen_ai.conversation.id"] for span in collector.named("chat tiny")] == ["r2"]
    assert {TRACE} != {span.trace_id for span in collector.spans}
    assert engine.headers[0]["traceparent"].startswith(f"00-{TRACE}-")
    assert engine.headers[0]["traceparent"].endswith("-00")


async def test_without_an_endpoint_the_agents_headers_are_forwarded_unchanged(store, engine, http):
    engine.plays(WHOLE)
    async with proxying(engine.url, store) as served:
        await post(http, served.url, traceparent=SAMPLED)

    assert engine.headers[-1]["traceparent"] == SAMPLED


@pytest.mark.parametrize("parent", ["", "00-0-0-01", "x" * 5000, f"00-{'0' * 32}-{PARENT}-01"])
async def test_an_invalid_traceparent_starts_a_new_trace(traced, parent):
    ((status, _),), collector = await traced(traceparent=parent)

    assert (status, collector.one("chat tiny").parent) == (200, "")


async def test_each_attempt_of_a_failover_is_a_span_and_the_failed_one_has_the_error(store, engine, http):
    engine.plays(WHOLE)
    async with fake_engine() as broken:
        broken.streams([], then="die")
        endpoints = [{"url": broken.url, "name": "broken"}, {"url": engine.url, "name": "fake"}]
        async with tracing(engine.url, store, engines={"endpoints": endpoints}) as (served, collector):
            for number in range(40):  # the endpoint of a rollout depends on its id
                await post(http, served.url, path=chat_path(f"f{number}"), traceparent=SAMPLED)
                if broken.requests:
                    break

    sent = collector.named(POST)[-2:]
    call = collector.named("chat tiny")[-1]
    assert [call.span_id] * 2 == [span.parent for span in sent]
    assert [span.attributes["tokentape.engine"] for span in sent] == ["broken", "fake"]
    assert [span.status for span in sent] == [ERROR, 0]
    assert [span.attributes.get("error.type") for span in sent] == ["engine_disconnected", None]
    assert [span.attributes.get("http.request.resend_count") for span in sent] == [None, 1]
    assert sent[0].end <= sent[1].start
    assert (call.status, call.attributes["tokentape.engine"]) == (0, "fake")
    assert broken.headers[-1]["traceparent"].split("-")[2] == sent[0].span_id


async def test_a_call_to_an_engine_that_is_unreachable_is_an_error(store, http):
    async with tracing("http://127.0.0.1:1", store) as (served, collector):
        status, _ = await post(http, served.url)

    span = collector.one("chat tiny")
    assert (status, span.status, span.attributes["error.type"]) == (503, ERROR, "engine_unreachable")
    assert "unreachable" in span.description
    assert span.attributes["tokentape.step.status"] == "error"


async def test_the_status_of_an_engines_error_is_the_type_of_the_error(store, engine, http):
    """Its text, which may quote the request, is not exported."""
    engine.plays(load("err_badmodel"))
    async with tracing(engine.url, store) as (served, collector):
        await post(http, served.url)

    span, sent = collector.one("chat tiny"), collector.one(POST)
    assert [(one.status, one.attributes["error.type"], one.description) for one in (span, sent)] == [
        (ERROR, "404", "")
    ] * 2
    assert sent.attributes["http.response.status_code"] == 404
    assert not span.attributes["tokentape.step.exact"]


async def test_a_call_is_aborted_if_its_client_disconnects(store, engine):
    events = [event + b"\n\n" for event in STREAM.response.split(b"\n\n") if event]
    engine.streams(events[:3], then="hang")
    async with tracing(engine.url, store) as (served, collector):
        async with aiohttp.ClientSession() as http:
            response = await http.post(served.url + CHAT, json={**BODY, "stream": True})
            await response.content.readuntil(b"\n\n")
            response.close()
        await wait_for_steps(store, "r1")

    span = collector.one("chat tiny")
    assert (span.status, span.attributes["error.type"]) == (ERROR, "aborted")
    assert span.description == "the client disconnected"
    assert span.attributes["tokentape.step.status"] == "partial"
    assert collector.one(POST).status == ERROR
    assert collector.named("store") == []  # the call did not wait for it


async def test_a_step_that_is_not_stored_is_an_error_of_the_store(store, engine, http):
    engine.plays(WHOLE)
    async with tracing(engine.url, store) as (served, collector):
        store.failing.add("append")
        status, _ = await post(http, served.url)

    span, stored, sent = collector.one("chat tiny"), collector.one("store"), collector.one(POST)
    assert (status, sent.status) == (503, 0)
    assert [failed.attributes["error.type"] for failed in (span, stored)] == ["store_unavailable"] * 2


async def test_a_call_that_waits_for_a_slot_has_a_span_of_the_queue(store, engine, http):
    proceed = asyncio.Event()
    engine.streams([STREAM.response[:100]], then="end", after=proceed)
    endpoints = [{"url": engine.url, "name": "fake", "max_in_flight": 1}]

    async with tracing(None, store, engines={"endpoints": endpoints}) as (served, collector):
        first = asyncio.create_task(post(http, served.url, {**BODY, "stream": True}))
        await engine.reached.wait()
        second = asyncio.create_task(post(http, served.url, {**BODY, "stream": True}))
        async with asyncio.timeout(50):
            while 'queued_calls{engine="fake"} 1.0' not in await (await http.get(served.url + "/metrics")).text():
                pass
        proceed.set()
        await asyncio.gather(first, second)

    queue = collector.one("queue")
    sent = collector.named(POST)[1]
    assert (INTERNAL, sent.parent, "fake") == (queue.kind, queue.parent, queue.attributes["tokentape.engine"])
    assert queue.end == sent.start


async def test_a_call_that_times_out_in_the_queue_has_a_span_without_a_step(store, engine, http):
    engine.hangs()
    endpoints = [{"url": engine.url, "name": "fake", "max_in_flight": 1}]
    engines = {"endpoints": endpoints, "max_queued": 0}
    async with tracing(None, store, engines=engines, drain_timeout_s=0.1) as (served, collector):
        first = asyncio.create_task(post(http, served.url))
        await engine.reached.wait()
        status, _ = await post(http, served.url, path=chat_path("r2"))
        first.cancel()

    (refused,) = [span for span in collector.named("chat tiny") if span.attributes["gen_ai.conversation.id"] == "r2"]
    assert (status, refused.attributes["error.type"]) == (429, "engine_busy")
    assert "tokentape.step.status" not in refused.attributes
    assert [span.status for span in collector.named("queue")] == [ERROR]


async def test_a_pause_is_a_span(store, engine, http, monkeypatch):
    engine.plays(WHOLE)
    waiting, wait = asyncio.Event(), Pause.passed

    async def noted(*args):
        waiting.set()
        return await wait(*args)

    monkeypatch.setattr(Pause, "passed", noted)
    async with tracing(engine.url, store) as (served, collector):
        async with http.post(served.url + "/policy/pause?drain_s=0", json={"mode": "wait"}) as response:
            assert response.status == 200
        call = asyncio.create_task(post(http, served.url))
        await waiting.wait()
        await http.post(served.url + "/policy/resume")
        assert (await call)[0] == 200

    span, pause = collector.one("chat tiny"), collector.one("pause")
    assert (span.span_id, "default") == (pause.parent, pause.attributes["tokentape.policy"])
    assert span.start <= pause.start < pause.end <= collector.one(POST).start


async def test_a_replayed_response_has_no_span_since_nothing_is_sampled(traced):
    answers, collector = await traced((), (), **{"Idempotency-Key": "k"})

    assert answers[0] == answers[1]
    assert len(collector.named("chat tiny")) == 1


async def test_an_unrecorded_call_has_no_span_and_keeps_its_parent(engine, traced):
    unnamed = {"agents": {"unnamed_rollouts": "pass"}}
    _, collector = await traced((BODY, "/v1/chat/completions"), sections=unnamed, traceparent=SAMPLED)

    assert collector.spans == []
    assert engine.headers[-1]["traceparent"] == SAMPLED


@pytest.mark.parametrize(
    ("path", "body", "name", "dialect"),
    [
        ("/v1/completions", {"prompt": "hi"}, "text_completion", "completions"),
        ("/v1/messages", {"messages": BODY["messages"], "max_tokens": 4}, "chat", "messages"),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 4}, "chat", "responses"),
        (
            "/v1beta/models/simulated:generateContent?key=AIza-secret",
            {"contents": {"parts": {"text": "hi"}}, "generationConfig": {"maxOutputTokens": 4}},
            "chat",
            "gemini",
        ),
        (
            "/inference/v1/generate",
            {"token_ids": [1, 2], "sampling_params": {"max_tokens": 4}},
            "text_completion",
            "generate",
        ),
    ],
)
async def test_every_dialect_has_the_operation_and_the_tokens(store, http, path, body, name, dialect):
    async with (
        simulating("127.0.0.1:0", Options()) as engine,
        tracing(engine, store) as (served, collector),
    ):
        status, text = await post(http, served.url, {"model": "simulated", **body}, path=f"/rollouts/r1{path}")

    span = collector.one(f"{name} simulated")
    assert status == 200, text
    assert "AIza-secret" not in repr(collector.spans)
    assert (span.attributes["tokentape.dialect"], span.attributes["gen_ai.operation.name"]) == (dialect, name)
    (step,) = await stored_steps(store, "r1")
    assert step.sampled == span.attributes["gen_ai.usage.output_tokens"]
    if dialect != "generate":
        assert span.attributes.get("gen_ai.request.max_tokens", 4) == 4


async def test_messages_are_exported_only_if_content_is_enabled(traced):
    body = {**BODY, "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]}
    _, collector = await traced((body,), sections={"content": True})

    found = collector.one("chat tiny").attributes
    content = orjson.loads(WHOLE.response)["choices"][0]["message"]["content"]
    assert orjson.loads(found["gen_ai.input.messages"]) == [
        {"role": "user", "parts": [{"type": "text", "content": "hi"}]}
    ]
    assert content == orjson.loads(found["gen_ai.output.messages"])[0]["parts"][0]["content"]
    assert orjson.loads(found["gen_ai.tool.definitions"]) == [
        {"type": "function", "name": "look", "parameters": {"type": "object"}}
    ]


SECRET = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=20).map(lambda text: f"SECRET{text}")


@given(st.lists(SECRET, min_size=9, max_size=9), st.sampled_from([200, 400, 500]), st.booleans())
async def test_by_default_no_exported_byte_is_of_a_message(store, texts, status, is_cut):
    """Neither of the request, nor of the response, nor of an engine's error."""
    content, thought, called, *given = texts
    answer = orjson.loads(WHOLE.response)
    answer["choices"][0]["message"] |= {
        "content": content,
        "reasoning": thought,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": f'{{"x":"{called}"}}'}}],
    }
    response = orjson.dumps(
        answer if status == 200 else {"error": {"message": content, "code": thought, "type": called}}
    )
    body = {
        **BODY,
        "messages": [
            {"role": "system", "content": given[0]},
            {"role": "user", "content": [{"type": "text", "text": given[1]}]},
        ],
        "tools": [
            {"type": "function", "function": {"name": "f", "description": given[2], "parameters": {"title": given[3]}}}
        ],
        "stop": [given[4]],
        "user": given[5],
        "temperature": given[0],
        "max_tokens": [given[1]],
    }
    async with fake_engine() as engine, aiohttp.ClientSession() as http:
        engine.plays(replace(WHOLE, status=status, response=response[:-40] if is_cut else response))
        async with tracing(engine.url, store) as (served, collector):
            await post(http, served.url, body)

    exported = b"".join(collector.bodies)
    assert exported
    assert b"SECRET" not in exported


async def test_a_plugin_that_raises_does_not_fail_a_call(engine, traced, monkeypatch, caplog):
    """Samplers, propagators and id generators of OTEL_* variables may be plugins."""

    def extract(*args, **named):
        raise RuntimeError("a defect of a plugin")

    monkeypatch.setattr(propagate, "extract", extract)
    monkeypatch.setattr(LOG, "propagate", True)
    answers, collector = await traced((), (), traceparent=SAMPLED)

    assert [status for status, _ in answers] == [200, 200]
    assert engine.headers[-1]["traceparent"] == SAMPLED
    assert collector.spans == []
    assert [record.message for record in caplog.records if record.exc_info] == ["The trace of a call is incomplete"] * 2
