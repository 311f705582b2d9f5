"""The engine's defaults for sampling parameters that a request does not set."""

import orjson
import pytest
from tests.support.recorded import load, load_http

from proxy.protocols.engines.sampling_defaults import read_props, read_rendered, sampling_defaults_request


def test_vllms_defaults_are_read_from_a_rendered_chat_request():
    """The recorded request sets only the temperature."""
    rendered = orjson.loads(load("scale_out/render_chat").response)

    assert "/v1/chat/completions/render" == sampling_defaults_request("vllm").path
    assert {
        "temperature": 1.0, "top_p": 1.0, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    } == read_rendered(rendered)  # fmt: skip


def test_llamacpps_defaults_are_read_from_its_properties():
    """By the names of request fields."""
    found = read_props(orjson.loads(load_http("llamacpp", "get_props").response))

    assert ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty") == tuple(found)
    assert (pytest.approx(0.8), 40) == (found["temperature"], found["top_k"])


@pytest.mark.parametrize("kind", ["sglang", "llamacpp", "plain", "auto"])
def test_other_engines_have_no_request_for_their_defaults(kind):
    assert sampling_defaults_request(kind) is None


@pytest.mark.parametrize(
    "response", [None, [], {}, {"sampling_params": "x"}, {"sampling_params": {"temperature": "1"}}]
)
def test_a_response_of_another_shape_has_no_defaults(response):
    assert read_rendered(response) is None
    assert read_props({"default_generation_settings": response}) is None
