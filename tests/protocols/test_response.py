"""The response stream of an engine: the moment at which the end begins. Recorded ones: test_exchange.py."""

import re
import tracemalloc
from dataclasses import replace

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.recorded import load

from proxy.errors import EngineEventTooLong
from proxy.protocols.dialects import DIALECTS
from proxy.protocols.engines import ENGINES
from proxy.protocols.engines.base import Sampled, StripRules, Tokens
from proxy.protocols.parts import Before
from proxy.protocols.response import ClientView, Event, EventParser, StreamResponse, TokenAnnotations, read_event


def view(choices: int | None = 1, **hidden) -> ClientView:
    return ClientView(DIALECTS["/v1/chat/completions"], ENGINES["vllm"], StripRules(**hidden), choices)


def chunk(index: int, finish: str = "null") -> bytes:
    return b'data: {"choices":[{"index":%d,"delta":{"content":"x"},"finish_reason":%s}]}\n\n' % (index, finish.encode())


def test_of_several_choices_the_last_finish_chunk_is_withheld():
    """The finish chunks of the other choices are forwarded at once."""
    reply = StreamResponse(view(choices=2))
    first, second = chunk(1, '"stop"'), chunk(0, '"stop"')

    assert first == reply.feed(first)
    assert reply.feed(second) == b""
    assert second == reply.finish()[0]


def test_the_first_finish_chunk_is_withheld_if_the_number_of_choices_is_unknown():
    """The last chunk is sent to the client after the step is stored."""
    reply = StreamResponse(view(choices=None))

    assert reply.feed(chunk(0, '"stop"') + chunk(1)) == b""


def test_an_incomplete_last_event_is_forwarded_unchanged():
    reply = StreamResponse(view())
    reply.feed(b'data: {"cho')
    end, response = reply.finish()

    assert (end, response.ended, response.problems) == (b'data: {"cho', False, ("unparsed_event",))


@pytest.mark.parametrize("end", [StreamResponse.finish, StreamResponse.cut])
def test_parts_that_do_not_add_up_to_a_response_are_a_problem(end):
    """Without it, the step would have the response of the last part alone, as if it were all of the call."""
    versions = {"weight_versions": [{"version": "1", "start": 0, "end": 2}]}
    first = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "ab"}}], "metadata": versions}
    reply = StreamResponse(replace(view(), before=Before(first, 3, 2)))
    reply.feed(chunk(0, '"stop"').replace(b"{", b'{"metadata":{"weight_versions":[{"start":0}]},', 1))
    answer = end(reply)[1]

    assert (answer.shown, answer.differs, answer.problems) == (None, None, ("unparsed_event",))


def test_comments_are_forwarded():
    """They are the engine's keep-alives."""
    assert StreamResponse(view()).feed(b": ping\n\n") == b": ping\n\n"


def test_the_model_field_is_replaced_by_the_clients_name():
    """Events without a model get none."""
    reply = StreamResponse(ClientView(DIALECTS["/v1/chat/completions"], ENGINES["vllm"], StripRules(), 1, "gpt-4o"))

    assert reply.feed(b'data: {"model":"m","choices":[]}\n\n') == b'data: {"model":"gpt-4o","choices":[]}\n\n'
    assert reply.feed(b'data: {"choices":[]}\n\n') == b'data: {"choices":[]}\n\n'


def test_nan_beside_stripped_fields_is_forwarded_unchanged():
    reply = StreamResponse(view(token_ids=True))
    event = b'data: {"choices":[{"index":0,"x":NaN,"token_ids":[1]}]}\n\n'

    assert event.replace(b"[1]", b"null") == reply.feed(event)


def test_a_chunk_that_cannot_be_accumulated_is_forwarded_and_flags_the_step():
    """Its text is not a string; the text of the other chunks is recorded."""
    reply = StreamResponse(ClientView(DIALECTS["/v1/completions"], ENGINES["vllm"], StripRules(), 1))
    event = b'data: {"choices":[{"index":0,"text":7}]}\n\n'

    assert reply.feed(event) == b""  # withheld: it may finish the choice
    end, response = reply.finish()
    assert event == end
    assert (response.response["choices"][0]["text"], response.problems) == ("", ("unparsed_event",))


def parse(pieces: list[bytes]) -> list[Event]:
    parser = EventParser()
    events = [event for piece in pieces for event in parser.feed(piece)]
    rest = parser.finish()
    return [*events, rest] if rest else events


