"""Events that repeat the one before them have the effect that the general path has, for every split into reads."""

from itertools import product
from unittest.mock import patch

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.each_cassette import of_each
from tests.support.recorded import cut, dialect_cassettes, http_cassettes, plan_of, play

from proxy.protocols.accumulators import ChatAccumulator, RepeatedEvents
from proxy.protocols.dialects import DIALECTS, TRANSLATORS
from proxy.protocols.dialects.base import CallIdentity
from proxy.protocols.engines import ENGINES
from proxy.protocols.engines.base import StripRules
from proxy.protocols.response import ClientView, StreamResponse

STREAMS = [
    cassette
    for cassette in (*dialect_cassettes(), *dialect_cassettes("sglang"), *http_cassettes("llamacpp"))
    if cassette.is_stream and cassette.path.endswith("/chat/completions")
]
# The options that the proxy sets on requests.
INJECTED = ("return_token_ids", "logprobs", "top_logprobs", "return_meta_info")
LIVE = {"stream": True, "stream_options": {"unknown": True}}  # an unknown option, which prevents a synthetic stream

TRANSLATED = [
    (translation, {**body, "stream": True})
    for translation in TRANSLATORS.values()
    for body in ({}, {"include": ["message.output_text.logprobs", "reasoning.encrypted_content"]})
]
IDENTITY = CallIdentity("01ARZ3NDEKTSV4RRFFQ69G5FAV", 1, "m", "r1")

HEADS = [
    '"id":"c1","object":"chat.completion.chunk","created":1,"model":"m"',
    '"id":"c2","model":"m"',
    '"id":"ü","model":"m"',
]
TEXTS = st.sampled_from(
    [
        "a",
        " the",
        "",
        "{",
        '\\"',
        "\\n",
        "\\u0001",
        "\\u000b",
        "\\u00e9",
        "\\/",
        "\\ud83d",
        "é🙂",
        '","x":"',
        "\\",
        "\x01",
        "%s",
    ]
)
IDS = st.sampled_from(["1", "17", "1,2", "1,2,3", "", "007", "99999999999999999999", "-1", "1.5", "null", "true"])
NUMBERS = st.sampled_from(["-0.5", "0", "-1e-05", "1e999", "-", "NaN", "-9999.0", "null", "1.0E+2"])
BYTES = st.sampled_from(["[97]", "[226,130]", "null", "[]", "[1,,2]", "[007]", '["x"]'])
OTHERS = st.sampled_from(
    [
        "data: [DONE]", ": comment", "", "data: {", 'data: {"error":{"message":"x"}}', "event: x\ndata: {}",
        'data: {"id":"c1","choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}',
    ]
)  # fmt: skip


@st.composite
def entries(draw):
    """Draw the logprobs of a token as an engine writes them, or nearly so."""
    token, number, parts = draw(TEXTS), draw(NUMBERS), draw(BYTES)
    alternatives = draw(st.sampled_from(["[]", "[]", '[{"token":"x","logprob":-1.0}]']))
    if draw(st.booleans()):
        return f'{{"token":"{token}","logprob":{number},"bytes":{parts},"top_logprobs":{alternatives}}}'
    return f'{{"token":"{token}","bytes":{parts},"logprob":{number},"top_logprobs":{alternatives}}}'


@st.composite
def events(draw):
    """Draw events of a few shapes; most events repeat the one before."""
    head, index = draw(st.sampled_from(HEADS)), draw(st.sampled_from([0, 0, 0, 1]))
    form = draw(st.sampled_from(['"content":"%s"', '"reasoning":"%s"', '"role":"assistant","content":"%s"', "",
        '"content":"%s","reasoning":null', '"tool_calls":[{"index":0,"function":{"arguments":"%s"}}]',
        '"content":"%s","refusal":"no"', '"content":"x","annotations":["%s"]'])
    )  # fmt: skip
    finish = draw(st.sampled_from(["null", "null", "null", "null", '"stop"']))
    end = draw(st.sampled_from(["", ',"stop_reason":null', ',"token_ids":null', ',"hidden":[1]']))
    top = draw(st.sampled_from(["", "", ',"usage":null', ',"usage":{"prompt_tokens":1,"completion_tokens":1}']))
    has_logprobs, has_ids = draw(st.booleans()), draw(st.booleans())
    found = []
    for _ in range(draw(st.integers(1, 4))):
        delta = form % draw(TEXTS) if "%s" in form else form
        several = ",".join(draw(st.lists(entries() | st.sampled_from(["1", "{}"]), max_size=2)))
        logprobs = f'{{"content":[{several}]}}' if has_logprobs else "null"
        ids = f',"token_ids":[{draw(IDS)}]' if has_ids else ""
        choice = f'{{"index":{index},"delta":{{{delta}}},"logprobs":{logprobs},"finish_reason":{finish}{ids}{end}}}'
        found.append(f'data: {{{head},"choices":[{choice}]{top}}}')
    return found


