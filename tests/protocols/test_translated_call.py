"""Calls translated to chat, on every recorded chat response of every engine: the laws of native dialects apply to them."""

from dataclasses import replace

import anthropic
import openai
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.fakes import proxying
from tests.support.recorded import Cassette, cut, dialect_cassettes, http_cassettes, load, plan_of, play

from proxy.protocols.dialects.base import TranslationOptions
from proxy.protocols.engines import ENGINES
from proxy.protocols.engines.base import CallOptions
from proxy.protocols.exchange import Exchange
from proxy.protocols.plan import (
    CHAT,
    Plan,
    TranslatedCall,
    client_response_bytes,
    error_dialect_for,
    read_translated_call,
)
from proxy.rollouts.idempotency import stored_answer_from
from proxy.trajectory.codec import encode
from proxy.trajectory.step import Timing

KINDS = ("vllm", "sglang", "llamacpp")
TOKENIZED = {"tokens": list(range(30))}  # the response to a lookup of any prompt
CHATS = [
    cassette
    for found in (*map(dialect_cassettes, KINDS), http_cassettes("llamacpp"))
    for cassette in found
    if cassette.path == CHAT and (cassette.body.get("n") or 1) == 1
]
STREAMS = [cassette for cassette in CHATS if cassette.is_stream]
BODIES = {
    "/v1/messages": {"model": "m", "max_tokens": 4096, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"model": "m", "input": "hi"},
}
ENDS = (b"message_delta", b"message_stop", b"response.completed", b"response.incomplete", b"response.failed")
RECEIVED = Timing(received=1.0)  # as `play` has it
LIVE = CallOptions(streaming="live")


def options_of(kind: str) -> TranslationOptions:
    return ENGINES[kind].translation_options(TranslationOptions(), "0.32.0")


def translated_call(path: str, *, stream: bool) -> TranslatedCall:
    call = read_translated_call(path, BODIES[path] | ({"stream": True} if stream else {}), TranslationOptions())
    assert call is not None
    return replace(call, received=RECEIVED.received)


def translated_plan(path: str, cassette: Cassette) -> Plan:
    """Return the plan of a call of this dialect to the engine of a cassette."""
    call = translated_call(path, stream=cassette.is_stream)
    return call.recorded(plan_of(CHAT, call.read_for(options_of(cassette.kind)), LIVE, kind=cassette.kind))


def chat_plan(cassette: Cassette) -> Plan:
    """Return the plan of the same call in chat."""
    body = {"model": "m", "max_tokens": 4096, "messages": [{"role": "user", "content": "hi"}]}
    stream = {"stream": True, "stream_options": {"include_usage": True}} if cassette.is_stream else {}
    return plan_of(CHAT, body | stream, LIVE, kind=cassette.kind)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_step_has_the_tokens_of_the_chat_call(path, kind):
    """Ids, logprobs, problems, usage and response are the same; nothing injected is sent to the client."""
    for cassette in CHATS:
        if cassette.kind != kind or cassette.status != 200:
            continue
        shown, end, step = play(translated_plan(path, cassette), cassette, found=TOKENIZED)
        _, _, native = play(chat_plan(cassette), cassette, found=TOKENIZED)

        assert path.removeprefix("/v1/") == step.dialect
        assert repr(native.choices) == repr(step.choices), cassette
        assert (native.prompts, native.problems, native.usage) == (step.prompts, step.problems, step.usage), cassette
        assert orjson.dumps(native.response) == orjson.dumps(step.response), cassette
        assert b"token_ids" not in shown + end
        assert b'"logprob"' not in shown + end


@given(st.sampled_from(STREAMS), st.sampled_from(list(BODIES)), st.lists(st.integers(0, 900), max_size=40))
def test_the_rendered_stream_does_not_depend_on_the_chunking(cassette, path, sizes):
    """The events that end the turn are sent after the step is stored."""
    shown, end, step = play(translated_plan(path, cassette), cassette)
    replayed, last, other = play(translated_plan(path, cassette), cassette, cut(cassette.response, sizes))

    assert shown + end == replayed + last
    assert repr(step) == repr(other)
    assert not any(word in shown + replayed for word in ENDS)


