"""Engines' tokenizer endpoints: the request that counts a prompt's tokens, the one for the text of ids, and their responses."""

import orjson
import pytest
from tests.support.recorded import load

from proxy.protocols.engines import ENGINES
from proxy.protocols.engines.base import FollowUpRequest
from proxy.protocols.engines.tokenizer_api import Counted, read_count, read_text, text_request, token_count_request

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