def outcome(reply, reads):
    """Return what the client receives after each read, and the parsed response."""
    shown = [reply.feed(read) for read in reads]
    end, parsed = reply.finish()
    return shown, end, repr(parsed)


def without_repetitions():
    """Let the general path process every event."""
    return patch.object(RepeatedEvents, "learn", lambda *args: None)


def reads_of(stream, sizes):
    """Cut a stream: by sizes, or one event per read if there are none."""
    return cut(stream, sizes) if sizes else [event + b"\n\n" for event in stream.split(b"\n\n")]


@given(st.data())
def test_repetitions_have_the_effect_of_the_general_path(data):
    """The same bytes for the client after each read, and the same response, for valid and for invalid events."""
    rules = data.draw(
        st.builds(
            StripRules,
            token_ids=st.booleans(),
            logprobs=st.booleans(),
            empty_deltas=st.booleans(),
            reasoning=st.sampled_from([False, False, True]),
        )
    )
    choices, model = data.draw(st.sampled_from([1, 2, None])), data.draw(st.sampled_from([None, "alias"]))
    translation, body = data.draw(st.sampled_from([(None, {}), *TRANSLATED]))

    def reply():
        renderer = None if translation is None else translation.renderer(body, IDENTITY)
        chat, engine = DIALECTS["/v1/chat/completions"], ENGINES["vllm"]
        return StreamResponse(
            ClientView(chat, engine, rules, choices, model, translation=translation, renderer=renderer)
        )

    runs = data.draw(st.lists(events() | OTHERS.map(lambda event: [event]), max_size=6))
    text = "".join(f"{event}\n\n" for run in runs for event in run)
    stream = text.replace("\n", data.draw(st.sampled_from(["\n", "\n", "\n", "\r\n"]))).encode()
    reads = reads_of(stream, data.draw(st.lists(st.integers(0, 700), max_size=12)))

    with without_repetitions():
        expected = outcome(reply(), reads)
    assert outcome(reply(), reads) == expected


@pytest.mark.parametrize(("field", "name"), [("content", "output_text"), ("reasoning", "reasoning_text")])
def test_most_events_of_a_responses_stream_are_repetitions(field, name):
    events = [f'data: {{"id":"c","choices":[{{"index":0,"delta":{{"{field}":"w{n}"}}}}]}}\n\n' for n in range(100)]
    translation = TRANSLATORS["/v1/responses"]
    view = ClientView(
        DIALECTS["/v1/chat/completions"], ENGINES["vllm"], StripRules(), 1, renderer=translation.renderer({}, IDENTITY)
    )
    with patch.object(ChatAccumulator, "feed", autospec=True, side_effect=ChatAccumulator.feed) as feed:
        shown = StreamResponse(view).feed("".join(events).encode())

    assert feed.call_count <= 2
    assert shown.count(f"event: response.{name}.delta".encode()) == 100


