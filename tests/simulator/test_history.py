"""Tool calls of earlier turns, as vLLM 0.32 and SGLang 0.5.23 prepare them for the chat template."""

import pytest

from proxy.simulator.errors import RefusedError
from proxy.simulator.history import prepare_for_sglang, prepare_for_vllm
from proxy.simulator.prompts import text_to_tokenize

USER = {"role": "user", "content": "Hi"}


def said(arguments, **call):
    """A message with one tool call."""
    made = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}, **call}
    return {"role": "assistant", "content": None, "tool_calls": [made]}


def prepared(prepare, message):
    """The arguments that the template is given of a message's call."""
    _, message = prepare([USER, message])
    (call,) = message["tool_calls"]
    return call["function"]["arguments"]


@pytest.mark.parametrize("arguments", ['{"a":1,"b":"\\u00f8"}', ' {"a" : 1,\n"b":"ø"} '])
@pytest.mark.parametrize("prepare", [prepare_for_vllm, prepare_for_sglang])
def test_the_template_sees_an_object_and_no_spelling(prepare, arguments):
    """However a call's arguments were spelled, the prompt has them as `json.dumps` spells them."""
    text = text_to_tokenize({"messages": [USER, said(arguments)]}, prepare)

    assert {"a": 1, "b": "ø"} == prepared(prepare, said(arguments))
    assert '"arguments": {"a": 1, "b": "ø"}}\n</tool_call>' in text


@pytest.mark.parametrize("arguments", ["", '{"a": 1, "b": "cu', "nothing", "[]", "4", "null", '"a"', "NaN"])
def test_vllm_makes_an_empty_object_of_anything_else(arguments):
    """Of no JSON, such as a call that max_tokens cut, and of JSON that is no object."""
    assert {} == prepared(prepare_for_vllm, said(arguments))


@pytest.mark.parametrize(
    "message",
    [
        said({"a": 1}),
        said(None),
        said("{}", id=None),
        said("{}", type="other"),
        said("{}", type="custom"),
        said("{}", function="f"),
        said("{}", function={"arguments": "{}"}),
        said('{"a": ' + "1" * 5_000 + "}"),
        {**USER, "role": "assistant", "tool_calls": "f"},
        {**USER, "role": "assistant", "tool_calls": ["f"]},
    ],
)
def test_vllm_refuses_what_is_no_tool_call(message):
    """A call needs an id, the type function, a name and arguments that are a string of JSON."""
    with pytest.raises(RefusedError) as refusal:
        prepare_for_vllm([USER, message])

    assert 400 == refusal.value.status


@pytest.mark.parametrize("arguments", ["", '{"a": 1, "b": "cu', "NaN", "[]", "4", "null"])
def test_sglang_refuses_arguments_that_are_no_object(arguments):
    """A call that was cut makes every later turn fail there."""
    with pytest.raises(RefusedError, match="must be (valid JSON|a JSON object)") as refusal:
        prepare_for_sglang([USER, said(arguments)])

    assert (400, "BadRequest") == (refusal.value.status, refusal.value.kind)


@pytest.mark.parametrize("arguments", [{"a": 1}, None])
def test_sglang_takes_objects_and_nothing(arguments):
    """They come to the template as they are; a call needs no id there."""
    assert arguments == prepared(prepare_for_sglang, said(arguments, id=None))


@pytest.mark.parametrize("calls", [None, []])
@pytest.mark.parametrize("prepare", [prepare_for_vllm, prepare_for_sglang])
def test_a_message_without_calls_stays_as_it_is(prepare, calls):
    """Null and an empty list are no calls, and only assistants have some."""
    message = {"role": "assistant", "content": "Hi", "tool_calls": calls}
    other = {"role": "user", "content": "Hi", "tool_calls": "f"}

    assert [message, other] == prepare([message, other])


def test_half_a_surrogate_pair_is_refused():
    """JSON can spell what no tokenizer takes."""
    with pytest.raises(RefusedError, match="TextEncodeInput"):
        text_to_tokenize({"messages": [USER, said('{"a": "\\ud800"}')]})
