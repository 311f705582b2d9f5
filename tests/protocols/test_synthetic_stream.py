"""Replay: an unstreamed response told as the engine's own stream, proved on recorded answers of every engine."""

import orjson
import pytest
from recorded import dialect_cassettes, http_cassettes, load, load_http, plan_of, play

from proxy.protocols import synthetic_stream as replay
from proxy.protocols.dialects import DIALECTS
from proxy.protocols.engines import ENGINES, StripRules
from proxy.protocols.plan import CallOptions

EVERY = [*dialect_cassettes(), *http_cassettes("sglang"), *http_cassettes("llamacpp")]
RECORDED = [cassette for cassette in EVERY if cassette.status == 200 and "generate" not in cassette.path]
WHOLE = [cassette for cassette in RECORDED if not cassette.is_stream]
STREAMS = [cassette for cassette in RECORDED if cassette.is_stream]
# In an unstreamed response only, whatever is asked (seen on vLLM 0.32 and SGLang 0.5.23).
UNSTREAMED = (
    "prompt_logprobs",
    "routed_experts",
    "metadata",
    "usage",
    "kv_transfer_params",
    "ec_transfer_params",
    "metrics",
)

# What only flags bring, and is hidden before a response is replayed.
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


def said(value):
    """What is said: no nulls, empty texts or lists; and nothing that no stream has."""
    if isinstance(value, dict):
        kept = {key: said(inner) for key, inner in value.items() if key not in (*UNSTREAMED, "index")}
        return {key: inner for key, inner in kept.items() if inner not in (None, "", [], {})}
    return [said(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize("cassette", WHOLE, ids=lambda cassette: f"{cassette.kind}-{cassette}")
def test_folding_a_replay_gives_the_response_back(cassette):
    """Nothing is dropped, and nothing is said twice."""
    fold = DIALECTS[cassette.path].accumulator()
    for chunk in payloads(replayed(cassette)):
        fold.feed(chunk)
    hidden = FLAGGED.get(cassette.kind, StripRules())
    expected = ENGINES[cassette.kind].strip(DIALECTS[cassette.path].name, orjson.loads(cassette.response), hidden)
    actual = fold.finish()

    head = ENGINES[cassette.kind].shape
    shown = {key: expected.get(key) for key in (*head.head, *head.first, *head.last, "choices")}
    assert said(shown) == said({key: actual.get(key) for key in shown})


def skeleton(value) -> str:
    """The keys of an event, and of what it holds."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{skeleton(inner)}" for key, inner in sorted(value.items())) + "}"
    if isinstance(value, list):
        return "[" + ",".join(sorted({skeleton(inner) for inner in value})) + "]" if value else "[]"
    return "null" if value is None else "value"


def deltas(kind: str, cassettes, stream_of) -> set[str]:
    """The skeletons of the chat choices that streams of plain calls hold."""
    found = set()
    for cassette in cassettes:
        if cassette.kind == kind and DIALECTS[cassette.path].name == "chat":
            for chunk in payloads(stream_of(cassette)):
                found |= {skeleton({**choice, "logprobs": None}) for choice in chunk.get("choices", ())}
    return found


PLAIN = {
    "vllm": ("chat_plain", "tool_auto_regex_noflags", "reasoning/r_regex_after_noflags", "eos_first_noflags"),
    "sglang": ("chat_plain", "chat_tools", "chat_reasoning"),
    "llamacpp": ("chat_plain",),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_an_event_looks_like_one_of_the_engines_own(kind):
    """By its keys, and by what is null: a client cannot tell a replay from a stream."""
    whole = [load(name) if kind == "vllm" else load_http(kind, name) for name in PLAIN[kind]]
    own = deltas(kind, STREAMS, lambda cassette: cassette.response)

    ours = deltas(kind, whole, replayed)

    assert {event.replace("logprobs:null,", "") for event in ours} <= {e.replace("logprobs:null,", "") for e in own}


@pytest.mark.parametrize("kind", PLAIN)
def test_the_top_of_an_event_is_the_engines_own(kind):
    """The same fields on the first event, in the middle, and at the end."""
    plain, stream = ("chat_plain", "chat_plain_stream") if kind == "vllm" else ("chat_plain", "chat_stream_plain")
    take = load if kind == "vllm" else lambda name: load_http(kind, name)
    ours, own = payloads(replayed(take(plain))), payloads(take(stream).response)

    for at in (0, 1, -1):
        assert own[at].keys() - {"timings"} == ours[at].keys() - {"timings"}
        assert own[at]["object"] == ours[at]["object"]


def test_usage_comes_where_it_was_asked_for():
    """In an event of its own, before the terminal one; vLLM's streams leave out what is null in it."""
    stream = replayed(load("chat_plain"), usage=True)
    usage = orjson.loads(load("chat_plain").response)["usage"]

    assert stream.endswith(replay.DONE)
    assert [] == payloads(stream)[-1]["choices"]
    assert {key: value for key, value in usage.items() if value is not None} == payloads(stream)[-1]["usage"]
    assert "usage" not in payloads(replayed(load("chat_plain")))[-1]


def test_a_replayed_call_is_asked_unstreamed_and_recorded_as_such():
    """The client gets a stream, the step says how it came about, and ids are those of the answer."""
    stream, whole = load("chat_ids_lp_stream"), load("chat_ids_lp")
    body = {
        "model": "tiny",
        "messages": stream.body["messages"],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    plan = plan_of(whole.path, body, CallOptions(streaming="replay"))

    shown, end, step = play(plan, whole)

    assert ("replay", ["stream", "stream_options"]) == (plan.framing, plan.sent["unset"])
    assert not {"stream", "stream_options"} & plan.body.keys()
    assert (b"", b"data: ") == (shown, end[:6])
    assert ((), "replay") == (step.problems, step.extra["streaming"])
    assert all(chunk["choices"] == [] or chunk["choices"][0].get("token_ids") is None for chunk in payloads(end))


def test_ids_and_logprobs_that_were_asked_for_come_with_the_text():
    """As they do where an engine sends several tokens at once."""
    chunks = payloads(replayed(load("chat_ids_lp")))
    response = orjson.loads(load("chat_ids_lp").response)

    assert response["prompt_token_ids"] == chunks[0]["prompt_token_ids"]
    assert response["choices"][0]["token_ids"] == chunks[1]["choices"][0]["token_ids"]
    assert response["choices"][0]["logprobs"] == chunks[1]["choices"][0]["logprobs"]


def test_usage_of_another_engine_is_told_as_it_is():
    """SGLang's streams have its nulls; an answer without any is a stream that says so; one without choices has no events."""
    shape = ENGINES["sglang"].shape
    (chunk,) = replay.chunks(shape, "chat", {"id": "x", "choices": [], "usage": {"a": None}}, usage=True)

    assert {"id": "x", "choices": [], "usage": {"a": None}} == chunk
    assert [] == list(replay.chunks(shape, "chat", {"id": "x", "choices": []}, usage=False))


def test_a_call_without_arguments_has_one_event():
    """There is nothing more to tell."""
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": ""}}],
    }
    response = {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}
    told = list(replay.chunks(ENGINES["vllm"].shape, "chat", response, usage=False))

    assert 1 == sum("tool_calls" in chunk["choices"][0]["delta"] for chunk in told)


def test_an_answer_of_an_unknown_shape_is_told_as_one_event():
    """It is recorded as not understood; the stream still ends."""
    plan = plan_of("/v1/chat/completions", {"messages": [], "stream": True}, CallOptions(streaming="replay"))
    odd = load("chat_ids_lp")
    _, end, step = play(plan, odd, [b'{"choices":[{"index":0}],"odd":1}'])

    assert b'data: {"choices":[{"index":0}],"odd":1}\n\ndata: [DONE]\n\n' == end
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
def test_an_error_after_the_first_comment_is_an_event(body, event):
    """The status was given already."""
    assert event == replay.error_events(body)
