"""The response object."""

from tests.support.responses_drawn import IDENTITY

from proxy.protocols.dialects.responses.renderer import ending, logprob_entries, make_response, usage_from


def test_a_response_repeats_the_settings_of_its_request():
    """Fields that the request does not set have OpenAI's defaults."""
    body = {
        "instructions": "i", "metadata": {"a": "b"}, "temperature": 0, "max_output_tokens": 5, "previous_response_id": "resp_1",
        "reasoning": {"effort": "low"}, "text": {"verbosity": "low"}, "tool_choice": {"type": "function", "name": "f"},
        "tools": [{"type": "function", "name": "f"}, {"type": "custom", "name": "p"}], "parallel_tool_calls": False,
        "store": False, "truncation": "auto", "top_logprobs": 2, "user": "u",
    }  # fmt: skip
    shown = make_response(body, IDENTITY)

    assert (f"resp_{IDENTITY.step_id}", IDENTITY.created_s, "gpt-5", "in_progress", [], None) == tuple(
        shown[name] for name in ("id", "created_at", "model", "status", "output", "usage")
    )
    assert {name: body[name] for name in body if name not in {"reasoning", "text", "tools"}}.items() <= shown.items()
    assert {"effort": "low", "summary": None} == shown["reasoning"]
    assert {"verbosity": "low", "format": {"type": "text"}} == shown["text"]
    assert {"type": "function", "name": "f", "parameters": None, "strict": None} == shown["tools"][0]
    assert (True, "auto", "disabled", True) == tuple(
        make_response({}, IDENTITY)[name] for name in ("parallel_tool_calls", "tool_choice", "truncation", "store")
    )


def test_usage_has_cached_and_reasoning_tokens():
    """vLLM and llama.cpp return both in details, SGLang reasoning tokens on the top level."""
    vllm = {
        "prompt_tokens": 5, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }  # fmt: skip
    expected = {
        "input_tokens": 5, "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0}, "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 12,
    }  # fmt: skip
    sglang = {**vllm, "reasoning_tokens": 2, "completion_tokens_details": None}

    assert expected == usage_from(vllm) == usage_from(sglang)
    assert 0 == usage_from({"prompt_tokens": 5, "prompt_tokens_details": None})["input_tokens_details"]["cached_tokens"]
    assert usage_from(None) is None


def test_finish_reasons_become_status_and_details():
    assert ("incomplete", {"incomplete_details": {"reason": "max_output_tokens"}}) == ending("length")
    assert ("incomplete", {"incomplete_details": {"reason": None}}) == ending("repetition")
    assert "failed" == ending("abort")[0]
    assert ("completed", {}) == ending("tool_calls") == ending(None)


def test_logprob_entries_without_a_logprob_are_dropped():
    """llama.cpp returns probabilities with `post_sampling_probs`."""
    assert [] == logprob_entries({"content": [{"token": "a", "prob": 0.5}]}) == logprob_entries(None)
