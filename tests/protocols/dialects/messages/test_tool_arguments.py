"""Arguments: texts as sampled, objects as told."""

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects.messages.partial_json import PartialObject
from proxy.protocols.dialects.messages.tool_arguments import (
    call_ids,
    is_same,
    parse_arguments,
    restored,
    serialize,
    tool_call_ids,
    unrestorable_calls,
)


def call(arguments, told="c1", name="f"):
    return {"id": told, "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": 1}', {"a": 1}), ("", {}), ('{"a": "cut o', {}), ("false", {}), ('"{}"', {}), ('{"a":1} x', {"a": 1})],
)
def test_a_text_is_told_as_an_object(arguments, expected):
    """What is none by itself, as what came whole of it."""
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
def test_a_text_is_told_whole_as_it_is_streamed(text):
    """By the quick way, and by the one that streams go."""
    beginning = PartialObject()
    told = beginning.feed(text)

    assert parse_arguments(text) == orjson.loads(beginning.whole(told))


def test_an_object_is_spelt_as_python_spells_it():
    """As vLLM's and SGLang's parsers of tool calls write it, and as models are trained on it."""
    assert '{"a": [1, 2.0], "é": "\\n"}' == serialize({"a": [1, 2.0], "é": "\n"}, "input")


def test_an_object_that_is_too_deep_is_refused():
    """It would not be sent on either."""
    deep = orjson.loads('{"a":' + "[" * 1000 + "]" * 1000 + "}")

    with pytest.raises(UnprocessableRequest, match="^input: is nested too deeply"):
        serialize(deep, "input")


@pytest.mark.parametrize(
    "text", ['{"a":1}', '{ "a" : 1.0 }', '{"b": 2, "a": 1}', '{"a": 1', "null", '{"a": "\\u00e9"}']
)
def test_a_call_that_comes_back_as_it_was_told_has_its_sampled_text(text):
    """Whatever its spelling, and whether it is an object or not."""
    assert text == restored(orjson.loads(orjson.dumps(parse_arguments(text))), "f", call(text), "input")


def test_a_call_that_the_agent_changed_is_what_the_agent_says():
    """By another value, or by another name; and so is one that nobody knows."""
    assert '{"a": 2}' == restored({"a": 2}, "f", call('{"a":1}'), "input")
    assert '{"a": 1}' == restored({"a": 1}, "g", call('{"a":1}'), "input")
    assert '{"a": 1}' == restored({"a": 1}, "f", None, "input")
    assert '{"a": 1}' == restored({"a": 1}, "f", {"function": {"name": "f", "arguments": {}}}, "input")
    assert '{"a": 1}' == restored({"a": 1}, "f", {"function": "f"}, "input")


def test_only_what_reading_could_not_give_back_is_kept():
    """Calls whose text is spelt as usual need nobody to remember them."""
    message = {"tool_calls": [call('{"a": 1}', "c1"), call('{"a":1}', "c2"), call('{"a": "cut', "c1"), call("", "c4")]}

    assert {
        "c2": {"function": {"name": "f", "arguments": '{"a":1}'}},
        "toolu_s_2": {"function": {"name": "f", "arguments": '{"a": "cut'}},
        "c4": {"function": {"name": "f", "arguments": ""}},
    } == unrestorable_calls(message, "s")
    assert {} == unrestorable_calls({"content": "x"}, "s")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": 1},
        {"messages": [1, {}, {"content": "x"}, {"content": [1, {"type": "text"}, {"type": "tool_use", "id": 7}]}]},
    ],
)
def test_a_body_without_calls_names_none(body):
    """Whatever it is: it has not been read yet."""
    assert frozenset() == tool_call_ids(body)


def test_a_body_names_the_calls_of_its_replies():
    """To look them up before it is read."""
    blocks = [
        {"type": "tool_use", "id": "a"},
        {"type": "tool_result", "tool_use_id": "b"},
        {"type": "tool_use", "id": "c"},
    ]

    assert {"a", "c"} == tool_call_ids({"messages": [{"role": "assistant", "content": blocks}]})


def test_calls_are_told_by_their_own_ids():
    """Where one has none, or another's, it gets one of its step."""
    calls = [{"id": "a"}, {"id": None}, {}, {"id": "a"}, {"id": ""}, {"id": "b"}]

    assert ["a", "toolu_s_1", "toolu_s_2", "toolu_s_3", "toolu_s_4", "b"] == call_ids(calls, "s")


@pytest.mark.parametrize(
    ("one", "other", "same"),
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
def test_values_of_json_are_the_same_or_not(one, other, same):
    """JavaScript writes 1.0 as 1; Go sorts keys; nobody makes true of 1."""
    assert same is is_same(one, other)


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
def test_an_object_is_the_same_as_itself_read_again(given):
    """However it is spelt."""
    assert is_same(given, orjson.loads(orjson.dumps(given)))
    assert is_same(given, parse_arguments(serialize(given, "input")))
