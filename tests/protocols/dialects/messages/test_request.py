"""Requests, read as chat calls."""

import copy

import orjson
import pytest
from anthropic_bodies import BODIES
from hypothesis import given, settings
from hypothesis import strategies as st
from json_bodies import JSON

from proxy.errors import UnprocessableRequest
from proxy.protocols.dialects.messages import MESSAGES
from proxy.protocols.dialects.messages.request import PASSED
from proxy.protocols.dialects.translation import ResolvedReferences, TranslationOptions
from proxy.protocols.sampling import SAMPLING_FIELDS

HI = [{"role": "user", "content": "hi"}]
LEAST = {"model": "m", "max_tokens": 9, "messages": HI}
# What this dialect spells in its own way, or has no place for the answers of.
ITS_OWN = {"temperature", "top_p", "top_k", "n", "max_tokens", "max_completion_tokens", "stop", "tool_choice"}
SWITCHES = TranslationOptions(
    thinking={"chat_template_kwargs": {"enable_thinking": True}, "include_reasoning": True},
    not_thinking={"chat_template_kwargs": {"enable_thinking": False}},
)


def read(body, options=TranslationOptions(), **resolved):  # noqa: B008 - frozen
    return MESSAGES.read(body, options, ResolvedReferences(**resolved))


def test_the_least_call():
    """Nothing is added to what was said."""
    assert {"model": "m", "messages": HI, "max_tokens": 9} == read(LEAST)
    assert {"messages": HI} == read({"messages": HI})


def test_how_to_sample():
    """Fields of the dialect under chat's names, and those that engines know beside them."""
    body = {"temperature": 1.0, "top_p": 0.9, "top_k": 5, "stop_sequences": ["\n\n"], "min_p": 0.1, "seed": 7}

    asked = {"temperature": 1.0, "top_p": 0.9, "top_k": 5, "stop": ["\n\n"], "min_p": 0.1, "seed": 7}
    assert LEAST | asked == read(LEAST | body)


def test_every_field_of_sampling_is_passed_or_the_dialects_own():
    """A field that a step records is one that a client of this dialect can set."""
    assert set(SAMPLING_FIELDS) | {"chat_template_kwargs"} == set(PASSED) | ITS_OWN


def test_what_is_unknown_is_not_sent():
    """It is recorded with the body; engines might take it for something of theirs."""
    body = {
        "metadata": {"user_id": "u"},
        "context_management": {"edits": []},
        "output_config": {"task_budget": {"type": "tokens", "total": 1}},
        "service_tier": "auto",
        "return_token_ids": True,
        "logprobs": True,
        "stop": "x",
        "max_completion_tokens": 1,
        "container": None,
        "betas": ["x"],
        "stream": False,
        "stop_sequences": [],
    }

    assert read(LEAST) == read(LEAST | body)


def test_a_stream_tells_its_usage_from_the_beginning():
    """`message_start` has the tokens that came in."""
    chat = read(LEAST | {"stream": True})

    assert (True, {"include_usage": True, "continuous_usage_stats": True}) == (chat["stream"], chat["stream_options"])


@pytest.mark.parametrize(
    ("thinking", "expected", "by_default"),
    [
        (None, {}, {}),
        ({"type": "enabled", "budget_tokens": 1024}, {**SWITCHES.thinking}, {}),
        ({"type": "adaptive"}, {**SWITCHES.thinking}, {}),
        ({"type": "disabled"}, {"reasoning_effort": "none", **SWITCHES.not_thinking}, {"reasoning_effort": "none"}),
    ],
)
def test_thinking_turns_the_engines_switch(thinking, expected, by_default):
    """As vLLM's endpoint does, and as the configuration says."""
    assert read(LEAST) | expected == read(LEAST | {"thinking": thinking}, SWITCHES)
    assert read(LEAST) | by_default == read(LEAST | {"thinking": thinking})


def test_an_effort_is_the_engines():
    """In the same words; where thinking is forbidden it is none, or what the configuration has for that."""
    high = LEAST | {"output_config": {"effort": "high"}}
    forbidden = high | {"thinking": {"type": "disabled"}}
    low = TranslationOptions(thinking={"reasoning_effort": "low"}, not_thinking={"reasoning_effort": "low"})

    assert "high" == read(high)["reasoning_effort"]
    assert "high" == read(high | {"thinking": {"type": "adaptive"}}, low)["reasoning_effort"]
    assert ["none", "low"] == [read(forbidden, options)["reasoning_effort"] for options in (TranslationOptions(), low)]


def test_what_a_body_says_itself_wins_over_the_switch():
    """Key by key of the template's arguments; the configuration stays as it is."""
    body = {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"enable_thinking": False, "x": 1}}
    before = copy.deepcopy(SWITCHES)

    chat = read(LEAST | body, SWITCHES)

    assert {"enable_thinking": False, "x": 1} == chat["chat_template_kwargs"]
    assert (
        0
        == read(LEAST | {"thinking": {"type": "enabled"}, "seed": 0}, TranslationOptions(thinking={"seed": 7}))["seed"]
    )
    assert before == SWITCHES