def pieces_from(stream: bytes, sizes: list[int]) -> list[bytes]:
    pieces, position = [], 0
    for size in sizes:
        pieces.append(stream[position : position + size])
        position += size
    return [*pieces, stream[position:]]


LINES = st.sampled_from(
    [b"data: {}", b"data:x", b"data: \xf0\x9f\xa6\x8a", b": keep-alive", b"event: sglext_ids", b"id: 1", b"retry", b""]
)
STREAMS = st.lists(st.tuples(LINES, st.sampled_from([b"\n", b"\r\n", b"\r"])), max_size=30).map(
    lambda lines: b"".join(line + end for line, end in lines)
)


@given(STREAMS, st.lists(st.integers(0, 9), max_size=60))
def test_events_do_not_depend_on_the_chunking(stream, sizes):
    assert parse([stream]) == parse(pieces_from(stream, sizes))


@given(STREAMS, st.lists(st.integers(0, 9), max_size=60))
def test_no_byte_is_lost_or_added(stream, sizes):
    """The raw bytes of all events, joined, equal the input."""
    events = parse(pieces_from(stream, sizes))

    assert stream == b"".join(event.raw for event in events)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_lf_crlf_and_cr_end_a_line(end):
    stream = b"event: a" + end + b"data: 1" + end + b"data: 2" + end + end + b"data: 3" + end + end

    assert [(event.name, event.payload) for event in parse([stream])] == [(b"a", b"1\n2"), (b"", b"3")]


def test_a_comment_is_an_event_without_payload():
    assert [Event(b": ping\n\n", b"")] == parse([b": ping\n\n"])


def test_an_incomplete_last_event_is_returned_by_finish():
    parser = EventParser()

    assert parser.feed(b'data: {"id"') == []
    assert Event(b'data: {"id"', b'{"id"') == parser.finish()
    assert parser.finish() is None


def test_an_event_is_returned_at_its_blank_line():
    """It does not wait for the next event."""
    parser = EventParser()

    assert [event.payload for event in parser.feed(b"data: 1\n\ndata: 2\n\ndata")] == [b"1", b"2"]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"data: 1\n\n", b"data: 9\n\n"),
        (b"data: 1\r\n\r\n", b"data: 9\r\n\r\n"),
        (b"event: x\ndata: 1\n\n", b"event: x\ndata: 9\n\n"),
        (b"event: x\r\ndata: 1\r\n\r\n", b"event: x\r\ndata: 9\r\n\r\n"),
    ],
)
def test_replacing_the_payload_keeps_name_and_line_endings(raw, expected):
    event = read_event(raw)

    assert event.before + b"9" + event.after == expected


def test_the_bytes_of_an_event_that_is_too_long_are_forgotten():
    parser = EventParser(limit=1000)
    with pytest.raises(EngineEventTooLong):
        parser.feed(b"data: " + b"x" * 1000) or parser.feed(b"x")

    assert parser.finish() is None


def test_a_long_event_takes_at_most_five_times_its_size_in_memory():
    """A 16 MB event in reads of 64 kB: the pending bytes, the joined event and its payload."""
    piece = b"x" * 2**16
    tracemalloc.start()
    try:
        parser = EventParser()
        for _ in range(256):
            parser.feed(piece)
        assert len(parser.feed(b"\n\n")) == 1
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak < 5 * 2**24


def test_an_event_longer_than_the_limit_raises():
    """Bytes of other events do not count."""
    parser = EventParser(limit=1000)
    for _ in range(5):
        assert len(parser.feed(b"data: x\n\n" * 9 + b"x" * 900)) == 9
        assert len(parser.rest) == 900
        assert len(parser.feed(b"\n\n")) == 1
    parser.feed(b"x" * 1000)
    with pytest.raises(EngineEventTooLong, match="1000"):
        parser.feed(b"x")


@given(
    st.lists(st.sampled_from([b"data", b"data:", b": ", b" ", b"event:", b"x", b"\n", b"\r\n", b"\r", b"adata:"])).map(
        b"".join
    )
)
def test_fields_are_parsed_as_the_standard_defines(raw):
    """A line is a field name, a colon, one optional space, and a value; other fields are ignored."""
    payload, name = [], b""
    for line in re.split(rb"\r\n|\n|\r", raw):
        field, _, value = line.partition(b":")
        if field == b"data":
            payload.append(value.removeprefix(b" "))
        elif field == b"event":
            name = value.removeprefix(b" ")

    assert (b"\n".join(payload), name) == read_event(raw)[1:3]


