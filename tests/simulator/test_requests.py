"""What clients may ask, and what is refused."""

import pytest

from proxy.simulator.errors import RefusedError
from proxy.simulator.options import Options
from proxy.simulator.requests import ids_to_detokenize, new_version, read_chat, read_common, read_completions

MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def refusal(read, *arguments) -> dict:
    with pytest.raises(RefusedError) as refused:
        read(*arguments)
    return refused.value.body["error"]


def test_nothing_needs_to_be_asked():
    """Every shared field has a default, null stands for it, and fields that nobody knows are ignored."""
    common = read_common({"n": None, "temperature": None, "no_such_field": 1}, Options())

    assert common.samples == 1
    assert common.stops == ()
    assert not common.include_usage


@pytest.mark.parametrize(("stop", "stops"), [("a", ("a",)), (["a", "b"], ("a", "b")), ([], ())])
def test_stops_are_one_or_several(stop, stops):
    """Stop strings come alone or in a list."""
    assert stops == read_common({"stop": stop}, Options()).stops


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
    """A value out of bounds, or of another type, is refused, and the refusal names the field."""
    assert param == refusal(read_common, body, Options())["param"]


def test_another_model_is_refused_if_names_are_strict():
    """An unknown model is refused only by an engine that is strict; a missing one never is."""
    strict = Options(strict_models=True)

    assert refusal(read_common, {"model": "x"}, strict)["code"] == 404
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
    """What chat cannot do is refused, and the refusal names the field."""
    assert param == refusal(read_chat, {"messages": MESSAGES, **body})["param"]


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
def test_tools_are_offered_by_choice(choice, named, offered):
    """`tool_choice` names a tool, demands or forbids one; none of it leaves the choice to the model."""
    chat = read_chat({"messages": MESSAGES, "tools": [TOOL], "tool_choice": choice})

    assert named == chat.named_tool
    assert offered == len(chat.functions)


@pytest.mark.parametrize(("kwargs", "thinking"), [(None, None), ({}, None), ({"enable_thinking": 0}, False)])
def test_thinking_may_be_left_open(kwargs, thinking):
    """Whether to think is taken from the template's arguments, and may be left open."""
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
    """A prompt is a text or ids, and there may be several."""
    assert prompts == read_completions({"prompt": prompt}).prompts


def test_completions_fields_have_their_bounds():
    """Too many logprobs and negative ids are refused."""
    assert refusal(read_completions, {"prompt": "a", "logprobs": 21})["param"] == "logprobs"
    assert refusal(read_completions, {"prompt": [-1]})["param"] == "body.prompt.0"


@pytest.mark.parametrize(
    ("read", "body"),
    [
        (ids_to_detokenize, {"tokens": "1"}),
        (ids_to_detokenize, {"tokens": ["1"]}),
        (new_version, {}),
        (new_version, {"new_version": 3}),
    ],
)
def test_what_cannot_be_read_is_refused(read, body):
    """A body without what it must have is refused."""
    with pytest.raises(RefusedError) as refusal:
        read(body)

    assert refusal.value.status == 400


def test_ids_and_labels_are_read():
    """Ids and the label of the weights are taken as they are."""
    assert ids_to_detokenize({"tokens": [1, 2]}) == [1, 2]
    assert new_version({"new_version": "step-2"}) == "step-2"