@pytest.mark.parametrize("path", BODIES)
def test_a_stored_response_is_rendered_again_from_its_step(path):
    """Unstreamed: the same bytes; streamed: a stream with the same end."""
    for cassette in CHATS[::5]:
        shown, end, step = play(translated_plan(path, cassette), cassette, found=TOKENIZED)
        if step.status != "complete":
            assert None is client_response_bytes(step)
            continue
        replayed = stored_answer_from(step)

        assert cassette.is_stream == replayed.content_type.startswith("text/event-stream")
        assert (end if not cassette.is_stream else replayed.body) == replayed.body
        assert replayed.body.endswith(end[-200:].rpartition(b"event: ")[2]) or not cassette.is_stream, (shown, end)


TOOL = {"name": "add", "parameters": {"type": "object"}}
SCHEMA = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("path", "fields", "is_constrained"),
    [
        ("/v1/messages", {}, False),
        ("/v1/messages", {"tools": [{"name": "add", "input_schema": {}}]}, False),
        ("/v1/messages", {"tools": [{"name": "add", "input_schema": {}}], "tool_choice": {"type": "any"}}, True),
        (
            "/v1/messages",
            {"tools": [{"name": "add", "input_schema": {}}], "tool_choice": {"type": "tool", "name": "add"}},
            True,
        ),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}, True),
        ("/v1/responses", {}, False),
        ("/v1/responses", {"tools": [{"type": "function", **TOOL, "strict": False}]}, False),
        ("/v1/responses", {"tools": [{"type": "function", **TOOL, "strict": True}]}, True),
        ("/v1/responses", {"tools": [{"type": "function", **TOOL}], "tool_choice": "required"}, True),
        ("/v1/responses", {"text": {"format": SCHEMA}}, True),
        ("/v1/responses", {"text": {"format": {"type": "text"}}}, False),
    ],
)
def test_constrained_sampling_is_recorded_in_every_dialect(path, fields, is_constrained):
    """A forced tool, a strict tool or a schema."""
    call = read_translated_call(path, BODIES[path] | fields, TranslationOptions())

    assert is_constrained is plan_of(CHAT, call.read_for(options_of("vllm")), LIVE).sampling["constrained"]


@pytest.mark.parametrize("path", BODIES)
def test_the_clients_request_and_the_sent_chat_request_are_both_recorded(path):
    cassette = next(item for item in CHATS if item.kind == "vllm" and not item.is_stream and item.status == 200)
    plan = translated_plan(path, cassette)
    _, _, step = play(plan, cassette)

    assert BODIES[path] == step.request
    assert plan.body == step.body
    assert step.body["messages"] == [{"role": "user", "content": "hi"}]
    assert (step.model_asked, step.model_served) == ("m", "m")


@pytest.mark.parametrize("path", BODIES)
def test_an_engines_error_has_the_dialects_shape_and_the_engines_message(path):
    """With the engine's status; the step records the original body."""
    errors = [item for item in CHATS if item.status >= 400]
    assert len(errors) > 2
    for cassette in errors:
        exchange = Exchange(translated_plan(path, cassette), cassette.status, cassette.content_type)
        _, end, step = play(translated_plan(path, cassette), cassette)
        body = orjson.loads(end)

        assert exchange.response.content_type == "application/json"
        assert body["error"]["message"]
        assert step.status == "error"
        assert cassette.response.decode() == step.response["body"]


@pytest.mark.parametrize("path", BODIES)
def test_an_unreadable_response_of_the_engine_is_a_502(path):
    """A chat client would get the bytes unchanged."""
    call = translated_call(path, stream=False)
    plan = call.recorded(plan_of(CHAT, call.read_for(options_of("vllm"))))
    exchange = Exchange(plan, 200, "application/json")
    exchange.response.feed(b"<html>")
    outcome = exchange.finish(RECEIVED)

    assert outcome.status == 502
    assert orjson.loads(outcome.end)["error"]
    assert not outcome.step.exact