NAMED = orjson.loads(load("chat_ids_lp_asids").response)  # top_logprobs: 1, by ids
PLAIN = orjson.loads(load("chat_ids_lp").response)


def pieces(ids):
    return [f"<{token}>" for token in ids]


def annotated(response, annotations):
    before = orjson.dumps(response)
    annotated_response = annotations.annotate(response, ENGINES["vllm"].tokens("chat", {}, response))
    assert before == orjson.dumps(response), "annotate() changed its argument"
    return annotated_response


def test_each_logprob_entry_has_the_text_of_its_token_id():
    """The engine's logprobs and bytes are unchanged."""
    (choice,) = annotated(PLAIN, TokenAnnotations(pieces))["choices"]
    (plain,) = PLAIN["choices"]

    assert pieces(plain["token_ids"]) == [entry["token"] for entry in choice["logprobs"]["content"]]
    for entry, before in zip(choice["logprobs"]["content"], plain["logprobs"]["content"], strict=True):
        assert before == entry | {"token": before["token"]}


def test_alternatives_have_the_text_of_their_token_ids():
    """The engine returns them as `token_id:N`; the bytes of these names become null."""
    (choice,) = annotated(NAMED, TokenAnnotations(pieces))["choices"]
    others = [entry["top_logprobs"] for entry in choice["logprobs"]["content"]]
    before = [entry["top_logprobs"] for entry in NAMED["choices"][0]["logprobs"]["content"]]

    assert before != others
    assert [
        [entry | {"token": f"<{entry['token'].removeprefix('token_id:')}>", "bytes": None} for entry in entries]
        for entries in before
    ] == others


@pytest.mark.parametrize("top_logprobs", [None, 0, 2])
def test_alternatives_are_requested_as_token_ids(top_logprobs):
    """Only if the request has alternatives and the token text is to be added."""
    fields = {"return_tokens_as_token_ids": True} if top_logprobs else {}

    assert fields == TokenAnnotations(pieces).fields({"top_logprobs": top_logprobs})
    assert TokenAnnotations(ids=True).fields({"top_logprobs": top_logprobs}) == {}


@pytest.mark.parametrize(
    ("ids", "entry"),
    [
        pytest.param(
            [7], {"token": "a", "top_logprobs": [{"token": "b", "logprob": -1.0}]}, id="a nameless alternative"
        ),
        pytest.param([8], {"token": "a"}, id="no such id in the vocabulary"),
        pytest.param([7, 7], {"token": "a"}, id="more ids than entries"),
        pytest.param(None, {"token": "a"}, id="no ids"),
    ],
)
def test_logprobs_are_null_if_a_token_has_no_text(ids, entry):
    """The engine's text could belong to another token."""
    choice = {"index": 0, "logprobs": {"content": [entry]}}
    tokens = Tokens([1], (Sampled(0, None, ids, None, "stop", None),))
    annotations = TokenAnnotations(lambda ids: ["<7>" if token == 7 else None for token in ids])

    assert annotations.annotate({"choices": [choice]}, tokens)["choices"] == [{"index": 0, "logprobs": None}]


def test_choices_have_response_and_prompt_token_ids():
    """By the names that Marin reads, whether the prompt belongs to the choice or to all choices."""
    own = Sampled(1, [3], [4], None, "stop", None)
    shared = Sampled(0, None, [5], None, "stop", None)
    annotated_response = TokenAnnotations(ids=True).annotate(
        {"choices": [{"index": 0}, {"index": 1}]}, Tokens([1, 2], (shared, own))
    )

    assert annotated_response["choices"] == [
        {"index": 0, "prompt_token_ids": [1, 2], "response_token_ids": [5]},
        {"index": 1, "prompt_token_ids": [3], "response_token_ids": [4]},
    ]


def test_unknown_ids_are_omitted():
    """Not null: clients check whether the key exists."""
    annotated_response = TokenAnnotations(ids=True).annotate(
        {"choices": [{"index": 0}]}, Tokens(None, (Sampled(0, None, [4], None, None, None),))
    )

    assert annotated_response["choices"] == [{"index": 0}]


def test_a_response_without_logprobs_gets_no_token_text():
    choice = {"index": 0, "logprobs": None}
    tokens = Tokens([1], (Sampled(0, None, [4], None, None, None),))

    assert TokenAnnotations(pieces).annotate({"choices": [choice]}, tokens)["choices"] == [choice]
