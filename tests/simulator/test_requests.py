"""Request fields and their bounds."""

import pytest

from proxy.simulator.errors import RequestError
from proxy.simulator.options import Options
from proxy.simulator.requests import ids_to_detokenize, new_version, read_chat, read_common, read_completions

MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def error_from(read, *arguments) -> dict:
    with pytest.raises(RequestError) as error:
        read(*arguments)
    return error.value.body["error"]


def test_every_shared_field_is_optional():
    """Every shared field has a default, which null selects, too; unknown fields are ignored."""
    common = read_common({"n": None, "temperature": None, "no_such_field": 1}, Options())

    assert common.choices == 1
    assert common.stop_strings == ()
    assert not common.include_usage


@pytest.mark.parametrize(("stop", "stops"), [("a", ("a",)), (["a", "b"], ("a", "b")), ([], ())])
def test_stop_is_a_string_or_a_list(stop, stops):
    """`stop` is one string or a list."""
    assert stops == read_common({"stop": stop}, Options()).stop_strings


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 0}, None),
        ({"n": 1_025}, None),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"max_tokens": "many"}, "body.max_tokens"),
        ({"stop_token_ids": ["a"]}, "body.stop_token_ids.0"),
    ],
)
def test_shared_fields_have_their_bounds(body, param):
    """The error for a value that is out of bounds or of the wrong type names the field."""
    assert param == error_from(read_common, body, Options())["param"]


def test_strict_models_rejects_other_models():
    """An unknown model is an error only with `strict_models`; a missing model never is."""
    strict = Options(strict_models=True)

    assert error_from(read_common, {"model": "x"}, strict)["code"] == 404
    assert read_common({}, strict).model is None
    assert read_common({"model": "x"}, Options()).model == "x"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, None),
        ({"messages": ["Hi"]}, "body.messages.0"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "some"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"function": 3}}, "tool_choice"),
        ({"tools": [{}]}, "tools"),
        ({"tools": [{"function": {"name": 3}}]}, "tools"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "logprobs"),
        ({"continue_final_message": True}, None),
    ],
)
def test_chat_fields_have_their_bounds(body, param):
    """The error for an invalid field of chat names the field."""
    assert param == error_from(read_chat, {"messages": MESSAGES, **body})["param"]


@pytest.mark.parametrize(
    ("choice", "named", "offered"),
    [
        (None, None, 1),
        ("auto", None, 1),
        ("required", None, 1),
        ("none", None, 0),
        ({"type": "function", "function": {"name": "f"}}, "f", 1),
    ],
)
def test_tool_choice_selects_the_tools(choice, named, offered):
    """`tool_choice` can name a tool or exclude all; otherwise the model may call any."""
    chat = read_chat({"messages": MESSAGES, "tools": [TOOL], "tool_choice": choice})

    assert named == chat.named_tool
    assert offered == len(chat.functions)


@pytest.mark.parametrize(("kwargs", "thinking"), [(None, None), ({}, None), ({"enable_thinking": 0}, False)])
def test_enable_thinking_is_optional(kwargs, thinking):
    """`enable_thinking` is taken from `chat_template_kwargs`; None if absent."""
    assert thinking == read_chat({"messages": MESSAGES, "chat_template_kwargs": kwargs}).enable_thinking


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2]], [[1], [2]]),
        ([], [[]]),
        (None, [[]]),
    ],
)
def test_prompts_are_texts_or_ids(prompt, prompts):
    """A prompt is a text or ids; a request has one or several."""
    assert prompts == read_completions({"prompt": prompt}).prompts


def test_completions_fields_have_their_bounds():
    """Too many logprobs and negative ids are errors."""
    assert error_from(read_completions, {"prompt": "a", "logprobs": 21})["param"] == "logprobs"
    assert error_from(read_completions, {"prompt": [-1]})["param"] == "body.prompt.0"


@pytest.mark.parametrize(
    ("read", "body"),
    [
        (ids_to_detokenize, {"tokens": "1"}),
        (ids_to_detokenize, {"tokens": ["1"]}),
        (new_version, {}),
        (new_version, {"new_version": 3}),
    ],
)
def test_a_missing_or_wrong_field_is_an_error(read, body):
    """A required field that is missing or of the wrong type is a 400 error."""
    with pytest.raises(RequestError) as error:
        read(body)

    assert error.value.status == 400


def test_ids_and_labels_are_read():
    """Ids and the label of the weights are returned unchanged."""
    assert ids_to_detokenize({"tokens": [1, 2]}) == [1, 2]
    assert new_version({"new_version": "step-2"}) == "step-2"