@pytest.mark.parametrize("at", ["output_config", "output_format"])
def test_a_form_of_the_answer_is_asked_of_the_engine(at):
    """`messages.parse` of the SDK reads the answer by its schema."""
    form = {"type": "json_schema", "schema": {"type": "object"}}

    chat = read(LEAST | {at: {"format": form} if at == "output_config" else form})

    assert {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": {"type": "object"}, "strict": True},
    } == chat["response_format"]


def test_the_model_goes_on_with_a_last_turn_of_its_own():
    """A prefill; one that says nothing is none."""
    begun = read(LEAST | {"messages": [*HI, {"role": "assistant", "content": "The answer is ("}]})
    empty = read(LEAST | {"messages": [*HI, {"role": "assistant", "content": []}]})

    assert (True, False) == (begun["continue_final_message"], begun["add_generation_prompt"])
    assert {"role": "assistant", "content": "The answer is ("} == begun["messages"][-1]
    thought = {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm", "signature": "s"}]}
    assert read(LEAST | {"messages": [*HI, thought]})["continue_final_message"]
    assert read(LEAST) == empty


@pytest.mark.parametrize("turn", [{"role": "assistant", "content": []}, {"role": "system", "content": []}])
def test_a_conversation_in_which_nobody_speaks_is_refused(turn):
    """There is nothing to answer."""
    with pytest.raises(UnprocessableRequest, match="^messages: at least one message must have content"):
        read(LEAST | {"messages": [turn]})


def test_nothing_goes_on_from_a_call():
    """Its result must follow."""
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}

    with pytest.raises(UnprocessableRequest, match="^messages: the last message calls tools"):
        read(LEAST | {"messages": [*HI, {"role": "assistant", "content": [call]}]})


def test_sampled_arguments_are_put_back():
    """By the ids of the calls that an earlier reply made."""
    turns = [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]},
    ]

    chat = read({"messages": [*HI, *turns]}, items={"c": {"function": {"name": "f", "arguments": '{"a":1}'}}})

    assert '{"a":1}' == chat["messages"][1]["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize(
    ("wrong", "at"),
    [
        ({"model": 1}, "model"),
        ({"messages": None}, "messages"),
        ({"system": 1}, "system"),
        ({"system": [{"type": "image"}]}, "system.0.type"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"top_k": "1"}, "top_k"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": False}, "top_p"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": ["x", 1]}, "stop_sequences.1"),
        ({"thinking": True}, "thinking"),
        ({"thinking": {"type": "hard"}}, "thinking.type"),
        ({"output_config": 1}, "output_config"),
        ({"output_config": {"effort": 1}}, "output_config.effort"),
        ({"output_config": {"format": 1}}, "output_config.format"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
        ({"stream": "yes"}, "stream"),
        ({"n": 2}, "n"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread"),
        ({"tools": 1}, "tools"),
    ],
)
def test_a_wrong_value_is_refused_by_its_field(wrong, at):
    """With a sentence that begins with it."""
    with pytest.raises(UnprocessableRequest, match=f"^{at}: ") as refused:
        read(LEAST | wrong)
    assert at == refused.value.param


@settings(max_examples=25)
@given(BODIES, st.dictionaries(st.text(max_size=2), JSON, max_size=2))
def test_whatever_is_sent_is_read_or_refused(body, known):
    """Refused by a field's name, never by a failure; what is read can be sent, and the body stays as it was."""
    before = copy.deepcopy(body)
    try:
        chat = read(body, SWITCHES, items={name: item for name, item in known.items() if isinstance(item, dict)})
    except UnprocessableRequest as refused:
        assert refused.param
        assert refused.message.startswith(f"{refused.param}: ")
    else:
        assert orjson.loads(orjson.dumps(chat)) == chat
        assert all(turn["role"] in {"system", "user", "assistant", "tool"} for turn in chat["messages"])
    assert before == body


@pytest.mark.parametrize(
    "last",
    [
        {"role": "system", "content": "Now be brief."},
        {"role": "system", "content": []},
        {"role": "user", "content": [{"type": "text", "text": ""}]},
    ],
)
@pytest.mark.parametrize("merges_systems", [False, True])
def test_a_reply_before_the_last_turn_is_not_continued(last, merges_systems):
    """Also where that turn says nothing, or is moved to the beginning: the request asks for a new reply."""
    body = LEAST | {"messages": [*HI, {"role": "assistant", "content": "Yes"}, last]}

    assert "continue_final_message" not in read(body, TranslationOptions(merges_systems=merges_systems))