def test_logprobs_of_events_without_text_are_in_a_responses_stream():
    """vLLM and SGLang send them, for tokens that have no text yet or that a parser reads."""
    entry = '{"token":"%s","logprob":-0.5,"bytes":[97],"top_logprobs":[]}'
    event = 'data: {"id":"c","choices":[{"index":0,"delta":%s,"logprobs":{"content":[%s]},"finish_reason":%s}]}\n\n'
    deltas = [('{"content":"x"}', "null"), *3 * [("{}", "null")], ('{"content":"y"}', "null"), ("{}", '"stop"')]
    tokens = "abcdef"
    events = [event % (delta, entry % token, end) for (delta, end), token in zip(deltas, tokens, strict=True)]
    renderer = TRANSLATORS["/v1/responses"].renderer({"include": ["message.output_text.logprobs"]}, IDENTITY)
    stream = StreamResponse(
        ClientView(DIALECTS["/v1/chat/completions"], ENGINES["vllm"], StripRules(), 1, renderer=renderer)
    )
    stream.feed("".join(events).encode() + b"data: [DONE]\n\n")
    last = orjson.loads(stream.finish()[0].rpartition(b"data: ")[2])

    (part,) = last["response"]["output"][0]["content"]
    assert [logprob["token"] for logprob in part["logprobs"]] == [*tokens]


def test_what_is_stripped_may_depend_on_the_text():
    """With reasoning that the client disabled, an event without content is stripped in another way than one with content."""
    view = ClientView(DIALECTS["/v1/chat/completions"], ENGINES["vllm"], StripRules(reasoning=True), 1)
    reply = StreamResponse(view)
    event = 'data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":"%s"}}]}\n\n'

    assert [event % "", (event % "a").replace('"a"', '"a","reasoning":null')] == [
        reply.feed((event % text).encode()).decode() for text in ("", "a")
    ]


@of_each(STREAMS)
def test_recorded_streams_have_the_effect_of_the_general_path(cassette):
    """Also the step, for a client that requested the token ids and for one that did not; by event, in bursts, in pieces."""
    without = {key: value for key, value in cassette.body.items() if key not in INJECTED}
    for sizes, body in product(([], [65536] * 9, [300] * 900), (cassette.body, without)):
        reads = reads_of(cassette.response, sizes)
        plan = plan_of(cassette.path, body | LIVE, kind=cassette.kind)
        with without_repetitions():
            expected = play(plan, cassette, reads)
        assert repr(expected) == repr(play(plan, cassette, reads)), sizes


@pytest.mark.parametrize("requested", [False, True])
@pytest.mark.parametrize("size", [1, 7, 500, 100_000])
def test_most_events_of_a_usual_stream_are_repetitions(requested, size):
    """For each number of events in a read, and for clients that requested the ids."""
    choice = '{"index":0,"delta":{"content":"w%d"},"logprobs":{"content":[%s]},"finish_reason":null,"token_ids":[%d]}'
    entry = '{"token":"w","logprob":-0.5,"bytes":[119],"top_logprobs":[]}'
    payloads = [f'{{"id":"c","choices":[{choice % (number, entry, number)}]}}' for number in range(100)]
    stream = b"".join(b"data: " + payload.encode() + b"\n\n" for payload in payloads)
    rules = StripRules(token_ids=not requested, logprobs=not requested)
    reply = StreamResponse(ClientView(DIALECTS["/v1/chat/completions"], ENGINES["vllm"], rules, 1))
    with patch.object(ChatAccumulator, "feed", autospec=True, side_effect=ChatAccumulator.feed) as feed:
        shown = b"".join(reply.feed(read) for read in cut(stream, [size] * (len(stream) // size)))

    assert feed.call_count <= 2
    assert shown.count(b"data: ") == 100


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_text_after_a_finish_reason_is_found_behind_an_event_without_text(kind):
    """The other choice is still open. An event without text is not learned, so that the next one is checked."""

    def event(index: int, content: str, finish: str = "null") -> bytes:
        choice = f'{{"index":{index},"delta":{{"content":"{content}"}},"finish_reason":{finish}}}'
        return f'data: {{"id":"c","object":"chat.completion.chunk","model":"m","choices":[{choice}]}}\n\n'.encode()

    stream = StreamResponse(ClientView(DIALECTS["/v1/chat/completions"], ENGINES[kind], StripRules(), 2))
    for read in (event(0, "a"), event(1, "b"), event(0, "c", '"stop"'), event(0, ""), event(0, "late")):
        stream.feed(read)
    stream.feed(event(1, "d", '"stop"') + b"data: [DONE]\n\n")
    _, answer = stream.finish()

    assert answer.problems == ("content_after_end",)
