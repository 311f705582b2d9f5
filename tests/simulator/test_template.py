"""The chat template, markers of templates, and the tool calls of earlier turns."""

import pytest

from proxy.simulator.errors import RequestError
from proxy.simulator.prompts import text_to_tokenize
from proxy.simulator.template import (
    BOS,
    call_text,
    content_text,
    markers_of,
    prepare_for_sglang,
    prepare_for_vllm,
    render,
    to_json,
    uses_bos,
)

USER = {"role": "user", "content": "Hi"}
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def test_each_message_is_between_its_tokens():
    """A message begins with its role and ends with a token; the prompt ends where the assistant's turn begins, if at all.

    With continue_final_message it ends inside the last message.
    """
    user, turn = "<|im_start|>user\nHi<|im_end|>\n", "<|im_start|>assistant\n"
    prefilled = [USER, {"role": "assistant", "content": "Good"}]

    assert render([{"role": "system", "content": "Be kind."}, USER]) == (
        f"<|im_start|>system\nBe kind.<|im_end|>\n{user}{turn}"
    )
    assert render([USER], add_generation_prompt=False) == user
    assert render(prefilled, add_generation_prompt=False, continue_final_message=True) == f"{user}{turn}Good"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("a", "a"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, "c"], "a\nb\nc"),
        ([], ""),
    ],
)
def test_content_has_three_forms(content, text):
    """Content is a string, a list of text parts, or null."""
    assert text == content_text(content)


@pytest.mark.parametrize("content", [3, {"text": "a"}, [{"type": "image_url"}], [4]])
def test_other_content_is_an_error(content):
    """Content other than text is a 400 error."""
    with pytest.raises(RequestError) as error:
        content_text(content)

    assert error.value.status == 400


@pytest.mark.parametrize("first", [[], [{"role": "system", "content": "Be kind."}]])
def test_tools_are_in_the_system_message(first):
    """Each tool is one line of JSON in the system message, which is added if there is none."""
    prompt = render([*first, USER], tools=[TOOL, TOOL])

    assert prompt.startswith("<|im_start|>system\n")
    assert prompt.count("<|im_start|>system") == 1
    assert prompt.count("\n" + to_json(TOOL)) == 2


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_tool_calls_are_written_as_the_model_writes_them(arguments):
    """A tool call in the messages is rendered as a sampled call is, with arguments as a string or an object."""
    call = {"function": {"name": "f", "arguments": arguments}}
    prompt = render([USER, {"role": "assistant", "content": None, "tool_calls": [call]}])

    assert "assistant\n" + call_text("f", {"a": 1}) + "<|im_end|>" in prompt
    assert call_text("f", {"a": 1}) == '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def test_consecutive_tool_results_are_merged():
    """Consecutive tool results are one user message; later ones are another."""
    result = {"role": "tool", "content": "sunny"}
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    prompt = render([USER, called, result, result, called, result])
    wrapped = "<tool_response>\nsunny\n</tool_response>"

    assert prompt.count(f"<|im_start|>user\n{wrapped}\n{wrapped}<|im_end|>") == 1
    assert prompt.count(f"<|im_start|>user\n{wrapped}<|im_end|>") == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"content": "<think>Hm.</think>Yes"},
        {"content": "Yes", "reasoning": "Hm."},
        {"content": "Yes", "reasoning_content": "Hm."},
    ],
)
def test_earlier_reasoning_is_omitted(fields):
    """Reasoning is kept after the last user message, and omitted before it."""
    turn = {"role": "assistant", **fields}
    result = {"role": "tool", "content": "sunny"}

    assert "<think>Hm.</think>Yes" in render([USER, turn, result])
    assert "<|im_start|>assistant\nYes<|im_end|>" in render([USER, turn, USER])


def test_disabled_reasoning_adds_an_empty_block():
    """With `enable_thinking` false, and only then, the prompt ends in an empty reasoning block."""
    assert render([USER], enable_thinking=False).endswith("assistant\n<think>\n\n</think>\n\n")
    assert render([USER], enable_thinking=True) == render([USER])


