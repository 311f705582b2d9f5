"""Unstreamed responses, and their replay as the engine's own stream; compared with recorded responses of every engine."""

import orjson
import pytest
from tests.support.each_cassette import of_each
from tests.support.recorded import dialect_cassettes, http_cassettes, load, load_http, plan_of, play

from proxy.protocols import whole_response as replay
from proxy.protocols.dialects import DIALECTS
from proxy.protocols.engines import ENGINES
from proxy.protocols.engines.base import CallOptions, StripRules
from proxy.protocols.response import ClientView

CASSETTES = [*dialect_cassettes(), *dialect_cassettes("sglang"), *http_cassettes("llamacpp")]
RECORDED = [cassette for cassette in CASSETTES if cassette.status == 200 and "generate" not in cassette.path]
WHOLE = [cassette for cassette in RECORDED if not cassette.is_stream]
STREAMS = [cassette for cassette in RECORDED if cassette.is_stream]
# Only in unstreamed responses, requested or not (seen on vLLM 0.32 and SGLang 0.5.23).
UNSTREAMED = (
    "prompt_logprobs",
    "routed_experts",
    "metadata",
    "usage",
    "kv_transfer_params",
    "ec_transfer_params",
    "metrics",
)

# Fields that only injected flags add; they are stripped before a response is replayed.
FLAGGED = {
    "sglang": StripRules(
        keys=frozenset({"response_token_ids", "prompt_token_ids", "meta_info", "input_ids", "output_ids"})
    ),
    "llamacpp": StripRules(keys=frozenset({"__verbose"})),
}


def payloads(stream: bytes) -> list[dict]:
    lines = [line.removeprefix(b"data: ") for line in stream.split(b"\n") if line.startswith(b"data: {")]
    return [orjson.loads(line) for line in lines]


def replayed(cassette, *, usage: bool = False) -> bytes:
    dialect, response = DIALECTS[cassette.path].name, orjson.loads(cassette.response)
    response = ENGINES[cassette.kind].strip(dialect, response, FLAGGED.get(cassette.kind, StripRules()))
    return replay.replay_events(ENGINES[cassette.kind].shape, dialect, response, usage=usage)


def comparable(value):
    """Return a response without nulls, empty texts and empty lists, and without fields that no stream has."""
    if isinstance(value, dict):
        kept = {key: comparable(inner) for key, inner in value.items() if key not in (*UNSTREAMED, "index")}
        return {key: inner for key, inner in kept.items() if inner not in (None, "", [], {})}
    return [comparable(inner) for inner in value] if isinstance(value, list) else value


@of_each(WHOLE)
def test_an_accumulated_replay_equals_the_response(cassette):
    accumulator = DIALECTS[cassette.path].accumulator()
    for chunk in payloads(replayed(cassette)):
        accumulator.feed(chunk)
    rules = FLAGGED.get(cassette.kind, StripRules())
    expected = ENGINES[cassette.kind].strip(DIALECTS[cassette.path].name, orjson.loads(cassette.response), rules)
    actual = accumulator.finish()

    head = ENGINES[cassette.kind].shape
    shown = {key: expected.get(key) for key in (*head.head, *head.first, *head.last, "choices")}
    assert comparable(shown) == comparable({key: actual.get(key) for key in shown})


