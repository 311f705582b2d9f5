"""What translators share: checks of values, chat fields, delayed pieces and tool arguments."""

import json

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jiter import from_json

from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects import translation as checked
from proxy.protocols.dialects.translation import (
    TEXT,
    HeldPieces,
    PartialObject,
    SampledCalls,
    Usage,
    a_text,
    an_object,
    at,
    call_ids,
    event,
    is_same,
    objects,
    optional,
    parse_arguments,
    read_usage,
    reasoning_of,
    required,
    serialize,
    snake_case,
    texts,
)

OF_TYPES = {"null": None, "a boolean": True, "a number": 1.5, "a string": "x", "a list": [], "an object": {}}
ACCEPTED = {
    checked.a_text: {"a string"},
    checked.a_list: {"a list"},
    checked.an_object: {"an object"},
    checked.a_number: {"a number"},
    checked.a_count: set(),
    checked.a_flag: {"a boolean"},
}


@pytest.mark.parametrize("reading", ACCEPTED, ids=["text", "list", "object", "number", "count", "flag"])
@pytest.mark.parametrize("kind", OF_TYPES)
def test_a_value_of_another_type_raises_with_its_path(reading, kind):
    if kind in ACCEPTED[reading]:
        assert OF_TYPES[kind] is reading(OF_TYPES[kind], "here.0")
        return
    with pytest.raises(UnprocessableRequest, match=rf"^here\.0: must be .*, not {kind}$") as raised:
        reading(OF_TYPES[kind], "here.0")
    assert raised.value.param == "here.0"


def test_an_integer_is_not_a_boolean():
    """In Python, True == 1."""
    assert checked.a_count(3, "n") == 3
    with pytest.raises(UnprocessableRequest):
        checked.a_count(True, "n")


def test_a_value_outside_an_enumeration_raises_with_the_allowed_values():
    """The value in the message is truncated."""
    assert checked.one_of("b", "x", ("a", "b")) == "b"
    with pytest.raises(UnprocessableRequest, match=r"^x: must be one of a, b, not 'c{64}'$"):
        checked.one_of("c" * 999, "x", ("a", "b"))


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("systemInstruction", "system_instruction"),
        ("topK", "top_k"),
        ("parametersJsonSchema", "parameters_json_schema"),
    ],
)
def test_a_field_is_found_by_either_name(name, other):
    """A null is an absent field."""
    assert snake_case(name) == other
    assert at({name: 1}, name) == at({other: 1, name: None}, name) == (1, name)
    assert at({name: None}, name, "a") == (None, f"a.{name}")


def test_a_field_with_both_names_is_rejected():
    with pytest.raises(UnprocessableRequest, match="a.topK: is present twice, also as top_k"):
        at({"topK": 1, "top_k": 1}, "topK", "a")


def test_an_optional_field_may_be_absent_and_a_required_one_may_not():
    """Both are checked if they are present."""
    assert (optional(a_text, {}, "a"), optional(a_text, {"a": "x"}, "a")) == (None, "x")
    with pytest.raises(UnprocessableRequest, match="b.a: must be a string, not a number"):
        optional(a_text, {"a": 1}, "a", "b")
    with pytest.raises(UnprocessableRequest, match="b.a: must be a string, not null"):
        required(a_text, {}, "a", "b")


def test_the_entries_of_a_list_have_its_path():
    assert objects([{"a": 1}], "p") == [({"a": 1}, "p[0]")]
    assert texts(["", "x"], "p") == ["", "x"]


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda: optional(checked.a_count, {"a": True}, "a"), "a: must be an integer, not a boolean"),
        (lambda: optional(checked.a_count, {"a": 1.5}, "a", "b[0]"), "b[0].a: must be an integer, not a number"),
        (lambda: required(an_object, {"a": None}, "a"), "a: must be an object, not null"),
        (lambda: objects([{}, []], "a"), "a[1]: must be an object, not a list"),
        (lambda: texts(["", {}], "a"), "a[1]: must be a string, not an object"),
        (lambda: objects({}, "a"), "a: must be a list, not an object"),
    ],
)
def test_the_error_names_the_path_the_expected_and_the_actual_type(read, message):
    with pytest.raises(UnprocessableRequest) as raised:
        read()

    assert raised.value.message == message
    assert message.partition(":")[0] == raised.value.param