def test_the_next_turn_extends_the_prompt():
    """The prompt of the next turn begins with the earlier prompt and the reply."""
    reply = "Good day.\n"
    after = render([USER, {"role": "assistant", "content": reply}, USER])

    assert after.startswith(render([USER]) + reply + "<|im_end|>")


def test_json_is_formatted_as_python_does():
    """JSON has a space after each comma and colon, unescaped letters, and Python's form of numbers."""
    assert to_json({"a": [1, None, True], "b": {"é": 1.5}}) == '{"a": [1, null, true], "b": {"é": 1.5}}'
    assert to_json([1e22, 1e-5, 10**30, float("inf")]) == f"[1e+22, 1e-05, {10**30}, Infinity]"


EOS = "<|im_end|>"


MARKERS = """
<|eot_id|> <|tool_call> <tool_call|> <\uff5cUser\uff5c> <\uff5ctool\u2581sep\uff5c>
<sop> </arg_key> <atem:invoke> [INST] [/INST] [TOOL_CALLS]
"""


@pytest.mark.parametrize("marker", MARKERS.split())
def test_a_marker_is_found(marker):
    """Bars beside brackets, tags without attributes and upper-case names in square brackets are markers."""
    assert markers_of(f"{{{{ 'a{marker}b' }}}}{{% if x %}}{marker}{{% endif %}}", EOS) == [marker]


@pytest.mark.parametrize(
    "text",
    ["{{ a < b > c }}", "{{ '<|' + role + '|>' }}", "<function=f>", "{# <|x|> #}", "{{ x[1:] }}", "[a]", "[A]", "{{ a[B] }}"],
)  # fmt: skip
def test_other_text_is_no_marker(text):
    """Comparisons, slices, comments, and markers that a template composes have no single token."""
    assert markers_of(text, EOS) == []


def test_markers_are_listed_once_without_the_tokens_of_every_model():
    """Each marker is listed once, in the order of the template; the tokens of ChatML are there anyway."""
    assert markers_of("<b><a><b><|im_start|><think>", EOS) == ["<b>", "<a>"]


def test_a_template_that_names_bos_or_eos_writes_them():
    """The variables `bos_token` and `eos_token` have markers as values."""
    assert markers_of("{{ bos_token }}x{{ eos_token }}", "</s>") == [BOS, "</s>"]
    assert markers_of("{# bos_token #}{{ eos_token }}", EOS) == []
    assert uses_bos("{{ bos_token }}")
    assert not uses_bos("{# bos_token #}")


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

    assert prepared(prepare, with_call(arguments)) == {"a": 1, "b": "ø"}
    assert '"arguments": {"a": 1, "b": "ø"}}\n</tool_call>' in text


@pytest.mark.parametrize("arguments", ["", '{"a": 1, "b": "cu', "nothing", "[]", "4", "null", '"a"', "NaN"])
def test_vllm_replaces_other_arguments_by_an_empty_object(arguments):
    """Invalid JSON, as in a truncated call, and JSON other than an object become `{}`."""
    assert prepared(prepare_for_vllm, with_call(arguments)) == {}


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

    assert error.value.status == 400


@pytest.mark.parametrize("arguments", ["", '{"a": 1, "b": "cu', "NaN", "[]", "4", "null"])
def test_sglang_rejects_arguments_other_than_an_object(arguments):
    """Arguments that are not a JSON object, as in a truncated call, are an error in every later turn."""
    with pytest.raises(RequestError, match="must be (valid JSON|a JSON object)") as error:
        prepare_for_sglang([USER, with_call(arguments)])

    assert (error.value.status, error.value.kind) == (400, "BadRequest")


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

    assert prepare([message, other]) == [message, other]


def test_a_lone_surrogate_is_an_error():
    """A lone surrogate, which JSON can contain, is an error of the tokenizer."""
    with pytest.raises(RequestError, match="TextEncodeInput"):
        text_to_tokenize({"messages": [USER, with_call('{"a": "\\ud800"}')]})
