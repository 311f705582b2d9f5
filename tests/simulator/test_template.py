"""The chat template."""

import pytest

from proxy.simulator.errors import RequestError
from proxy.simulator.template import call_text, content_text, render, to_json

USER = {"role": "user", "content": "Hi"}
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def test_each_message_is_between_its_tokens():
    """A message begins with its role and ends with a token; the prompt ends where the assistant's turn begins."""
    prompt = render([{"role": "system", "content": "Be kind."}, USER])

    assert prompt == ("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_the_generation_prompt_can_be_disabled():
    """Without the generation prompt, the prompt ends with the last message."""
    assert render([USER], add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_the_last_message_can_be_continued():
    """With continue_final_message the prompt ends inside the last message."""
    messages = [USER, {"role": "assistant", "content": "Good"}]
    prompt = render(messages, add_generation_prompt=False, continue_final_message=True)

    assert prompt.endswith("<|im_start|>assistant\nGood")


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
