"""Sampling defaults: what an engine samples with where a request leaves a field out."""

import orjson
import pytest
from recorded import load, load_http

from proxy.protocols.engines.sampling_defaults import read_props, read_rendered, sampling_defaults_request


def test_vllm_shows_them_in_what_it_makes_of_a_chat_request():
    """As recorded: the fields of a request that says nothing of them but the temperature."""
    rendered = orjson.loads(load("scale_out/render_chat").response)

    assert "/v1/chat/completions/render" == sampling_defaults_request("vllm").path
    assert {
        "temperature": 1.0, "top_p": 1.0, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    } == read_rendered(rendered)  # fmt: skip


def test_llamacpp_shows_them_in_its_properties():
    """As recorded, by the names that requests have."""
    found = read_props(orjson.loads(load_http("llamacpp", "get_props").response))

    assert ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty") == tuple(found)
    assert (pytest.approx(0.8), 40) == (found["temperature"], found["top_k"])


@pytest.mark.parametrize("kind", ["sglang", "llamacpp", "plain", "auto"])
def test_other_engines_are_not_asked(kind):
    """No request of theirs shows it."""
    assert sampling_defaults_request(kind) is None


@pytest.mark.parametrize("answer", [None, [], {}, {"sampling_params": "x"}, {"sampling_params": {"temperature": "1"}}])
def test_an_answer_of_another_shape_has_none(answer):
    """A default that cannot be read is unknown."""
    assert read_rendered(answer) is None
    assert read_props({"default_generation_settings": answer}) is None
