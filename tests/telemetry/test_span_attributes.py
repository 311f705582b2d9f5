"""The attributes of a call's span have the names of the conventions, and any value of a client or an engine can be encoded."""

import re
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from tests.support.any_json import JSON, odd_steps
from tests.support.recorded import load, plan_of, play

from proxy.telemetry import span_attributes
from proxy.telemetry.span_attributes import (
    MAX_BYTES,
    MAX_TEXT,
    clean,
    error_of_step,
    first_attributes,
    input_messages,
    output_messages,
    provider,
    request_attributes,
    span_name,
    step_attributes,
    tool_definitions,
)

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
TRACER = TracerProvider(shutdown_on_exit=False).get_tracer("test")
VALUES = JSON | st.sampled_from([2**70, -(2**70), float("inf"), float("nan"), "\ud800", "x" * 9999, True])


def encoded(attributes) -> dict:
    """Return the attributes as a collector reads them."""
    span = TRACER.start_span("span", attributes=attributes)
    span.end()
    assert isinstance(span, ReadableSpan)
    text = encode_spans([span]).SerializePartialToString()
    found = type(encode_spans([])).FromString(text).resource_spans[0].scope_spans[0].spans[0].attributes
    return {pair.key: pair.value for pair in found}


def test_attributes_have_the_names_of_the_conventions():
    source = Path(span_attributes.__file__).read_text()
    names = set(re.findall(r'"(gen_ai\.[\w.]+)"', source))
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}

    assert len(names) > 20
    assert set() == names - known


@given(st.dictionaries(st.sampled_from(["temperature", "top_p", "top_k", "seed", "n", "max_tokens", "stream", "stop", "model",
    "max_completion_tokens", "frequency_penalty", "presence_penalty"]), VALUES))  # fmt: skip
def test_any_value_of_a_request_is_encoded_or_omitted(fields):
    body = {"messages": HELLO, **fields}
    try:
        plan = plan_of(CHAT, body)
    except (TypeError, ValueError, OverflowError):
        return  # such a call is rejected before it has a trace
    attributes = first_attributes(plan) | request_attributes(plan)

    assert attributes.keys() == encoded(attributes).keys()
    assert encoded({"name": span_name(plan)})
    assert all(len(value) <= 1024 for value in attributes.values() if isinstance(value, str))


@given(odd_steps(), st.booleans())
def test_any_value_of_a_step_is_encoded_or_omitted(steps, content):
    for step in steps:
        attributes = step_attributes(step, content=content)

        assert attributes.keys() == encoded(attributes).keys()
        assert error_of_step(step, 200) is None or error_of_step(step, 200)[0]


@given(VALUES, VALUES, VALUES)
def test_any_value_of_a_response_is_encoded_or_omitted(first, second, third):
    _, _, step = play(plan_of(CHAT, {"model": "tiny", "messages": HELLO}), load("chat_ids_lp"))
    usage = {"prompt_tokens": first, "completion_tokens": second, "prompt_tokens_details": third}
    response = {**step.response, "id": first, "model": second, "choices": third}
    for odd in (replace(step, usage=usage), replace(step, response=response), replace(step, policy_version=first)):
        attributes = step_attributes(odd, content=True)

        assert attributes.keys() == encoded(attributes).keys()


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (CHAT, {"model": "m", "messages": HELLO}, "chat m"),
        (CHAT, {"messages": HELLO}, "chat"),
        ("/v1/completions", {"model": "m", "prompt": "hi"}, "text_completion m"),
    ],
)
def test_the_name_of_a_span_is_the_operation_and_the_model(path, body, name):
    assert name == span_name(plan_of(path, body))


def test_only_what_was_sent_is_an_attribute_of_the_request():
    """The engine's own defaults are in the step, not in the span."""
    found = request_attributes(plan_of(CHAT, {"messages": HELLO, "n": 1, "max_tokens": 5, "max_completion_tokens": 4}))

    assert found == {"gen_ai.provider.name": "vllm", "tokentape.engine": "e", "gen_ai.request.max_tokens": 4}


def test_an_engine_of_an_unknown_type_is_a_provider_of_openais_api():
    assert list(map(provider, ["vllm", "sglang", "llamacpp", "plain", "auto"])) == [
        "vllm",
        "sglang",
        "llamacpp",
        "openai",
        "openai",
    ]


