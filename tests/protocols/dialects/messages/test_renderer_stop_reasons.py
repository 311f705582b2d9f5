"""Stop reasons and usage of the Messages API."""

import pytest

from proxy.protocols.dialects.messages.renderer import stop_reason_from, usage_from

CALLS = {"tool_calls": [{"id": "c"}]}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"finish_reason": "stop", "stop_reason": None}, ("end_turn", None)),
        ({"finish_reason": "stop", "stop_reason": 4089}, ("end_turn", None)),
        ({"finish_reason": "stop", "stop_reason": "END"}, ("stop_sequence", "END")),
        ({"finish_reason": "stop", "matched_stop": "END"}, ("stop_sequence", "END")),
        ({"finish_reason": "stop", "matched_stop": 2}, ("end_turn", None)),
        ({"finish_reason": "stop", "stop_reason": "of the rollout's terms"}, ("end_turn", None)),
        ({"finish_reason": "length"}, ("max_tokens", None)),
        ({"finish_reason": "length", "message": CALLS}, ("max_tokens", None)),
        ({"finish_reason": "tool_calls", "message": CALLS}, ("tool_use", None)),
        ({"finish_reason": "stop", "message": CALLS}, ("tool_use", None)),
        ({"finish_reason": "tool_calls", "message": {}}, ("end_turn", None)),
        ({"finish_reason": "content_filter"}, ("refusal", None)),
        ({"finish_reason": "abort"}, ("pause_turn", None)),
        ({"finish_reason": None}, ("pause_turn", None)),
        ({}, ("pause_turn", None)),
        ({"finish_reason": "repetition", "stop_reason": "repetition_detected"}, ("max_tokens", None)),
        ({"finish_reason": "something new"}, ("end_turn", None)),
    ],
)
def test_a_finish_reason_becomes_a_stop_reason(choice, expected):
    """vLLM finishes a forced tool call with `stop`; a stop string is returned if the client sent it."""
    assert expected == stop_reason_from(choice, ["END"])


@pytest.mark.parametrize("stops", [None, [], "END", {"END": 1}])
def test_a_stop_string_that_the_client_did_not_send_is_not_returned(stops):
    """Nor if `stop_sequences` has another type."""
    assert ("end_turn", None) == stop_reason_from({"finish_reason": "stop", "stop_reason": "END"}, stops)


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (None, (0, 0, 0, None)),
        ({"prompt_tokens": 33, "completion_tokens": 5, "prompt_tokens_details": None}, (33, 0, 5, None)),
        (
            {"prompt_tokens": 33, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 24}},
            (9, 24, 5, None),
        ),
        (
            {"prompt_tokens": 3, "completion_tokens": 5, "completion_tokens_details": {"reasoning_tokens": 4}},
            (3, 0, 5, 4),
        ),
        ({"prompt_tokens": 3, "completion_tokens": 5, "reasoning_tokens": 0}, (3, 0, 5, 0)),
        ({"prompt_tokens": "3", "completion_tokens": True, "prompt_tokens_details": 7}, (0, 0, 0, None)),
    ],
)
def test_cached_tokens_are_counted_apart_from_input_tokens(usage, expected):
    """Their sum is the number of prompt tokens."""
    counts = usage_from(usage)
    thinking_tokens = counts.get("output_tokens_details", {}).get("thinking_tokens")

    assert expected == (
        counts["input_tokens"],
        counts["cache_read_input_tokens"],
        counts["output_tokens"],
        thinking_tokens,
    )
