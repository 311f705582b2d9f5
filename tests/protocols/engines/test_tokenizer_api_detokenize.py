"""Detokenizing: where each engine tells the text of ids."""

import orjson
import pytest
from recorded import load

from proxy.protocols.engines.tokenizer_api import read_text, text_request


@pytest.mark.parametrize(
    ("kind", "path", "answer"),
    [
        ("vllm", "/detokenize", {"prompt": "hi"}),
        ("sglang", "/v1/detokenize", {"text": "hi"}),
        ("llamacpp", "/detokenize", {"content": "hi"}),
    ],
)
def test_each_engine_has_its_own_name_for_it(kind, path, answer):
    """All take `tokens`."""
    asked = text_request(kind, (1, 2))

    assert (path, {"tokens": [1, 2]}) == (asked.path, asked.body)
    assert "hi" == read_text(kind, answer)


def test_the_recorded_answer_of_vllm_is_read():
    """As it was asked for."""
    recorded = load("detokenize")

    assert (recorded.path, recorded.body["tokens"]) == (
        text_request("vllm", recorded.body["tokens"]).path,
        text_request("vllm", recorded.body["tokens"]).body["tokens"],
    )
    assert read_text("vllm", orjson.loads(recorded.response))


@pytest.mark.parametrize("answer", [None, [], {}, {"prompt": 7}])
def test_what_is_no_text_is_none(answer):
    """An engine that cannot be asked has none."""
    assert read_text("vllm", answer) is None
    assert (None, None) == (text_request("plain", [1]), read_text("plain", {"prompt": "hi"}))