@pytest.mark.parametrize(("kind", "thought"), [("vllm", "reasoning"), ("sglang", "reasoning_content")])
def test_reasoning_is_sent_in_the_engines_field(kind, thought):
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    fields = {
        **BODIES["/v1/messages"],
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": [thinking]}],
    }
    fields["messages"].append({"role": "user", "content": "b"})
    call = read_translated_call("/v1/messages", fields, TranslationOptions())

    assert call.read_for(options_of(kind))["messages"][1][thought] == "hm"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("expected", ["vllm", "sglang"])
@pytest.mark.parametrize("kind", ["vllm", "sglang", "llamacpp"])
def test_a_body_is_read_again_only_for_another_engine_than_expected(path, expected, kind):
    options, own = options_of(expected), options_of(kind)
    call = read_translated_call(path, BODIES[path], options)
    native = call.read_for(own)

    assert (native is call.body) is (own == options)
    assert native == call.translation.read(BODIES[path], own)


def test_the_dialect_of_errors_on_other_routes_is_detected_by_headers():
    """Anthropic's clients send their version with every request."""
    assert error_dialect_for("/v1/models", {"anthropic-version": "2023-06-01"}).name == "messages"
    assert error_dialect_for("/v1/messages/count_tokens", {}).name == "messages"
    assert error_dialect_for("/upload/v1/files", {"x-goog-api-key": "k"}).name == "gemini"
    assert None is error_dialect_for("/v1/models", {})


async def steps_from(http, url):
    async with http.get(f"{url}/rollouts/r1/steps") as response:
        return (await response.json())["steps"]


async def test_an_engine_that_disconnects_midstream_ends_the_stream_with_an_error_event(store, engine, http, sdk):
    """Both SDKs raise or report it; the step has the tokens so far."""
    events = load("pairs_hermes/chat_stop_s_inj").response.split(b"\n\n")
    engine.streams([event + b"\n\n" for event in events[:6]], then="die")
    async with proxying(engine.url, store) as served:
        claude = sdk(anthropic.AsyncAnthropic, f"{served.url}/rollouts/r1")
        with pytest.raises(anthropic.APIStatusError, match="terminal event"):
            async with claude.messages.stream(**BODIES["/v1/messages"]) as stream:
                await stream.get_final_message()
        gpt = sdk(openai.AsyncOpenAI, f"{served.url}/rollouts/r1/v1")
        events = [event async for event in await gpt.responses.create(**BODIES["/v1/responses"], stream=True)]
        steps = await steps_from(http, served.url)

    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message
    assert [step["status"] for step in steps] == ["partial", "partial"]
    assert all(step["choices"][0]["ids"] for step in steps)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
NAMES = ("index", "delta", "message", "finish_reason", "content", "tool_calls", "function", "arguments", "name", "id", "usage",
         "reasoning", "token_ids", "prompt_token_ids", "logprobs", "choices", "role", "error")  # fmt: skip
INNER = st.dictionaries(
    st.sampled_from(NAMES), JSON | st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3), max_size=5
)
ANSWER = st.lists(INNER, max_size=2).map(lambda choices: {"choices": choices}) | INNER | JSON


@given(
    st.sampled_from(["vllm", "sglang", "llamacpp", "plain"]),
    st.lists(ANSWER, max_size=4),
    st.sampled_from(list(BODIES)),
    st.sampled_from(["live", "replay"]),
    st.booleans(),
)
def test_any_response_of_an_engine_leaves_a_step(kind, responses, path, streaming, stream):
    """For any JSON, unstreamed, streamed or replayed: the step is not exact, and the client gets a response."""
    call = translated_call(path, stream=stream)
    plan = call.recorded(plan_of(CHAT, call.read_for(options_of(kind)), CallOptions(streaming=streaming), kind=kind))
    texts = [orjson.dumps(response) for response in responses]
    events = stream and plan.framing != "replay"
    text = b"".join(b"data: " + event + b"\n\n" for event in texts) + b"data: [DONE]\n\n" if events else b"".join(texts)
    content_type = "text/event-stream" if events else "application/json"
    shown, end, step = play(plan, Cassette("any", CHAT, {}, text, 200, content_type), found=None)

    assert shown + end
    assert not step.exact
    assert encode(step)
