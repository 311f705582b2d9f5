"""Engines' detokenize endpoints."""

import orjson
import pytest
from tests.support.recorded import load

from proxy.protocols.engines import ENGINES
from proxy.protocols.engines.tokenizer_api import read_text, text_request


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

    assert (path, {"tokens": [1, 2], **special}) == (request.path, request.body)
    assert "hi" == read_text(ENGINES[kind], response)


def test_the_recorded_response_of_vllm_is_read():
    recorded = load("detokenize")

    assert (recorded.path, recorded.body["tokens"]) == (
        text_request(ENGINES["vllm"], recorded.body["tokens"]).path,
        text_request(ENGINES["vllm"], recorded.body["tokens"]).body["tokens"],
    )
    assert read_text(ENGINES["vllm"], orjson.loads(recorded.response))


@pytest.mark.parametrize("response", [None, [], {}, {"prompt": 7}])
def test_a_response_without_text_is_none(response):
    """An engine without the endpoint returns None, too."""
    assert read_text(ENGINES["vllm"], response) is None
    assert (None, None) == (text_request(ENGINES["plain"], [1]), read_text(ENGINES["plain"], {"prompt": "hi"}))
