"""Which calls can be resumed after their engine ended them early, and the request for the rest."""

from array import array
from dataclasses import replace

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.forests import make_choice, make_step
from tests.support.recorded import plan_of

from proxy.protocols.engines.base import Traits
from proxy.protocols.resume import (
    ends_in_stop,
    refusal,
    resumed_plan,
    shown_text,
    with_text,
    withheld_text,
    without_event,
)

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
STEP = replace(
    make_step("S1", [1, 2], make_choice(0, [3, 4, 5], finish_reason="abort")),
    status="partial",
    problems=("aborted", "stream_cut"),
    response={"choices": [{"index": 0, "message": {"role": "assistant", "content": "abc"}}]},
)


def told(content, thought, *calls):
    functions = [{"function": {"name": "f", "arguments": arguments}} for arguments in calls]
    return {"role": "assistant", "content": content, "reasoning": thought, "tool_calls": functions}


@pytest.mark.parametrize(
    ("delta", "left"),
    [
        ({"content": "c"}, told("ab", "xyz", "{1}", "{2")),
        ({"reasoning": "yz"}, told("abc", "x", "{1}", "{2")),
        ({"tool_calls": [{"index": 1, "function": {"arguments": "2"}}]}, told("abc", "xyz", "{1}", "{")),
        ({"tool_calls": [{"index": 1, "function": {"name": "f", "arguments": "{2"}}]}, told("abc", "xyz", "{1}")),
    ],
)
def test_what_is_withheld_with_the_last_event_was_not_shown(delta, left):
    """Text, thought or call: its client gets it with the rest."""
    message = told("abc", "xyz", "{1}", "{2")
    step = replace(STEP, response={"choices": [{"index": 0, "message": message}]})

    assert without_event(step, {"choices": [{"delta": delta}]}).response["choices"][0]["message"] == left


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),  # a plain call is
        ({"n": 2}, "choices"),
        ({"response_format": {"type": "json_object"}}, "grammar"),
        ({"tools": [TOOL], "tool_choice": "required"}, "grammar"),
        ({"frequency_penalty": 0.1}, "penalties"),
        ({"presence_penalty": 0.1}, "penalties"),
        ({"repetition_penalty": 1.1}, "penalties"),
        ({"bad_words": ["x"]}, "field"),
        ({"a_new_field": 1}, "field"),
        ({"return_token_ids": True}, "field"),
        ({"max_tokens": "9"}, "field"),
        ({"max_completion_tokens": 9.0}, "field"),
        ({"min_tokens": True}, "field"),
        ({"seed": "7"}, "field"),
        ({"stop": [f"stop {number}" for number in range(99)]}, "field"),
        ({"tools": [TOOL]}, "parser"),
        ({"max_tokens": 3}, "length"),
    ],
)
def test_what_an_engine_counts_parses_or_matches_in_sampled_tokens_is_not_resumed(fields, reason):
    assert refusal(plan_of(CHAT, BODY | fields), STEP, has_parser=None) == reason


GENERATE = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 9, "min_tokens": 4, "seed": 7, "logprobs": 1}}
NATIVE = {
    "input_ids": [1, 2],
    "sampling_params": {"max_new_tokens": 9, "min_new_tokens": 4, "sampling_seed": 7},
    "return_logprob": True,
}


@pytest.mark.parametrize(
    ("kind", "path", "body", "ids", "limits"),
    [
        ("vllm", "/inference/v1/generate", GENERATE, "token_ids", ("max_tokens", "min_tokens", "seed")),
        ("sglang", "/generate", NATIVE, "input_ids", ("max_new_tokens", "min_new_tokens", "sampling_seed")),
    ],
)
def test_a_call_of_ids_can_be_resumed(kind, path, body, ids, limits):
    """Its limits are in `sampling_params`, by the engine's names. Stop strings, and what is unknown there, prevent it."""
    plan = plan_of(path, body, kind=kind)
    rest = resumed_plan(plan, STEP, None)
    sent = orjson.loads(orjson.dumps(rest.body))

    assert refusal(plan, STEP, has_parser=None) is None
    assert (sent[ids], [sent["sampling_params"][name] for name in limits]) == ([1, 2, 3, 4, 5], [6, 1, 10])
    for name, value, reason in [
        ("stop", ["x"], "stop"),
        ("regex", "a", "field"),
        ("repetition_penalty", 2, "penalties"),
    ]:
        changed = {**body, "sampling_params": {**body["sampling_params"], name: value}}
        assert reason == refusal(plan_of(path, changed, kind=kind), STEP, has_parser=None)


