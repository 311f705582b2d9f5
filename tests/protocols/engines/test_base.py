"""What all engines have: how choices are read, known defects and framings, and requests that are constrained."""

import pytest
from tests.support.recorded import plan_of

from proxy.protocols.engines import ENGINES
from proxy.protocols.engines.base import (
    QUIRK_CODES,
    CallOptions,
    StripRules,
    Traits,
    index_of,
    logprobs_of,
    without,
)
from proxy.trajectory.step import PROBLEMS

STREAM = {"stream": True}


def framing(streaming: str, body: dict, kind: str = "llamacpp") -> str:
    return ENGINES[kind].framing("chat", body, CallOptions(streaming=streaming, traits=Traits(kind)))


def test_every_quirk_has_an_engine_flags_and_a_source():
    """docs/fidelity.md prints them."""
    for quirk in (quirk for engine in ENGINES.values() for quirk in engine.quirks):
        assert quirk.codes
        assert set(quirk.codes) <= PROBLEMS.keys()
        assert quirk.what.endswith(".")
        assert quirk.source
    assert set(QUIRK_CODES) <= PROBLEMS.keys()


def test_an_unstreamed_request_is_never_replayed():
    assert {framing(how, {}) for how in ("auto", "live", "replay")} == {"whole"}
    assert framing("replay", {"stream": False}) == "whole"


@pytest.mark.parametrize(("kind", "in_auto"), [("llamacpp", "replay"), ("vllm", "live")])
def test_auto_replays_the_streams_of_engines_with_quirks(kind, in_auto):
    """llama.cpp's streams always lose tokens."""
    assert [framing(how, STREAM, kind) for how in ("auto", "live", "replay")] == [in_auto, "live", "replay"]


@pytest.mark.parametrize(
    "body",
    [
        {"stream": 1},
        {"stream": "yes"},
        STREAM | {"stream_options": "x"},
        STREAM | {"stream_options": {"continuous_usage_stats": True}},
    ],
)
def test_streams_with_unknown_options_are_not_replayed(body):
    """The engine validates them."""
    assert framing("replay", body) == "live"


def test_a_stream_that_the_engine_rejects_is_not_replayed():
    """The 400 is forwarded."""
    assert framing("replay", STREAM | {"prompt_logprobs": 1}, "vllm") == "live"


@pytest.mark.parametrize(
    ("kind", "dialect", "body", "codes"),
    [
        ("vllm", "chat", {}, set()),
        ("vllm", "chat", {"include_reasoning": False}, {"reasoning_withheld"}),
        ("vllm", "completions", {"echo": True}, {"echo"}),
        ("vllm", "completions", {"max_tokens": 0}, {"phantom_token"}),
        ("vllm", "chat", {"top_logprobs": 2}, {"no_logprobs"}),
        ("vllm", "chat", {"top_logprobs": 2, "logprobs": True}, set()),
        ("llamacpp", "chat", {"n": 2}, {"uncounted", "logprob_count", "completion_count", "no_logprobs"}),
        ("plain", "chat", {}, {"no_token_ids"}),
        ("sglang", "chat", {"messages": 7}, set()),  # the engine refuses it
        ("sglang", "chat", {"messages": [{"content": [{"type": "image_url"}]}]}, {"prompt_count"}),
    ],
)
def test_the_quirks_of_a_call_are_found_by_engine_and_request(kind, dialect, body, codes):
    """Known defects are not logged as new ones."""
    options = CallOptions(traits=Traits(kind), keep_reasoning=False)

    assert codes == {
        code for quirk in ENGINES[kind].expected_quirks(dialect, body, options, live=False) for code in quirk.codes
    }


@pytest.mark.parametrize("index", ["0", None, 1.0, True])
def test_a_choice_index_that_is_not_an_integer_raises_type_error(index):
    with pytest.raises(TypeError, match="index"):
        index_of({"index": index})


@pytest.mark.parametrize("kind", ENGINES)
def test_every_engine_rejects_a_choice_index_that_is_not_an_integer(kind):
    with pytest.raises(TypeError, match="index"):
        ENGINES[kind].tokens("chat", {}, {"choices": [{"index": "0"}]})


@pytest.mark.parametrize(
    ("logprobs", "read"),
    [
        (None, None),
        ({"content": [{"logprob": -1.0}, {"token": "a"}]}, [-1.0, None]),
        ({"content": None, "token_logprobs": [None, -2.0]}, [None, -2.0]),
        ({}, None),
    ],
)
def test_logprobs_are_read_from_chat_and_completions_choices(logprobs, read):
    """One per token; a missing one is None."""
    assert read == logprobs_of({"logprobs": logprobs})


def test_stripping_removes_keys_and_nulls_logprobs_in_a_copy():
    choice = {"index": 0, "logprobs": {}, "token_ids": [1], "text": "a"}
    shown = without(choice, StripRules(logprobs=True, keys=frozenset({"token_ids"})))

    assert shown == {"index": 0, "logprobs": None, "text": "a"}
    assert choice == {"index": 0, "logprobs": {}, "token_ids": [1], "text": "a"}


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
    assert [ENGINES[kind].constrains(body, PROCESSED) for kind in ("vllm", "sglang")] == [is_constrained] * 2


def test_the_engines_defaults_apply_to_fields_that_a_request_does_not_set():
    traits = Traits("vllm", sampling_defaults={"temperature": 0.6, "top_k": 20})
    requests = [{}, {"top_k": None}, {"top_k": -1}]
    plans = [
        plan_of("/v1/completions", {"prompt": "a"} | fields, traits=traits, logprobs_mode=PROCESSED)
        for fields in requests
    ]

    assert [plan.sampling["constrained"] for plan in plans] == [True, True, False]


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
