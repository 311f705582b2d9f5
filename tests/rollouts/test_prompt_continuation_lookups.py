"""The engine's renderings and texts for continuations, with an engine that responds as a test configures it."""

import asyncio
import threading
from array import array

import orjson
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry

from proxy.config.engines import EnginesSettings
from proxy.continuation.types import Detokenize, LookupFailed, Render, Tokenize
from proxy.errors import EngineDisconnected, EngineError
from proxy.protocols.json_texts import KnownPrompt
from proxy.rollouts.prompt_continuation import PromptLookups
from proxy.telemetry.metrics import make_metrics
from proxy.upstream.client import Upstream

MESSAGES = [{"role": "user", "content": "hi"}]
BODY = {"model": "m", "messages": MESSAGES, "tools": [{"type": "function"}], "temperature": 1}


@pytest.fixture
async def upstream_to():
    """Return a factory of upstreams to one engine."""
    made = []

    def make(url, kind):
        made.append(
            Upstream(EnginesSettings(endpoints=[{"url": url, "kind": kind}]), make_metrics(CollectorRegistry()))
        )
        return made[-1]

    yield make
    for upstream in made:
        await upstream.close()


@pytest.fixture
async def lookups(engine, upstream_to):
    """Lookups at the engine, for a small chat body."""
    upstream = upstream_to(engine.url, kind="vllm")
    return PromptLookups(upstream, upstream.endpoints[0], BODY, 100, "r1")


@pytest.fixture
async def endpoint(lookups):
    """The endpoint of the lookups."""
    return lookups._endpoint


def answers(engine, value, status=200):
    """Make the engine respond with this JSON, or with this text."""

    async def respond(request: web.Request, body: dict) -> web.StreamResponse:
        if isinstance(value, str):
            return web.Response(text=value, status=status)
        return web.json_response(value, status=status)

    engine.respond = respond


async def test_messages_are_rendered_with_the_tools_of_the_call(engine, lookups, endpoint):
    """The ids and the context window are read from the response."""
    answers(engine, {"tokens": [5, 6], "max_model_len": 99})

    assert await lookups.get(Render(MESSAGES[:1])) == array("i", [5, 6])
    assert [{"model": "m", "messages": MESSAGES, "tools": BODY["tools"]}] == engine.requests
    assert endpoint.windows.get(str(BODY.get("model"))) == 99


@pytest.mark.parametrize(
    "text",
    [
        '{"count":3,"max_model_len":9,"tokens":[5,6,7],"token_strs":null}',
        '{"tokens":[5,6]}',
        '{"tokens":[5,67]}',
        '{"tokens":[5, 6]}',
        '{"tokens":[]}',
        '{"tokens":[5,6,]}',
        '{"tokens":[5,6,true]}',
        '{"tokens":[5,6,-7]}',
        '{"tokens":[5,6,2147483648]}',
        '{"tokens":[5,6],"tokens":[5,6,7]}',
        '{"tokens":null,"x":{"tokens":[5,6]}}',
        '{"x":{"tokens":[5,6,7]}}',
        '{"tokens":[5,6',
        '[{"tokens":[5,6]}]',
    ],
)
async def test_a_rendering_is_the_same_for_any_known_ids(engine, upstream_to, text):
    """Also if the response is invalid. What is read after known ids has the text of the response."""
    upstream = upstream_to(engine.url, kind="vllm")
    answers(engine, text)
    found = []
    for known in (None, *(KnownPrompt(ids, array("i", orjson.loads(b"[%b]" % ids))) for ids in (b"", b"5,6", b"9"))):
        lookups = PromptLookups(upstream, upstream.endpoints[0], BODY, 100, "r1", known)
        try:
            found.append(await lookups.get(Render(MESSAGES)))
        except (LookupFailed, EngineError) as error:
            found.append(str(error))
        if lookups.rendered is not None and isinstance(found[-1], array):
            assert orjson.loads(b"[%b]" % lookups.rendered.text) == found[-1].tolist()

    assert [found[0]] * 4 == found


async def test_text_is_tokenized_without_special_tokens(engine, lookups):
    """The rest of a prompt is no beginning."""
    answers(engine, {"tokens": [7]})

    assert await lookups.get(Tokenize("a b")) == array("i", [7])
    assert engine.requests == [{"model": "m", "prompt": "a b", "add_special_tokens": False}]


async def test_a_short_text_is_requested_once(engine, lookups):
    """These are stop tokens, and the ends of prompts; longer texts are not cached."""
    answers(engine, {"prompt": "<stop>"})
    long = [*range(9)]
    for ids in ([2], [2], [2, 3], [2, 3], long, long):
        assert await lookups.get(Detokenize(ids)) == "<stop>"

    assert engine.requests == [{"tokens": [2]}, {"tokens": [2, 3]}, {"tokens": long}, {"tokens": long}]


async def test_few_texts_are_cached(engine, lookups, endpoint):
    """Any token can be the last one of a turn that was cut."""
    answers(engine, {"prompt": "a"})
    for token in range(100):
        await lookups.get(Detokenize([token]))

    assert len(endpoint.token_texts) == 64