@pytest.mark.parametrize(
    ("kind", "path", "body", "reason"),
    [
        ("sglang", "/generate", {**NATIVE, "stream": True}, "field"),  # each event repeats the tokens before
        # Its reply is in a list, that of the rest would not be.
        ("sglang", "/generate", {**NATIVE, "input_ids": [[1, 2]]}, "field"),
        ("sglang", "/generate", {**NATIVE, "input_ids": None, "text": ["ab"]}, "field"),
        # A limit that is no sampling parameter.
        ("vllm", "/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {}, "max_tokens": 9}, "field"),
        ("plain", CHAT, BODY, "ids"),  # which it does not take
    ],
)
def test_what_an_endpoint_does_otherwise_is_not_resumed(kind, path, body, reason):
    assert refusal(plan_of(path, body, kind=kind), STEP, has_parser=None) == reason


def replied(field):
    return {"choices": [{"index": 0, "message": {"content": None, field: "x"}}]}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"response": replied("reasoning")}, "parser"),
        ({"response": replied("reasoning_content")}, "parser"),
        ({"response": replied("tool_calls")}, "parser"),
        ({"problems": ("completion_count",)}, "ids"),
        ({"choices": (make_choice(0, [3, 4, 5], finish_reason="stop"),)}, "finished"),
    ],
)
def test_a_step_that_was_parsed_is_complete_or_has_wrong_ids_is_not_resumed(fields, reason):
    assert refusal(plan_of(CHAT, BODY), replace(STEP, **fields), has_parser=None) == reason


@pytest.mark.parametrize(("limit", "left"), [({}, 125), ({"max_new_tokens": None}, None), ({"max_new_tokens": 9}, 6)])
def test_the_native_limit_is_128_unless_it_is_null(limit, left):
    """SGLang samples without a limit then."""
    rest = resumed_plan(plan_of("/generate", {**NATIVE, "sampling_params": limit}, kind="sglang"), STEP, None)

    assert rest.body.get("sampling_params", limit)["max_new_tokens"] == left


def test_a_penalty_of_the_model_counts_where_the_call_has_null():
    traits = Traits("sglang", "0.5.23", sampling_defaults={"repetition_penalty": 1.05})
    plan = plan_of(CHAT, BODY | {"repetition_penalty": None}, kind="sglang", traits=traits)

    assert refusal(plan, STEP, has_parser=None) == "penalties"


def test_tools_do_not_matter_on_an_engine_without_a_parser():
    assert refusal(plan_of(CHAT, BODY | {"tools": [TOOL]}), STEP, has_parser=False) is None


def test_the_rest_has_the_limits_that_are_left():
    """A completions call without a limit has one of 16 tokens."""
    limits = {"max_tokens": 9, "min_tokens": 2, "seed": 7}
    body = resumed_plan(plan_of(CHAT, BODY | limits), STEP, None).body
    text = resumed_plan(plan_of("/v1/completions", {"model": "m", "prompt": "hi"}), STEP, None)

    assert (body["max_tokens"], body["min_tokens"], body["seed"]) == (6, 0, 10)
    assert text.body["max_tokens"] == 13
    assert text.prompt.ids == array("i", [1, 2, 3, 4, 5])


@pytest.mark.parametrize(("seed", "moved"), [(7, 10), (-5, 2**63 - 2), (-1, -1), (2**63 - 1, 2)])
def test_the_rest_has_another_seed(seed, moved):
    """With the same one, an engine draws the same random numbers again; -1 is none."""
    assert resumed_plan(plan_of(CHAT, BODY | {"seed": seed}), STEP, None).body["seed"] == moved


@given(text=st.text("ab", max_size=8), stop=st.text("ab", max_size=4))
def test_a_text_ends_in_a_stop_string_or_its_beginning(text, stop):
    assert any(text.endswith(stop[:count]) for count in range(1, len(stop) + 1)) == ends_in_stop(
        text, [stop] if stop else []
    )


def test_a_text_is_withheld_only_for_stop_strings():
    assert withheld_text("abc", "abc", None, is_lost=False) == ""
    assert withheld_text("abc", "ab", ["xy"], is_lost=True) == "c"
    assert withheld_text("abc", "ab", None, is_lost=True) is None
    assert withheld_text("ab<|end|>", "ab", ["xy"], is_lost=True) is None
    assert withheld_text("abc", "abd", ["xy"], is_lost=True) is None


def test_the_text_of_a_partial_step_is_replaced():
    assert (shown_text(STEP), shown_text(with_text(STEP, "abcd"))) == ("abc", "abcd")
