"""JSON as engines write it, the weight of texts, and lists that are parsed apart."""

import math
import tracemalloc
from hashlib import blake2b
from unittest.mock import patch

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.each_cassette import of_each
from tests.support.recorded import cut, dialect_cassettes, http_cassettes, plan_of, play

from proxy.protocols import response, whole_response
from proxy.protocols.dialects import DIALECTS
from proxy.protocols.engines import ENGINES
from proxy.protocols.engines.base import StripRules
from proxy.protocols.exchange import Exchange
from proxy.protocols.json_texts import (
    WEIGHTS,
    KnownPrompt,
    NotJson,
    fresh_bytes,
    most_weight,
    prompt_of,
    read_json,
    read_lists,
    read_long,
    stream_weight,
    write_loosely,
)
from proxy.protocols.response import ClientView, EventParser
from proxy.trajectory.arrays import pack_ids, pack_logprobs
from proxy.trajectory.step import Timing

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(VALUES)
def test_written_json_reads_back_as_the_same_value(value):
    assert read_json(orjson.dumps(value)) == read_json(write_loosely(value)) == (value, False)


def test_nan_and_infinities_are_read_and_written_as_python_writes_them():
    """They are not JSON, but engines in Python send them."""
    value, loosely = read_json(b'{"a":NaN,"b":-Infinity}')

    assert loosely
    assert math.isnan(value["a"])
    assert write_loosely(value) == b'{"a":NaN,"b":-Infinity}'


@pytest.mark.parametrize("literal", [b"1e400", b"-1e400", b"9" * 5000, b"1.5E+999"])
def test_a_number_beyond_a_double_is_written_unchanged(literal):
    """`Infinity` would be invalid JSON; the value is read as a string, which no reader takes for a number."""
    text = b'{"a":[' + literal + b',1.5,7],"b":"\xee\x80\x80overflow:x"}'
    value, loosely = read_json(text)

    assert (loosely, type(value["a"][0]), value["a"][1:]) == (True, str, [1.5, 7])
    assert text == write_loosely(value)


def test_a_lone_surrogate_becomes_a_question_mark():
    """Without it, the value could not be written as UTF-8."""
    assert read_json(b'{"a":"\\ud800"}') == ({"a": "?"}, True)


@pytest.mark.parametrize("text", [b"", b"{", b"<html>", b"\xff", b"[" * 100_000])
def test_invalid_json_raises_not_json(text):
    with pytest.raises(NotJson):
        read_json(text)


@pytest.mark.parametrize(
    "piece",
    ["[],", "{},", '{"a":{}},', "1234567,", '"ab",', "1.5,", '{"1":{"logprob":-1.5,"rank":1,"decoded_token":"a"}},'],
)
def test_the_weight_of_a_text_is_about_the_memory_of_its_values_or_more(piece):
    """Within 10 %."""
    text = f"[{piece * 20_000}1]".encode()
    tracemalloc.start()
    try:
        value = orjson.loads(text)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert value
    assert size < 1.1 * most_weight(text)


@pytest.mark.parametrize("piece", [b"\n\n", b":\n\n", b"\r\r", b"data: 1\n\n"])
def test_the_weight_of_a_response_covers_very_short_events(piece):
    text = piece * 10_000
    tracemalloc.start()
    try:
        events = EventParser().feed(text)
        held = [event.raw for event in events]
        del events
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert held
    assert size < stream_weight(text)


BODIES = st.text('a"{[,\\', max_size=60).map(str.encode)


def digest_of(text):
    """The digest of a request body."""
    return blake2b(text, digest_size=16).hexdigest()


@given(st.lists(BODIES, min_size=1, max_size=4), st.integers(1, 20))
def test_a_text_has_the_same_digest_and_weight_after_any_other(texts, size):
    """However it is cut into pieces."""
    before = None
    with patch("proxy.protocols.json_texts._PIECE_BYTES", size):
        for text in (*texts, texts[0] + texts[-1]):
            before = read_long(text, before)

            assert (digest_of(text), most_weight(text)) == (before.digest, before.weight)
            assert text.startswith(b"".join(piece.text for piece in before.pieces))


@pytest.mark.parametrize(
    ("text", "hashed"), [(b"aabbcc", 0), (b"aabbccd", 1), (b"aabbc", 1), (b"aabbxxd", 3), (b"xa", 2)]
)
def test_only_what_follows_the_common_beginning_is_hashed(text, hashed):
    with patch("proxy.protocols.json_texts._PIECE_BYTES", 2):
        before = read_long(b"aabbcc", None)
        with patch("proxy.protocols.json_texts.most_weight", side_effect=most_weight) as counted:
            read_long(text, before)

    assert sum(len(call.args[0]) for call in counted.call_args_list) == hashed