PIECES = st.lists(st.tuples(st.integers(TEXT, 3), st.binary(min_size=1, max_size=2)), max_size=12)


@given(PIECES)
def test_all_that_is_not_of_the_first_call_is_written_at_the_end_call_by_call(pieces):
    """Each piece is written once. The pieces of a call, and of the text, keep the order in which they arrived."""
    held = HeldPieces()
    written = []

    def write(index, data):
        written.append((index, data))
        if held.open_call is None and index != TEXT:
            held.open_call = index
        return data

    before = b"".join([held.take(index, write, index, data) for index, data in pieces])
    shown = len(written)
    calls = held.calls
    after = held.release()

    first = next((index for index, _ in pieces if index != TEXT), TEXT)
    begun = next((place for place, (index, _) in enumerate(pieces) if index != TEXT), len(pieces))
    assert [*pieces[:begun], *(piece for piece in pieces[begun:] if piece[0] == first)] == written[:shown]
    assert sorted(pieces) == sorted(written)
    for index in range(TEXT, 4):
        assert [piece for piece in pieces if piece[0] == index] == [piece for piece in written if piece[0] == index]
    groups = [index for index, _ in written[shown:]]
    assert sorted(groups, key=groups.index) == groups
    assert list(dict.fromkeys(index for index, _ in pieces[begun:] if index not in {TEXT, first})) == calls
    assert b"".join(data for _, data in written) == before + after
    assert held.release() == b""


def test_an_event_has_its_type_in_the_event_line_and_in_its_data():
    assert event("message_stop") == b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    assert event("x", index=1) == b'event: x\ndata: {"type":"x","index":1}\n\n'


def test_token_counts_of_engines_are_read():
    """vLLM and llama.cpp return reasoning tokens in details, SGLang on the top level; invalid counts are 0."""
    counts = {"prompt_tokens": 5, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 3}}

    assert Usage(5, 7, 3, None) == read_usage(counts)
    assert Usage(5, 7, 3, 2) == read_usage(counts | {"reasoning_tokens": 2, "completion_tokens_details": None})
    assert Usage(5, 7, 3, 0) == read_usage(counts | {"completion_tokens_details": {"reasoning_tokens": 0}})
    assert Usage(0, 0, 0, None) == read_usage({"prompt_tokens": True, "prompt_tokens_details": 7}) == read_usage(None)


def test_reasoning_has_the_field_of_the_engine():
    assert [
        reasoning_of(message)
        for message in ({"reasoning": "a", "reasoning_content": "a"}, {"reasoning_content": "b"}, {"reasoning": ""})
    ] == ["a", "b", None]


def call(arguments, call_id="c1", name="f"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": 1}', {"a": 1}), ("", {}), ('{"a": "cut o', {}), ("false", {}), ('"{}"', {}), ('{"a":1} x', {"a": 1})],
)
def test_argument_text_becomes_an_object(arguments, expected):
    """Of invalid JSON, the complete fields are kept."""
    assert parse_arguments(arguments) == expected


@pytest.mark.parametrize(
    "text",
    [
        '{"a": ' + "[" * 120 + "]" * 120 + "}",
        '{"a": ' + "1" * 120 + "}",
        '{"a": "' + "1" * 120 + '{" }',
        '{"a": 1e999}',
        '{"a": 1, "a": "\\ud83d\\ude00"}',
        '{"a": "\\ud83d"}',
        '{"a": {"b": [1, 2.50]}} ',
    ],
)
def test_argument_text_becomes_the_same_object_as_in_a_stream(text):
    beginning = PartialObject()
    forwarded = beginning.feed(text)

    assert parse_arguments(text) == orjson.loads(beginning.whole(forwarded))


