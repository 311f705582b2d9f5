"""What all engines have: how choices are read, known defects and framings, and requests that are constrained."""

import orjson
import pytest
from tests.support.recorded import load, plan_of

from proxy.protocols.engines import ENGINES
from proxy.protocols.engines.base import (
    QUIRK_CODES,
    CallOptions,
    Counted,
    FollowUpRequest,
    StripRules,
    Traits,
    index_of,
    logprobs_of,
    read_count,
    read_text,
    text_request,
    token_count_request,
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

    assert {
        code for quirk in ENGINES[kind].expected_quirks(dialect, body, options, live=False) for code in quirk.codes
    } == codes


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
    assert logprobs_of({"logprobs": logprobs}) == read


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


CHAT = {"messages": [], "tools": [{}], "temperature": 1, "model": "m", "chat_template_kwargs": {"a": 1}, "stream": True}
EFFORT = {"messages": [], "reasoning_effort": "low"}


def kwargs(**fields):
    return {"messages": [], "chat_template_kwargs": fields}


@pytest.mark.parametrize(
    ("kind", "body", "path", "fields"),
    [
        ("vllm", CHAT, "/tokenize", {"tools": [{}], **kwargs(a=1)}),
        ("sglang", {"messages": []}, "/v1/tokenize", {"messages": []}),
        ("vllm", EFFORT | {"reasoning_effort": "none"}, "/tokenize", kwargs(reasoning_effort="none", enable_thinking=False)),
        ("vllm", EFFORT | kwargs(enable_thinking=False, a=1), "/tokenize",
         kwargs(reasoning_effort="low", enable_thinking=False, a=1)),
        ("sglang", EFFORT, "/v1/tokenize", EFFORT),
        ("vllm", {"prompt": "a"}, "/tokenize", {"prompt": "a"}),
        ("vllm", {"prompt": [1, 2]}, None, None),
        ("llamacpp", CHAT, None, None),
        ("plain", CHAT, None, None),
    ],
)  # fmt: skip
def test_the_count_request_has_the_fields_that_shape_the_prompt(kind, body, path, fields):
    """None if the engine has no such endpoint."""
    dialect = "completions" if "prompt" in body else "chat"
    expected = None if path is None else FollowUpRequest(path, fields)

    assert token_count_request(ENGINES[kind], dialect, body) == expected


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ({"count": 3, "max_model_len": 9, "tokens": [1, 2, 3]}, Counted(3, 9)),
        ({"count": 3}, None),
        ({"count": True, "max_model_len": 9}, None),
        ([], None),
    ],
)
def test_count_and_context_window_are_read(response, expected):
    """A value of another type is None."""
    assert read_count(response) == expected


@pytest.mark.parametrize(
    ("kind", "path", "response"),
    [
        ("vllm", "/detokenize", {"prompt": "hi"}),
        ("sglang", "/v1/detokenize", {"text": "hi"}),
        ("llamacpp", "/detokenize", {"content": "hi"}),
    ],
)
def test_each_engine_has_its_own_path_and_response_field(kind, path, response):
    """The request field is `tokens` for all. By default, SGLang drops special tokens."""
    request = text_request(ENGINES[kind], (1, 2))
    special = {"skip_special_tokens": False} if kind == "sglang" else {}

    assert (request.path, request.body) == (path, {"tokens": [1, 2], **special})
    assert read_text(ENGINES[kind], response) == "hi"


def test_the_recorded_response_of_vllm_is_read():
    recorded = load("detokenize")
    request = text_request(ENGINES["vllm"], recorded.body["tokens"])

    assert (recorded.path, recorded.body["tokens"]) == (request.path, request.body["tokens"])
    assert read_text(ENGINES["vllm"], orjson.loads(recorded.response))


@pytest.mark.parametrize("response", [None, [], {}, {"prompt": 7}])
def test_a_response_without_text_is_none(response):
    """An engine without the endpoint returns None, too."""
    assert read_text(ENGINES["vllm"], response) is None
    assert (text_request(ENGINES["plain"], [1]), read_text(ENGINES["plain"], {"prompt": "hi"})) == (None, None)