@pytest.mark.parametrize(
    ("text", "fresh"), [(b"aabbccdd", 2), (b"aabbcc", 0), (b"aabbxxdd", 8), (b"aabb", 4), (b"aabbccddddd", 11)]
)
def test_a_text_is_fresh_after_the_text_before_if_that_is_its_beginning(text, fresh):
    """A text of more than 10 bytes is fresh as a whole here."""
    with (
        patch("proxy.protocols.json_texts._PIECE_BYTES", 2),
        patch("proxy.protocols.json_texts._LIGHT_BYTES", 10),
    ):
        assert fresh_bytes(text, read_long(b"aabbcc", None)) == fresh


def test_a_text_after_one_of_many_values_is_fresh_as_a_whole():
    """Parsing it takes as long as parsing a longer text, even if its beginning is known."""
    before = b"[" * 2**16

    assert len(before) + 1 == fresh_bytes(before + b"[", read_long(before, None))


PATH = "/v1/chat/completions"
CASSETTES = [
    cassette
    for cassette in (*dialect_cassettes(), *dialect_cassettes("sglang"), *http_cassettes("llamacpp"))
    if cassette.path == PATH
]
INJECTED = ("return_token_ids", "logprobs", "top_logprobs", "return_meta_info")
PLAN = plan_of(PATH, {"model": "m", "messages": [{"role": "user", "content": "hi"}]})

IDS = st.lists(st.integers(0, 200_000), max_size=6).map(lambda ids: orjson.dumps(ids).decode()) | st.sampled_from(
    [
        "null",
        "[1, 2]",
        "[true]",
        "[1.0]",
        "[-1]",
        "[2147483648]",
        '["1"]',
        "[[1],2]",
        "[01]",
        "[1,]",
        "{}",
        "[null]",
        "[1e0]",
    ]
)
TOKENS = st.sampled_from(
    ['"a"', '"]"', '"}"', '"token_id:7"', '"token_id:1"', '"\\ud800"', '"é"', "null", '"\\"token_ids\\":[3]"']
)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False).map(repr) | st.sampled_from(
    ["0", "-1e400", "null", "true", "NaN"]
)
ENTRIES = st.builds(
    '{{"token":{},"logprob":{},"bytes":[1],"top_logprobs":[]}}'.format, TOKENS, NUMBERS
) | st.sampled_from(['{"token":"a"}', "{}", "1"])  # fmt: skip
LOGPROBS = st.lists(ENTRIES, max_size=4).map(lambda entries: f'{{"content":[{",".join(entries)}]}}') | st.sampled_from(
    ["null", '{"content":null}', '{"content":[],"refusal":null}', "{}"]
)
TEXTS = st.sampled_from(["", "a", '\\"prompt_token_ids\\":[1]', '"},"token_ids":[5],"x":{"y":"', "\\ud800", "é"])


@st.composite
def bodies(draw):
    """Draw a response as vLLM writes it, or nearly so."""
    order = draw(st.permutations(["logprobs", "finish_reason", "token_ids"])) if draw(st.integers(0, 5)) == 0 else None
    values = {"logprobs": draw(LOGPROBS), "finish_reason": '"stop"', "token_ids": draw(IDS)}
    fields = ",".join(f'"{name}":{values[name]}' for name in order or values)
    choice = f'{{"index":0,"message":{{"role":"assistant","content":"{draw(TEXTS)}"}},{fields},"stop_reason":null}}'
    choices = ",".join([choice] * draw(st.sampled_from([1, 1, 1, 2, 0])))
    prompt = draw(st.sampled_from(['"prompt_token_ids":%s', '"x":{"prompt_token_ids":%s}', '"y":%s'])) % draw(IDS)
    usage = '"usage":{"prompt_tokens":2,"completion_tokens":2,"total_tokens":4}'
    parts = [f'"choices":[{choices}]', prompt, usage]
    return f'{{"id":"c","model":"m",{",".join(draw(st.permutations(parts)))}}}'.encode()


def as_a_whole():
    """Parse each response as a whole."""
    return (
        patch.object(response, "read_lists", lambda *args, **named: None),
        patch.object(whole_response, "read_lists", lambda *args, **named: None),
    )


def outcome(body, prompt=None):
    """Return what the client receives, and the step."""
    exchange = Exchange(PLAN, 200, "application/json", prompt=prompt)
    exchange.response.feed(body)
    found = exchange.finish(Timing(received=1.0))
    return found.end, found.status, repr(found.step)


@given(bodies(), st.lists(st.integers(0, 200_000), max_size=4))
def test_lists_that_are_parsed_apart_equal_the_lists_of_the_whole(body, ids):
    """For all values of the engine, and for all prompts of the call before."""
    text = orjson.dumps(ids)[1:-1]
    whole, streamed = as_a_whole()
    with whole, streamed:
        expected = outcome(body)

    assert outcome(body) == outcome(body, KnownPrompt(text, pack_ids(ids))) == expected