def test_tokens_are_counted_from_the_usage_or_else_from_the_recorded_ids():
    _, _, step = play(plan_of(CHAT, {"model": "tiny", "messages": HELLO}), load("chat_ids_lp"))
    without = step_attributes(replace(step, usage=None), content=False)

    assert (len(step.prompts[0]), step.sampled) == (
        without["gen_ai.usage.input_tokens"],
        without["gen_ai.usage.output_tokens"],
    )
    details = {"prompt_tokens_details": {"cached_tokens": 3}, "completion_tokens_details": {"reasoning_tokens": 2}}
    found = step_attributes(replace(step, usage={"prompt_tokens": 9, **details}), content=False)
    assert tuple(
        found[f"gen_ai.usage.{name}"] for name in ("input_tokens", "cache_read.input_tokens", "reasoning.output_tokens")
    ) == (9, 3, 2)


def test_the_error_of_a_step():
    _, _, step = play(plan_of(CHAT, {"model": "tiny", "messages": HELLO}), load("chat_ids_lp"))

    assert error_of_step(None, 429) == ("429", None)
    assert error_of_step(replace(step, status="error", response={"status": 404}), 200) == ("404", None)
    assert error_of_step(replace(step, status="error", response=None), 502) == ("502", None)
    assert error_of_step(replace(step, status="partial", reason="why"), 200) == ("aborted", "why")
    assert error_of_step(step, 200) is None


_, _, STEP = play(plan_of(CHAT, {"model": "tiny", "messages": []}), load("chat_ids_lp"))


def inputs(*messages, **fields):
    text, omitted = input_messages(replace(STEP, request={"messages": list(messages), **fields}, sent={}))
    return (None if text is None else orjson.loads(text)), omitted


def test_texts_tool_calls_and_their_results_are_parts():
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at":"x"}'}}
    messages, omitted = inputs(
        {"role": "system", "content": "be kind"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "http://i"}}],
        },
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "found"},
    )

    assert omitted == 0
    assert messages == [
        {"role": "system", "parts": [{"type": "text", "content": "be kind"}]},
        {
            "role": "user",
            "parts": [{"type": "text", "content": "see"}, {"type": "uri", "modality": "image", "uri": "http://i"}],
        },
        {
            "role": "assistant",
            "parts": [
                {"type": "reasoning", "content": "hm"},
                {"type": "tool_call", "id": "c1", "name": "look", "arguments": {"at": "x"}},
            ],
        },
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "found"}]},
    ]


def test_the_prompt_of_a_completion_is_a_message_of_the_user():
    step = replace(
        STEP,
        dialect="completions",
        request={"prompt": ["a", "b", [1, 2]]},
        sent={},
        response={"choices": [{"text": "c"}]},
    )

    assert [message["parts"][0]["content"] for message in orjson.loads(input_messages(step)[0])] == ["a", "b"]
    assert orjson.loads(output_messages(step)) == [{"role": "assistant", "parts": [{"type": "text", "content": "c"}]}]


def test_arguments_that_are_no_json_are_text():
    call = {"function": {"name": "f", "arguments": "{cut"}}
    messages, _ = inputs({"role": "assistant", "tool_calls": [call, {"function": None}, 3]})

    assert messages[0]["parts"] == [{"type": "tool_call", "id": None, "name": "f", "arguments": "{cut"}]


def test_tools_are_defined_by_name_description_and_parameters():
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "strict": True}}, "odd"]
    step = replace(STEP, request={"messages": [], "tools": tools}, sent={})

    assert orjson.loads(tool_definitions(step)) == [{"type": "function", "name": "f", "description": "d"}]
    assert tool_definitions(replace(STEP, request={"messages": []}, sent={})) is None
    long = [{"function": {"name": "f", "description": "d" * MAX_BYTES}}]
    assert tool_definitions(replace(STEP, request={"tools": long}, sent={})) is None


def test_the_newest_messages_are_kept_and_the_number_of_the_others_is_returned():
    messages, omitted = inputs(*({"role": "user", "content": f"{number}" + "x" * 10_000} for number in range(20)))

    assert len(messages) + omitted == 20
    assert len(messages) == 6
    assert messages[-1]["parts"][0]["content"].startswith("19x")


def test_a_long_text_is_cut():
    messages, _ = inputs({"role": "user", "content": "x" * 10**6})

    assert len(messages[0]["parts"][0]["content"]) == MAX_TEXT
    assert messages[0]["parts"][0]["content"].endswith("x…")


def test_an_image_in_the_request_is_not_exported():
    messages, _ = inputs(
        {"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 9999}}]}
    )

    assert len(messages[0]["parts"][0]["uri"]) == 256


def test_a_surrogate_is_replaced():
    assert clean("a\ud800b") == "a?b"


@given(odd_steps())
def test_messages_of_any_type_are_valid_json_of_limited_size(steps):
    for step in steps:
        for text in (input_messages(step)[0], output_messages(step), tool_definitions(step)):
            assert text is None or len(text.encode()) <= 2 * MAX_BYTES + 1024
            assert text is None or isinstance(orjson.loads(text), list)