def test_an_object_is_serialized_as_python_does():
    """vLLM's and SGLang's tool parsers do so too, and models are trained on it."""
    assert serialize({"a": [1, 2.0], "é": "\n"}, "input") == '{"a": [1, 2.0], "é": "\\n"}'


def test_many_values_are_serialized_like_few():
    """Piece by piece, so that other threads run meanwhile."""
    many = {"a": [1.5, None, "\u00e9\n"] * 10_000}

    assert json.dumps(many, ensure_ascii=False) == serialize(many, "input")


def test_an_object_that_is_nested_too_deeply_is_rejected():
    """The engine would reject it too."""
    deep = orjson.loads('{"a":' + "[" * 1000 + "]" * 1000 + "}")

    with pytest.raises(UnprocessableRequest, match="^input: is nested too deeply"):
        serialize(deep, "input")


def restored(tool_input, name, sampled):
    """Return the arguments of call c1 that the agent sent back; `sampled` is what the history has of the call."""
    return SampledCalls({} if sampled is None else {"c1": sampled}).restored(tool_input, name, "c1", "input")


@pytest.mark.parametrize(
    "text", ['{"a":1}', '{ "a" : 1.0 }', '{"b": 2, "a": 1}', '{"a": 1', "null", '{"a": "\\u00e9"}']
)
def test_unchanged_arguments_get_their_sampled_text(text):
    """Their whitespace is restored, and invalid JSON too."""
    assert restored(orjson.loads(orjson.dumps(parse_arguments(text))), "f", call(text)["function"]) == text


def test_arguments_that_the_agent_changed_are_serialized():
    """Arguments of another function, and of unknown calls, are serialized, too."""
    assert restored({"a": 2}, "f", call('{"a":1}')["function"]) == '{"a": 2}'
    assert restored({"a": 1}, "g", call('{"a":1}')["function"]) == '{"a": 1}'
    assert restored({"a": 1}, "f", None) == '{"a": 1}'
    assert restored({"a": 1}, "f", {"name": "f", "arguments": {}}) == '{"a": 1}'
    assert restored({"a": 1}, "f", {"name": "f"}) == '{"a": 1}'


def test_tool_calls_keep_their_ids():
    """A missing or duplicate one is replaced by one derived from the step."""
    calls = [{"id": "a"}, {"id": None}, {}, {"id": "a"}, {"id": ""}, {"id": "b"}]

    assert call_ids(calls, "s") == ["a", "toolu_s_1", "toolu_s_2", "toolu_s_3", "toolu_s_4", "b"]


@pytest.mark.parametrize(
    ("value", "other", "same"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({"a": 1}, {"a": 1.0}, True),
        ({"a": 1}, {"a": True}, False),
        ({"a": 0}, {"a": None}, False),
        ({"a": [1]}, {"a": [1, 1]}, False),
        ({"a": {}}, {"a": []}, False),
        ({"a": "1"}, {"a": 1}, False),
        ({"a": 1}, {"b": 1}, False),
    ],
)
def test_json_values_are_compared_by_value(value, other, same):
    """JavaScript writes 1.0 as 1 and Go sorts keys; true is not 1."""
    assert same is is_same(value, other)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=25)
@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=3))
def test_an_object_equals_itself_after_serialization(value):
    assert is_same(value, orjson.loads(orjson.dumps(value)))
    assert is_same(value, parse_arguments(serialize(value, "input")))


