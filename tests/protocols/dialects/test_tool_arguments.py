"""Arguments of tool calls: text in chat, objects in the Messages API."""

import json

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects.tool_arguments import (
    PartialObject,
    SampledCalls,
    call_ids,
    is_same,
    parse_arguments,
    serialize,
)


def call(arguments, call_id="c1", name="f"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": 1}', {"a": 1}), ("", {}), ('{"a": "cut o', {}), ("false", {}), ('"{}"', {}), ('{"a":1} x', {"a": 1})],
)
def test_argument_text_becomes_an_object(arguments, expected):
    """Of invalid JSON, the complete fields are kept."""
    assert expected == parse_arguments(arguments)


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
    assert '{"a": [1, 2.0], "é": "\\n"}' == serialize({"a": [1, 2.0], "é": "\n"}, "input")


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
    assert text == restored(orjson.loads(orjson.dumps(parse_arguments(text))), "f", call(text)["function"])


def test_arguments_that_the_agent_changed_are_serialized():
    """Arguments of another function, and of unknown calls, are serialized, too."""
    assert '{"a": 2}' == restored({"a": 2}, "f", call('{"a":1}')["function"])
    assert '{"a": 1}' == restored({"a": 1}, "g", call('{"a":1}')["function"])
    assert '{"a": 1}' == restored({"a": 1}, "f", None)
    assert '{"a": 1}' == restored({"a": 1}, "f", {"name": "f", "arguments": {}})
    assert '{"a": 1}' == restored({"a": 1}, "f", {"name": "f"})


def test_tool_calls_keep_their_ids():
    """A missing or duplicate one is replaced by one derived from the step."""
    calls = [{"id": "a"}, {"id": None}, {}, {"id": "a"}, {"id": ""}, {"id": "b"}]

    assert ["a", "toolu_s_1", "toolu_s_2", "toolu_s_3", "toolu_s_4", "b"] == call_ids(calls, "s")


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
