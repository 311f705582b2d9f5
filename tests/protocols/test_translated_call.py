"""Calls by way of chat, on every chat answer recorded from every engine: the laws of the native dialects hold for them."""

from dataclasses import replace

import anthropic
import openai
import orjson
import pytest
from fakes import proxying
from hypothesis import given
from hypothesis import strategies as st
from recorded import Cassette, cut, dialect_cassettes, http_cassettes, load, plan_of, play

from proxy.protocols.dialects.translation import TranslationOptions
from proxy.protocols.exchange import Exchange
from proxy.protocols.plan import CallOptions, Plan
from proxy.protocols.translated_call import (
    CHAT,
    TranslatedCall,
    client_response_bytes,
    error_dialect_for,
    read_translated_call,
)
from proxy.rollouts.idempotency import stored_answer_from
from proxy.trajectory.codec import encode
from proxy.trajectory.step import Timing

KINDS = ("vllm", "sglang", "llamacpp")
FOUND = {"tokens": list(range(30))}  # what a lookup finds, of whatever prompt
CHATS = [
    cassette
    for found in (*map(dialect_cassettes, KINDS), *map(http_cassettes, ("sglang", "llamacpp")))
    for cassette in found
    if cassette.path == CHAT and (cassette.body.get("n") or 1) == 1
]
STREAMS = [cassette for cassette in CHATS if cassette.is_stream]
SAID = {
    "/v1/messages": {"model": "m", "max_tokens": 4096, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"model": "m", "input": "hi"},
}
ENDS = (b"message_delta", b"message_stop", b"response.completed", b"response.incomplete", b"response.failed")
RECEIVED = Timing(received=1.0)  # as `play` has it
LIVE = CallOptions(streaming="live")


def form_of(path: str, *, stream: bool) -> TranslatedCall:
    form = read_translated_call(path, SAID[path] | ({"stream": True} if stream else {}), TranslationOptions())
    assert form is not None
    return replace(form, received=RECEIVED.received)


def planned(path: str, cassette: Cassette) -> Plan:
    """The plan of a call of this dialect that the engine answers as it did."""
    form = form_of(path, stream=cassette.is_stream)
    return form.recorded(plan_of(CHAT, form.native({}, cassette.kind), LIVE, kind=cassette.kind))


def by_chat(cassette: Cassette) -> Plan:
    """The plan of the same call in chat."""
    body = {"model": "m", "max_tokens": 4096, "messages": [{"role": "user", "content": "hi"}]}
    stream = {"stream": True, "stream_options": {"include_usage": True}} if cassette.is_stream else {}
    return plan_of(CHAT, body | stream, LIVE, kind=cassette.kind)


@pytest.mark.parametrize("path", SAID)
@pytest.mark.parametrize("kind", KINDS)
def test_its_step_has_the_tokens_of_the_chat_call(path, kind):
    """Ids, logprobs, problems, usage and response are what the native dialect records; nothing injected is shown."""
    for cassette in CHATS:
        if cassette.kind != kind or cassette.status != 200:
            continue
        shown, end, step = play(planned(path, cassette), cassette, found=FOUND)
        _, _, native = play(by_chat(cassette), cassette, found=FOUND)

        assert path.removeprefix("/v1/") == step.dialect
        assert repr(native.choices) == repr(step.choices), cassette
        assert (native.prompts, native.problems, native.usage) == (step.prompts, step.problems, step.usage), cassette
        assert orjson.dumps(native.response) == orjson.dumps(step.response), cassette
        assert b"token_ids" not in shown + end
        assert b'"logprob"' not in shown + end


@given(st.sampled_from(STREAMS), st.sampled_from(list(SAID)), st.lists(st.integers(0, 900), max_size=40))
def test_split_and_order(cassette, path, sizes):
    """Cut anywhere, the same bytes are told; what ends the turn comes only after the step."""
    shown, end, step = play(planned(path, cassette), cassette)
    again, last, other = play(planned(path, cassette), cassette, cut(cassette.response, sizes))

    assert shown + end == again + last
    assert repr(step) == repr(other)
    assert not any(word in shown + again for word in ENDS)


@pytest.mark.parametrize("path", SAID)
def test_an_answer_is_told_again_as_it_was(path):
    """From its step alone: whole, the same bytes; streamed, as a stream with the same end."""
    for cassette in CHATS[::5]:
        shown, end, step = play(planned(path, cassette), cassette, found=FOUND)
        if step.status != "complete":
            assert None is client_response_bytes(step)
            continue
        again = stored_answer_from(step)

        assert cassette.is_stream == again.content_type.startswith("text/event-stream")
        assert (end if not cassette.is_stream else again.body) == again.body
        assert again.body.endswith(end[-200:].rpartition(b"event: ")[2]) or not cassette.is_stream, (shown, end)


TOOL = {"name": "add", "parameters": {"type": "object"}}
SCHEMA = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("path", "said", "is_constrained"),
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
def test_what_it_asks_of_the_engine_says_whether_its_tokens_are_constrained(path, said, is_constrained):
    """A forced tool, a strict one or a schema, in the words of any dialect."""
    form = read_translated_call(path, SAID[path] | said, TranslationOptions())

    assert is_constrained is plan_of(CHAT, form.native({}, "vllm"), LIVE).sampling["constrained"]


