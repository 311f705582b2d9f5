"""Lists that are parsed apart: the response has the tokens and the JSON of one that is parsed as a whole."""

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
from proxy.protocols.json_weight import WEIGHTS, most_weight
from proxy.protocols.number_lists import KnownPrompt, prompt_of, read_lists
from proxy.protocols.response import ClientView
from proxy.trajectory.arrays import pack_ids, pack_logprobs
from proxy.trajectory.step import Timing

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
    with patch("proxy.protocols.number_lists.pack_numbers", side_effect=pack_ids) as parse:
        _, found = read_lists(b'{"prompt_token_ids":[%b]}' % text.encode(), before)

    assert orjson.loads(f"[{text}]") == found.ids.tolist()
    assert is_parsed == parse.call_count


@pytest.mark.parametrize("size", [1, 5, 20, 1000])
@given(text=st.text('1234567890,- e.tru["', max_size=60) | IDS)
def test_a_long_list_is_parsed_in_parts_as_the_whole(size, text):
    """Wherever it is cut; a text that is no list of ids is not read."""
    text = text.replace("[", "").replace("]", "").encode()
    body = b'{"prompt_token_ids":[%b]}' % text
    whole = read_lists(body, None)
    with patch("proxy.protocols.number_lists._PARSED_BYTES", size):
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