# Pieces that often form valid JSON, and as often invalid JSON.
SCRAPS = st.sampled_from(
    ["{", "}", "[", "]", ":", ",", '"', '"a"', '"a":', '{"a":', "1", "-", ".", "e", "0", "12", "1e308", "9" * 15, "true",
     "fal", "nul", "l", " ", "\n", "\\", "u", "d83d", "\\ud83d", "\\ude00", "\\u00e9", "é", "😀", "x", "NaN"]
)  # fmt: skip
TEXTS = st.lists(SCRAPS, max_size=9).map("".join) | st.lists(SCRAPS, max_size=9).map(lambda it: '{"a":' + "".join(it))
OBJECTS = st.dictionaries(st.text(max_size=3), VALUES, max_size=3)


def forwarded(pieces) -> str:
    """Return what is forwarded of these pieces; the SDK's parser reads it after each of them."""
    beginning, text = PartialObject(), ""
    for piece in pieces:
        text += beginning.feed(piece)
        read = from_json(text.encode(), partial_mode=True) if text else {}
        assert read == json.loads(beginning.whole(text))  # as jiter reads it: integers of any size
    return text


@settings(max_examples=60)
@given(TEXTS, st.integers(0, 30))
def test_the_forwarded_prefix_is_readable_and_independent_of_the_chunking(text, index):
    """`whole` completes it as the SDK's partial mode does."""
    once = forwarded([text])

    assert text.startswith(once)
    assert once == forwarded(text) == forwarded([text[:index], text[index:]])


@settings(max_examples=30)
@given(OBJECTS, st.integers(0, 99))
def test_an_object_is_forwarded_completely(value, index):
    """Also if it is truncated anywhere."""
    text = orjson.dumps(value).decode()

    assert text == forwarded([text[:index], text[index:]])
    assert text[:index] == forwarded([text[:index]])


@pytest.mark.parametrize(
    ("text", "expected", "whole"),
    [
        ('{"city": "Par', '{"city": "Par', "{}"),
        ('{"a": 1, "b": [2, {"c": tr', '{"a": 1, "b": [2, {"c": tr', '{"a": 1, "b": [2, {}]}'),
        ('{"a": 12', '{"a": 12', '{"a": 12}'),
        ('{"a": 1} and so on', '{"a": 1} ', '{"a": 1}'),
        ('{"a": "two\nlines"}', '{"a": "two', "{}"),
        ('{"a": 1,}', '{"a": 1,', '{"a": 1}'),
        ('{"a": 1e999}', '{"a": 1e99', '{"a": 1e99}'),
        ("[1]", "", "{}"),
        ("false", "", "{}"),
        ("  ", "", "{}"),
        ('  {"a"', '  {"a"', "  {}"),
        ("", "", "{}"),
        ('{"a": ' + "[" * 150, '{"a": ' + "[" * 99, '{"a": ' + "[" * 99 + "]" * 99 + "}"),
        ('{"a": ' + "9" * 150, '{"a": ' + "9" * 100, '{"a": ' + "9" * 100 + "}"),
    ],
)
def test_invalid_json_is_forwarded_up_to_its_last_valid_character(text, expected, whole):
    """`whole` closes it; a value that is no object becomes an empty one."""
    beginning = PartialObject()

    assert beginning.feed(text) == expected
    assert beginning.whole(expected) == whole


def test_a_long_string_is_parsed_once():
    """300,000 characters in 100,000 pieces, without quadratic time."""
    beginning = PartialObject()

    assert beginning.feed('{"a": "') == '{"a": "'
    assert all(beginning.feed("ab\\n") == "ab\\n" for _ in range(100_000))
    assert beginning.feed('"}') == '"}'
    assert not beginning.broken


@pytest.mark.parametrize("pieces", [(" ", "\n", "{", "}"), ("  ", "", '{"a": 1}'), (" ", " x")])
def test_white_space_before_the_object_is_returned_with_it(pieces):
    """However it is split; before anything else than an object it is withheld."""
    parser = PartialObject()
    found = [parser.feed(piece) for piece in pieces]

    assert found[0] == ""
    assert "".join(found) == ("" if "x" in pieces[-1] else "".join(pieces))