@pytest.mark.parametrize("path", SAID)
def test_request_and_what_was_sent_are_recorded_apart(path):
    """The client's own body as it came; what it became says every field of the chat, so that both can be had."""
    cassette = next(one for one in CHATS if one.kind == "vllm" and not one.is_stream and one.status == 200)
    plan = planned(path, cassette)
    _, _, step = play(plan, cassette)

    assert SAID[path] == step.request
    assert plan.body == step.body
    assert [{"role": "user", "content": "hi"}] == step.body["messages"]
    assert ("m", "m") == (step.model_asked, step.model_served)


@pytest.mark.parametrize("path", SAID)
def test_an_engines_refusal_is_told_in_the_clients_shape(path):
    """In the engine's own words and with its status; the step has it as it came."""
    refusals = [one for one in CHATS if one.status >= 400]
    assert len(refusals) > 2
    for cassette in refusals:
        exchange = Exchange(planned(path, cassette), cassette.status, cassette.content_type)
        _, end, step = play(planned(path, cassette), cassette)
        told = orjson.loads(end)

        assert "application/json" == exchange.content_type
        assert told["error"]["message"]
        assert "error" == step.status
        assert cassette.response.decode() == step.response["body"]


@pytest.mark.parametrize("path", SAID)
def test_an_answer_that_nobody_can_read_is_an_error(path):
    """502, where a client of chat would get the bytes as they came."""
    form = form_of(path, stream=False)
    plan = form.recorded(plan_of(CHAT, form.native({}, "vllm")))
    exchange = Exchange(plan, 200, "application/json")
    exchange.feed(b"<html>")
    outcome = exchange.finish(RECEIVED)

    assert 502 == outcome.status
    assert orjson.loads(outcome.end)["error"]
    assert not outcome.step.exact


@pytest.mark.parametrize(
    ("kind", "thought"), [("vllm", "reasoning"), ("sglang", "reasoning_content"), (None, "reasoning")]
)
def test_reasoning_stands_where_the_engine_has_it(kind, thought):
    """vLLM and the others have different names for it."""
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    said = {
        **SAID["/v1/messages"],
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": [thinking]}],
    }
    said["messages"].append({"role": "user", "content": "b"})
    form = read_translated_call("/v1/messages", said, TranslationOptions())

    assert "hm" == form.native({}, kind)["messages"][1][thought]


def test_what_a_client_speaks_is_told_by_its_headers_where_nothing_is_sampled():
    """Anthropic's clients say their version everywhere."""
    assert "messages" == error_dialect_for("/v1/models", {"anthropic-version": "2023-06-01"}).name
    assert "messages" == error_dialect_for("/v1/messages/count_tokens", {}).name
    assert None is error_dialect_for("/v1/models", {})


async def steps_of(http, url):
    async with http.get(f"{url}/rollouts/r1/steps") as answer:
        return (await answer.json())["steps"]


async def test_an_engine_that_dies_within_its_answer_is_told_by_an_event(store, engine, http, sdk):
    """As both clients read it; the step keeps what came."""
    events = load("pairs_hermes/chat_stop_s_inj").response.split(b"\n\n")
    engine.streams([event + b"\n\n" for event in events[:6]], then="die")
    async with proxying(engine.url, store) as served:
        claude = sdk(anthropic.AsyncAnthropic, f"{served.url}/rollouts/r1")
        with pytest.raises(anthropic.APIStatusError, match="terminal event"):
            async with claude.messages.stream(**SAID["/v1/messages"]) as stream:
                await stream.get_final_message()
        gpt = sdk(openai.AsyncOpenAI, f"{served.url}/rollouts/r1/v1")
        told = [event async for event in await gpt.responses.create(**SAID["/v1/responses"], stream=True)]
        steps = await steps_of(http, served.url)

    assert "response.failed" == told[-1].type
    assert told[-1].response.error.message
    assert ["partial", "partial"] == [step["status"] for step in steps]
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
    st.sampled_from(list(SAID)),
    st.sampled_from(["live", "replay"]),
    st.booleans(),
)
def test_an_engine_that_answers_anything_at_all_leaves_a_step(kind, answers, path, streaming, stream):
    """Whatever JSON comes, whole, streamed or replayed: a step is made that is not exact, and something is told."""
    form = form_of(path, stream=stream)
    plan = form.recorded(plan_of(CHAT, form.native({}, kind), CallOptions(streaming=streaming), kind=kind))
    texts = [orjson.dumps(answer) for answer in answers]
    events = stream and plan.framing != "replay"
    text = b"".join(b"data: " + one + b"\n\n" for one in texts) + b"data: [DONE]\n\n" if events else b"".join(texts)
    content_type = "text/event-stream" if events else "application/json"
    shown, end, step = play(plan, Cassette("any", CHAT, {}, text, 200, content_type), found=None)

    assert shown + end
    assert not step.exact
    assert encode(step)