def skeleton(value) -> str:
    """Return the nested keys of a value as text; leaves are `null` or `value`."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{skeleton(inner)}" for key, inner in sorted(value.items())) + "}"
    if isinstance(value, list):
        return "[" + ",".join(sorted({skeleton(inner) for inner in value})) + "]" if value else "[]"
    return "null" if value is None else "value"


def deltas(kind: str, cassettes, stream_of) -> set[str]:
    """Return the skeletons of the chat choices in the streams of plain calls."""
    found = set()
    for cassette in cassettes:
        if cassette.kind == kind and DIALECTS[cassette.path].name == "chat":
            for chunk in payloads(stream_of(cassette)):
                found |= {skeleton({**choice, "logprobs": None}) for choice in chunk.get("choices", ())}
    return found


PLAIN = {
    "vllm": ("chat_plain", "tool_auto_regex_noflags", "reasoning/r_regex_after_noflags", "eos_first_noflags"),
    "sglang": ("recorded/chat_greedy_n_plain", "recorded/chat_tool_call_n_plain", "recorded/chat_thought_n_plain"),
    "llamacpp": ("chat_plain",),
}


def take(kind: str, name: str):
    return load_http(kind, name) if kind == "llamacpp" else load(name, kind)


@pytest.mark.parametrize("kind", PLAIN)
def test_replayed_events_have_the_keys_of_the_engines_own_events(kind):
    """The same values are null, so that a client cannot distinguish a replay from a stream."""
    whole = [take(kind, name) for name in PLAIN[kind]]
    engine_events = deltas(kind, STREAMS, lambda cassette: cassette.response)

    replayed_events = deltas(kind, whole, replayed)

    assert {event.replace("logprobs:null,", "") for event in replayed_events} <= {
        event.replace("logprobs:null,", "") for event in engine_events
    }


@pytest.mark.parametrize(
    ("kind", "plain", "stream"),
    [
        ("vllm", "chat_plain", "chat_plain_stream"),
        ("sglang", "recorded/chat_greedy_n_plain", "each_token/chat_greedy_s_plain"),
        ("llamacpp", "chat_plain", "chat_stream_plain"),
    ],
)
def test_replayed_events_have_the_engines_top_level_fields(kind, plain, stream):
    """In the first, a middle and the last event."""
    replayed_events, engine_events = payloads(replayed(take(kind, plain))), payloads(take(kind, stream).response)

    for index in (0, 1, -1):
        assert engine_events[index].keys() - {"timings"} == replayed_events[index].keys() - {"timings"}
        assert engine_events[index]["object"] == replayed_events[index]["object"]


@pytest.mark.parametrize(
    ("whole", "stream"),
    [
        ("recorded/chat_tool_call_n_plain", "each_token/chat_tool_call_s_plain"),
        ("recorded/chat_thought_calls_n_plain", "each_token/chat_thought_calls_s_plain"),
        ("recorded/cmpl_greedy_n_plain", "each_token/cmpl_greedy_s_plain"),
    ],
)
def test_sglangs_events_of_completions_and_tool_calls_have_a_null_usage(whole, stream):
    """Others have none, as SGLang itself sends them (run on 0.5.23), except texts that a tool parser passes on."""

    def usages(events: list[dict]) -> set[tuple[bool, object]]:
        return {
            ("usage" in event, event.get("usage"), "tool_calls" in event["choices"][0].get("delta", {}))
            for event in events
            if event["choices"] and not event["choices"][0].get("delta", {}).get("content")
        }

    expected = usages(payloads(load(stream, "sglang").response))
    assert usages(payloads(replayed(load(whole, "sglang")))) == expected
    assert (True, None) in {usage[:2] for usage in expected}


def test_what_sglang_sends_in_an_event_of_its_own_precedes_usage():
    """Such as the details of cached tokens, on request (run on 0.5.23)."""
    cassette = load("recorded/chat_greedy_n_plain", "sglang")
    details = {"cached_tokens_details": {"device": 3, "host": 0}}
    response = orjson.loads(cassette.response) | {"sglext": details}
    events = payloads(replay.replay_events(ENGINES["sglang"].shape, "chat", response, usage=True))

    assert tuple(events[-2][key] for key in ("choices", "usage", "sglext")) == ([], None, details)
    assert "sglext" not in events[-1]


def test_usage_is_sent_before_done_if_requested():
    """It has an event of its own; vLLM omits the null fields of usage in streams."""
    stream = replayed(load("chat_plain"), usage=True)
    usage = orjson.loads(load("chat_plain").response)["usage"]

    assert stream.endswith(replay.DONE)
    assert payloads(stream)[-1]["choices"] == []
    assert {key: value for key, value in usage.items() if value is not None} == payloads(stream)[-1]["usage"]
    assert "usage" not in payloads(replayed(load("chat_plain")))[-1]


def test_a_replayed_call_is_sent_unstreamed_and_recorded_as_replayed():
    """The client gets a stream without the injected ids."""
    stream, whole = load("chat_ids_lp_stream"), load("chat_ids_lp")
    body = {
        "model": "tiny",
        "messages": stream.body["messages"],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    plan = plan_of(whole.path, body, CallOptions(streaming="replay"))

    shown, end, step = play(plan, whole)

    assert (plan.framing, plan.sent["unset"]) == ("replay", ["stream", "stream_options"])
    assert not {"stream", "stream_options"} & plan.body.keys()
    assert (shown, end[:6]) == (b"", b"data: ")
    assert (step.problems, step.extra["streaming"]) == ((), "replay")
    assert all(chunk["choices"] == [] or chunk["choices"][0].get("token_ids") is None for chunk in payloads(end))


def test_requested_ids_and_logprobs_are_in_the_chunk_of_their_text():
    """The same as where an engine sends several tokens in one chunk."""
    chunks = payloads(replayed(load("chat_ids_lp")))
    response = orjson.loads(load("chat_ids_lp").response)

    assert response["prompt_token_ids"] == chunks[0]["prompt_token_ids"]
    assert response["choices"][0]["token_ids"] == chunks[1]["choices"][0]["token_ids"]
    assert response["choices"][0]["logprobs"] == chunks[1]["choices"][0]["logprobs"]


def test_sglangs_usage_chunk_keeps_nulls():
    """A response without choices or usage has no chunks."""
    shape = ENGINES["sglang"].shape
    (chunk,) = replay.chunks(shape, "chat", {"id": "x", "choices": [], "usage": {"a": None}}, usage=True)

    assert chunk == {"id": "x", "choices": [], "usage": {"a": None}}
    assert list(replay.chunks(shape, "chat", {"id": "x", "choices": []}, usage=False)) == []


def test_a_tool_call_without_arguments_has_one_chunk():
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": ""}}],
    }
    response = {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}
    chunks = list(replay.chunks(ENGINES["vllm"].shape, "chat", response, usage=False))

    assert sum("tool_calls" in chunk["choices"][0]["delta"] for chunk in chunks) == 1


def test_a_response_of_another_shape_is_replayed_as_one_event():
    """The step is flagged, and the stream still ends with [DONE]."""
    plan = plan_of("/v1/chat/completions", {"messages": [], "stream": True}, CallOptions(streaming="replay"))
    cassette = load("chat_ids_lp")
    _, end, step = play(plan, cassette, [b'{"choices":[{"index":0}],"odd":1}'])

    assert end == b'data: {"choices":[{"index":0}],"odd":1}\n\ndata: [DONE]\n\n'
    assert "unparsed_event" in step.problems


@pytest.mark.parametrize(
    ("body", "event"),
    [
        (b'{"error":{"message":"no"}}', b'data: {"error":{"message":"no"}}\n\ndata: [DONE]\n\n'),
        (
            b'{"object":"error","message":"no"}',
            b'data: {"error":{"object":"error","message":"no"}}\n\ndata: [DONE]\n\n',
        ),
        (b"no\nJSON", b'data: {"error":{"message":"no\\nJSON"}}\n\ndata: [DONE]\n\n'),
    ],
)
def test_an_error_in_a_replayed_stream_is_an_event(body, event):
    """The status line was sent with the first comment."""
    assert replay.error_events(body) == event


def test_a_response_of_another_shape_is_forwarded_and_flagged():
    """Nothing can be stripped from choices that are not objects."""
    reply = replay.WholeResponse(
        ClientView(DIALECTS["/v1/chat/completions"], ENGINES["vllm"], StripRules(token_ids=True), 1)
    )
    reply.feed(b'{"choices":[1]}')
    end, response = reply.finish()

    assert (end, response.response, response.problems) == (b'{"choices":[1]}', None, ("unparsed_event",))