@given(bodies(), st.lists(st.integers(0, 200_000), max_size=4))
def test_the_weight_of_a_response_does_not_depend_on_the_known_prompt(body, ids):
    """It is the weight of all characters, and at most a comma more; the bytes of the known prompt are not parsed."""
    known = KnownPrompt(orjson.dumps(ids)[1:-1], pack_ids(ids))
    received = Exchange(PLAN, 200, "application/json").response
    for half in (body[: len(body) // 2], body[len(body) // 2 :]):
        received.feed(half)
    repeated = received.repeat(known)

    assert repeated == (len(known.text) if b'"prompt_token_ids":[' + known.text in body else 0)
    assert 0 <= received.weight() - 2 * len(body) - most_weight(body) <= WEIGHTS[b","]
    assert outcome(body) == outcome(body, known)


@of_each(CASSETTES)
def test_recorded_responses_have_the_step_of_the_whole(cassette):
    """Streamed or not, for a client that requested the lists and for one that did not."""
    whole, streamed = as_a_whole()
    reads = cut(cassette.response, [5000] * 20)
    for body in (cassette.body, {key: value for key, value in cassette.body.items() if key not in INJECTED}):
        plan = plan_of(cassette.path, body, kind=cassette.kind)
        with whole, streamed:
            expected = play(plan, cassette, reads)
        assert repr(expected) == repr(play(plan, cassette, reads))


def test_the_lists_of_a_usual_response_are_parsed_apart():
    """Logprobs and ids are arrays, and the rest is JSON."""
    (cassette,) = [cassette for cassette in CASSETTES if cassette.name == "pairs_hermes/chat_eos_n_inj"]
    parsed, prompt = read_lists(cassette.response, None)
    expected = orjson.loads(cassette.response)

    assert expected["prompt_token_ids"] == parsed["prompt_token_ids"].tolist() == prompt.ids.tolist()
    assert expected["choices"][0]["token_ids"] == parsed["choices"][0]["token_ids"].tolist()
    assert (
        pack_logprobs([entry["logprob"] for entry in expected["choices"][0]["logprobs"]["content"]])
        == parsed["choices"][0]["logprobs"]["token_logprobs"]
    )


@pytest.mark.parametrize(
    ("known", "text", "is_parsed"),
    [
        ("1,2", "1,2", 0),
        ("1,2", "1,2,3", 1),
        ("1,2", "1,23", 1),
        ("1,2", "1", 1),
        ("", "1", 1),
        ("", "", 0),
        ("1", "2,1", 1),
    ],
)
def test_a_prompt_that_begins_with_the_known_one_has_its_ids(known, text, is_parsed):
    """Only the rest of it is parsed."""
    before = KnownPrompt(known.encode(), pack_ids(orjson.loads(f"[{known}]")))
    with patch("proxy.protocols.json_texts.pack_numbers", side_effect=pack_ids) as parse:
        _, found = read_lists(b'{"prompt_token_ids":[%b]}' % text.encode(), before)

    assert orjson.loads(f"[{text}]") == found.ids.tolist()
    assert parse.call_count == is_parsed


@pytest.mark.parametrize("size", [1, 5, 20, 1000])
@given(text=st.text('1234567890,- e.tru["', max_size=60) | IDS)
def test_a_long_list_is_parsed_in_parts_as_the_whole(size, text):
    """Wherever it is cut; a text that is no list of ids is not read."""
    text = text.replace("[", "").replace("]", "").encode()
    body = b'{"prompt_token_ids":[%b]}' % text
    whole = read_lists(body, None)
    with patch("proxy.protocols.json_texts._PARSED_BYTES", size):
        found = read_lists(body, None)

    assert repr(whole) == repr(found)


def test_a_second_key_is_found_around_a_known_prompt():
    """Such a response is parsed as a whole."""
    known = KnownPrompt(b"1,2", pack_ids([1, 2]))
    key = b'"prompt_token_ids":[1,2]'

    for body in (
        b"{%b,%b}" % (key, key),
        b'{"a":{%b},%b}' % (key, key),
        b'{"prompt_token_ids":["prompt_token_ids":[1,2]]}',
    ):
        assert read_lists(body, known) is None


@pytest.mark.parametrize("text", ["1,2,", "1,2, ", "1,2,,3", "1,2,x", "1,2 3"])
def test_a_prompt_that_is_no_json_after_the_known_one_is_not_read(text):
    """The general path reports it."""
    known = KnownPrompt(b"1,2", pack_ids([1, 2]))

    assert read_lists(b'{"prompt_token_ids":[%b]}' % text.encode(), known) is None


@pytest.mark.parametrize("rules", [{}, {"token_ids": True}, {"logprobs": True}])
def test_lists_that_the_client_receives_are_parsed_with_the_rest(rules):
    view = ClientView(DIALECTS[PATH], ENGINES["vllm"], StripRules(**rules), 1)

    assert not view.hides_lists


@given(st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(0, 3), max_size=6))
def test_ids_have_the_same_json_for_any_known_ids(ids, known):
    packed = pack_ids(ids)
    text = orjson.dumps(ids)[1:-1]

    before = KnownPrompt(orjson.dumps(known)[1:-1], pack_ids(known))
    for found in (prompt_of(packed, None), prompt_of(packed, before), prompt_of(packed, KnownPrompt(text, packed))):
        assert (found.text, found.ids.tolist()) == (text, ids)
