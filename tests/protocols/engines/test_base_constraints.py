"""Requests that get logprobs other than the model's own distribution, for each engine and logprobs mode."""

import pytest
from tests.support.recorded import plan_of

from proxy.protocols.engines import ENGINES
from proxy.protocols.engines.base import Traits

TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
STRICT = {"type": "function", "function": {"name": "add", "parameters": {}, "strict": True}}
NAMED = {"type": "function", "function": {"name": "add"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
RAW, AFTER, PROCESSED = "raw_logprobs", "after_temperature_logprobs", "processed_logprobs"


@pytest.mark.parametrize(
    ("body", "kinds"),
    [
        ({}, ""),
        ({"tools": [TOOL]}, ""),
        ({"tools": [TOOL], "tool_choice": "auto"}, ""),
        ({"tools": [TOOL], "tool_choice": "none"}, ""),
        ({"tools": [TOOL], "tool_choice": "required"}, "vllm sglang plain"),
        ({"tools": [TOOL], "tool_choice": NAMED}, "vllm sglang plain"),
        ({"tools": [TOOL, STRICT]}, "vllm sglang plain"),
        ({"tools": [STRICT], "tool_choice": "none"}, ""),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "vllm"),
        ({"tools": [TOOL], "parallel_tool_calls": False, "tool_choice": "none"}, ""),
        ({"parallel_tool_calls": False}, ""),
        ({"response_format": SCHEMA}, "vllm sglang plain"),
        ({"response_format": {"type": "json_object"}}, "vllm sglang plain"),
        ({"response_format": {"type": "structural_tag"}}, "vllm sglang plain"),
        ({"response_format": {"type": "text"}}, ""),
        ({"response_format": {}}, ""),
        ({"guided_regex": "a", "guided_json": {}}, ""),  # vLLM 0.32 ignores them
        ({"response_format": None, "tools": None, "tool_choice": None}, ""),
        ({"structured_outputs": {"choice": ["a"]}}, "vllm"),
        ({"regex": "a"}, "sglang"),
        ({"ebnf": "root ::= a"}, "sglang"),
        ({"json_schema": "{}"}, "sglang"),
        ({"grammar": "root ::= a"}, ""),
        (
            {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "allowed_token_ids": [1], "bad_words": ["a"]},
            "",
        ),
        ({"logit_bias": {"5": 1}}, "sglang"),
        ({"presence_penalty": 0.5}, "sglang"),
        ({"repetition_penalty": 1.2}, "sglang"),
        ({"min_tokens": 4}, "sglang"),
        ({"repetition_penalty": 1.0, "frequency_penalty": 0, "logit_bias": {}, "min_tokens": 0}, ""),
        ({"tools": "odd", "tool_choice": 7, "response_format": "odd"}, ""),
        ({"tools": [7, {"function": None}]}, ""),
    ],
)
def test_constrained_requests_are_detected_in_each_engines_default_mode(body, kinds):
    modes = {kind: engine.logprobs_mode for kind, engine in ENGINES.items()}

    assert set(kinds.split()) == {kind for kind, engine in ENGINES.items() if engine.constrains(body, modes[kind])}


@pytest.mark.parametrize(
    ("body", "is_constrained"),
    [
        ({}, False),
        ({"temperature": 0.5, "top_p": 1.0, "top_k": -1, "min_p": 0, "stop": ["a"], "seed": 5}, False),
        ({"top_k": 0, "presence_penalty": 0.0}, False),
        ({"top_p": 0.9}, True),
        ({"top_k": 20}, True),
        ({"min_p": 0.05}, True),
        ({"allowed_token_ids": [5]}, True),
        ({"bad_words": ["a"]}, True),
        ({"logit_bias": {"5": 1}}, True),
    ],
)
def test_processed_logprobs_are_constrained_by_every_sampling_parameter(body, is_constrained):
    """The temperature is recorded separately."""
    assert [is_constrained] * 2 == [ENGINES[kind].constrains(body, PROCESSED) for kind in ("vllm", "sglang")]


def test_the_engines_defaults_apply_to_fields_that_a_request_does_not_set():
    traits = Traits("vllm", sampling_defaults={"temperature": 0.6, "top_k": 20})
    requests = [{}, {"top_k": None}, {"top_k": -1}]
    plans = [
        plan_of("/v1/completions", {"prompt": "a"} | fields, traits=traits, logprobs_mode=PROCESSED)
        for fields in requests
    ]

    assert [True, True, False] == [plan.sampling["constrained"] for plan in plans]


@pytest.mark.parametrize(
    ("path", "body", "is_constrained"),
    [
        ("/v1/chat/completions", {"messages": [], "tools": [TOOL], "tool_choice": "required"}, True),
        ("/v1/chat/completions", {"messages": []}, False),
        ("/v1/completions", {"prompt": "a", "response_format": {"type": "json_object"}}, True),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"structured_outputs": {"regex": "a"}}}, True),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {}, "structured_outputs": {}}, False),
    ],
)
def test_the_plan_records_whether_the_sent_request_is_constrained(path, body, is_constrained):
    assert is_constrained is plan_of(path, body).sampling["constrained"]