@pytest.mark.parametrize("status", [400, 422])
async def test_messages_that_the_engine_rejects_have_no_rendering(engine, lookups, endpoint, status):
    """A template may reject variants of the messages; the endpoint is used for other calls."""
    answers(engine, {"error": "roles must alternate"}, status)

    assert await lookups.get(Render(MESSAGES)) is None
    assert endpoint.continuation_fault.for_rollout("r1") is None


TOKENS = [None, "abc", 5, {"0": 1}, [1, "a"], [1.5], [True], [None], [2**31], [2**80], [-1], [[1]], [[]]]


@pytest.mark.parametrize("body", [{"tokens": tokens} for tokens in TOKENS] + [{}, [], 7, "no JSON", ""], ids=repr)
async def test_ids_of_wrong_types_are_a_failed_lookup(engine, lookups, endpoint, body):
    """They are never used, and the endpoint is not marked."""
    answers(engine, body)
    with pytest.raises((LookupFailed, EngineError)):
        await lookups.get(Render(MESSAGES))

    assert endpoint.continuation_fault.for_rollout("r1") is None


@pytest.mark.parametrize("window", [None, "9", 0, -5, 1.5, True, [9]], ids=repr)
async def test_a_context_window_of_a_wrong_type_is_ignored(engine, lookups, endpoint, window):
    """The ids are valid nevertheless."""
    answers(engine, {"tokens": [1], "max_model_len": window})

    assert await lookups.get(Render(MESSAGES)) == array("i", [1])
    assert len(endpoint.windows) == 0


@pytest.mark.parametrize("body", [{}, {"prompt": None}, {"prompt": ["a"]}, {"text": "a"}, [], "no JSON"], ids=repr)
async def test_a_text_of_a_wrong_type_is_a_failed_lookup(engine, lookups, body):
    """It is not compared with anything."""
    answers(engine, body)
    with pytest.raises((LookupFailed, EngineError)):
        await lookups.get(Detokenize([1, 2]))


@pytest.mark.parametrize("status", [301, 401, 403, 429, 500, 503])
async def test_another_status_is_a_failed_lookup(engine, lookups, endpoint, status):
    """The next call tries again. With 503, the engine itself is not available."""
    answers(engine, {"tokens": [1]}, status)
    with pytest.raises(
        EngineDisconnected if status == 503 else LookupFailed, match=f"POST /tokenize returned {status}"
    ):
        await lookups.get(Render(MESSAGES))

    assert endpoint.continuation_fault.for_rollout("r1") is None
    assert endpoint.health.faults == 0


@pytest.mark.parametrize("status", [404, 405, 501])
async def test_an_engine_without_the_route_is_marked(engine, lookups, endpoint, status):
    """A gateway may forward calls only. One call decides for its own rollout."""
    answers(engine, {"detail": "Not Found"}, status)
    with pytest.raises(LookupFailed):
        await lookups.get(Render(MESSAGES))

    assert endpoint.continuation_fault.for_rollout("r1") == "unsupported"
    assert endpoint.continuation_fault.for_rollout("r2") is None


async def test_an_unknown_model_does_not_mark_the_endpoint(engine, lookups, endpoint):
    """vLLM returns 404 for a LoRA adapter that was unloaded; the calls of other models are continued."""

    async def respond(request: web.Request, body: dict) -> web.StreamResponse:
        return web.json_response({"tokens": [1]}, status=404 if "model" in body else 200)

    engine.respond = respond
    with pytest.raises(LookupFailed):
        await lookups.get(Render(MESSAGES))

    assert endpoint.continuation_fault.for_rollout("r1") is None


async def test_an_engine_kind_without_tokenizer_routes_is_unsupported_without_a_request(engine, upstream_to):
    """Nothing is sent to it."""
    upstream = upstream_to(engine.url, kind="plain")
    lookups = PromptLookups(upstream, upstream.endpoints[0], BODY, 100, "r1")
    with pytest.raises(LookupFailed):
        await lookups.get(Render(MESSAGES))

    assert lookups.fault == "unsupported"
    assert engine.requests == []


async def test_a_continuation_is_run_to_its_result(engine, lookups):
    """Each lookup that it yields is served in order."""

    async def respond(request: web.Request, body: dict) -> web.StreamResponse:
        return web.json_response({"tokens": [1, 2]} if "messages" in body else {"prompt": str(body["tokens"])})

    def continuation():
        ids = yield Render(MESSAGES)
        text = yield Detokenize(ids)
        return f"text {text}"

    engine.respond = respond

    assert await lookups.run(continuation(), 2) == "text [1, 2]"


async def test_a_cancelled_lookup_closes_the_engines_request(engine, lookups):
    """No request is left when a client disconnects."""
    engine.hangs()
    task = asyncio.create_task(lookups.get(Render(MESSAGES)))
    await asyncio.wait_for(engine.reached.wait(), 50)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(engine.aborted.wait(), 50)


async def test_a_long_text_is_compared_outside_the_event_loop(lookups, engine):
    """Even if the prompt is short: what the engine returns decides, too."""

    def reading():
        yield Detokenize([1])
        return threading.current_thread()

    for text, is_outside in (("a", False), ("a" * 200_000, True)):
        answers(engine, {"prompt": text})
        lookups._endpoint.token_texts.forget()

        assert is_outside == (await lookups.run(reading(), 1) is not threading.main_thread())
