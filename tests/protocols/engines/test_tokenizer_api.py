"""Engines' tokenize endpoints: the request that counts a prompt's tokens, and its response."""

import pytest

from proxy.protocols.engines import ENGINES
from proxy.protocols.engines.base import FollowUpRequest
from proxy.protocols.engines.tokenizer_api import Counted, read_count, token_count_request

CHAT = {"messages": [], "tools": [{}], "temperature": 1, "model": "m", "chat_template_kwargs": {"a": 1}, "stream": True}


@pytest.mark.parametrize(
    ("kind", "dialect", "body", "expected"),
    [
        (
            "vllm",
            "chat",
            CHAT,
            FollowUpRequest("/tokenize", {"messages": [], "tools": [{}], "chat_template_kwargs": {"a": 1}}),
        ),
        ("sglang", "chat", {"messages": []}, FollowUpRequest("/v1/tokenize", {"messages": []})),
        (
            "vllm",
            "chat",
            {"messages": [], "reasoning_effort": "none"},
            FollowUpRequest(
                "/tokenize",
                {"messages": [], "chat_template_kwargs": {"reasoning_effort": "none", "enable_thinking": False}},
            ),
        ),
        (
            "vllm",
            "chat",
            {"messages": [], "reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False, "a": 1}},
            FollowUpRequest(
                "/tokenize",
                {
                    "messages": [],
                    "chat_template_kwargs": {"reasoning_effort": "low", "enable_thinking": False, "a": 1},
                },
            ),
        ),
        (
            "sglang",
            "chat",
            {"messages": [], "reasoning_effort": "low"},
            FollowUpRequest("/v1/tokenize", {"messages": [], "reasoning_effort": "low"}),
        ),
        ("vllm", "completions", {"prompt": "a"}, FollowUpRequest("/tokenize", {"prompt": "a"})),
        ("vllm", "completions", {"prompt": [1, 2]}, None),
        ("llamacpp", "chat", CHAT, None),
        ("plain", "chat", CHAT, None),
    ],
)
def test_the_count_request_has_the_fields_that_shape_the_prompt(kind, dialect, body, expected):
    """None if the engine has no such endpoint."""
    assert expected == token_count_request(ENGINES[kind], dialect, body)


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
    assert expected == read_count(response)
