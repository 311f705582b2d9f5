"""Tool calls of earlier turns, as vLLM 0.32 and SGLang 0.5.23 prepare them for the chat template."""

import pytest

from proxy.simulator.errors import RequestError
from proxy.simulator.prompts import text_to_tokenize
from proxy.simulator.template import prepare_for_sglang, prepare_for_vllm

USER = {"role": "user", "content": "Hi"}


def with_call(arguments, **call):
    """A message with one tool call."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}, **call}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def prepared(prepare, message):
    """The arguments of a message's call after `prepare`."""
    _, message = prepare([USER, message])
    (call,) = message["tool_calls"]
    return call["function"]["arguments"]


@pytest.mark.parametrize("arguments", ['{"a":1,"b":"\\u00f8"}', ' {"a" : 1,\n"b":"ø"} '])
@pytest.mark.parametrize("prepare", [prepare_for_vllm, prepare_for_sglang])
def test_the_template_gets_an_object(prepare, arguments):
    """The prompt has a call's arguments in the format of `json.dumps`, however they are formatted in the request."""
    text = text_to_tokenize({"messages": [USER, with_call(arguments)]}, prepare)

    assert {"a": 1, "b": "ø"} == prepared(prepare, with_call(arguments))
    assert '"arguments": {"a": 1, "b": "ø"}}\n</tool_call>' in text


@pytest.mark.parametrize("arguments", ["", '{"a": 1, "b": "cu', "nothing", "[]", "4", "null", '"a"', "NaN"])
def test_vllm_replaces_other_arguments_by_an_empty_object(arguments):
    """Invalid JSON, such as that of a truncated call, and JSON other than an object become `{}`."""
    assert {} == prepared(prepare_for_vllm, with_call(arguments))


@pytest.mark.parametrize(
    "message",
    [
        with_call({"a": 1}),
        with_call(None),
        with_call("{}", id=None),
        with_call("{}", type="other"),
        with_call("{}", type="custom"),
        with_call("{}", function="f"),
        with_call("{}", function={"arguments": "{}"}),
        with_call('{"a": ' + "1" * 5_000 + "}"),
        {**USER, "role": "assistant", "tool_calls": "f"},
        {**USER, "role": "assistant", "tool_calls": ["f"]},
    ],
)
def test_vllm_rejects_invalid_tool_calls(message):
    """A call needs an id, the type function, a name and arguments that are a string."""
    with pytest.raises(RequestError) as error:
        prepare_for_vllm([USER, message])

    assert 400 == error.value.status


@pytest.mark.parametrize("arguments", ["", '{"a": 1, "b": "cu', "NaN", "[]", "4", "null"])
def test_sglang_rejects_arguments_other_than_an_object(arguments):
    """Arguments that are not a JSON object, such as those of a truncated call, are an error in every later turn."""
    with pytest.raises(RequestError, match="must be (valid JSON|a JSON object)") as error:
        prepare_for_sglang([USER, with_call(arguments)])

    assert (400, "BadRequest") == (error.value.status, error.value.kind)


@pytest.mark.parametrize("arguments", [{"a": 1}, None])
def test_sglang_accepts_objects_and_null(arguments):
    """Arguments that are an object or null reach the template unchanged; a call needs no id."""
    assert arguments == prepared(prepare_for_sglang, with_call(arguments, id=None))


@pytest.mark.parametrize("calls", [None, []])
@pytest.mark.parametrize("prepare", [prepare_for_vllm, prepare_for_sglang])
def test_a_message_without_calls_is_unchanged(prepare, calls):
    """Null, an empty list, and `tool_calls` of a user message are ignored."""
    message = {"role": "assistant", "content": "Hi", "tool_calls": calls}
    other = {"role": "user", "content": "Hi", "tool_calls": "f"}

    assert [message, other] == prepare([message, other])


def test_a_lone_surrogate_is_an_error():
    """A lone surrogate, which JSON can contain, is an error of the tokenizer."""
    with pytest.raises(RequestError, match="TextEncodeInput"):
        text_to_tokenize({"messages": [USER, with_call('{"a": "\\ud800"}')]})
