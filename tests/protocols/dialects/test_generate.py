"""vLLM's generate endpoint."""

import pytest

from proxy.errors import NotFound
from proxy.protocols.accumulators import GenerateAccumulator
from proxy.protocols.dialects import DIALECTS
from proxy.protocols.dialects.base import ResponseOptions
from proxy.protocols.dialects.generate import Generate


def test_response_options_are_read_from_a_generate_request():
    """Logprobs and n are sampling parameters; `return_token_ids` requests the ids of the prompt."""
    options = Generate().response_options(
        {
            "sampling_params": {"n": 2, "logprobs": 0},
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
        }
    )

    assert options == ResponseOptions(True, True, True, 2, 2)
    assert isinstance(Generate().accumulator(), GenerateAccumulator)
    assert b'"type":"not_found_error"' in Generate().error(NotFound("x"))
    assert isinstance(DIALECTS["/inference/v1/generate"], Generate)


@pytest.mark.parametrize("sampling", [None, [], 7, "n", {}])
def test_a_request_without_sampling_parameters_has_one_sample_and_no_logprobs(sampling):
    """Sampling parameters of another type are ignored."""
    options = Generate().response_options({"token_ids": [1], "sampling_params": sampling, "n": 5, "logprobs": 1})

    assert options == ResponseOptions(False, False, False, 1, 1)


def test_sampling_parameters_are_read_from_their_object():
    """Without `max_completion_tokens`, which vLLM ignores there."""
    sampling_params = {"temperature": 0.5, "max_completion_tokens": 9}

    assert Generate().sampling({"sampling_params": sampling_params, "temperature": 1.0}) == {"temperature": 0.5}
    assert Generate().sampling({"temperature": 1.0}) == {}


def test_sampling_parameters_are_set_in_a_copy_of_their_object():
    body = {"sampling_params": {"temperature": 0.5, "top_p": 0.9, "max_tokens": 7}}
    fields = {"temperature": 1.0, "max_completion_tokens": 9}

    assert ({"sampling_params": {"temperature": 1.0, "max_tokens": 9}}, set()) == Generate().place_sampling(
        body, fields, {"top_p"}
    )
    assert body == {"sampling_params": {"temperature": 0.5, "top_p": 0.9, "max_tokens": 7}}


@pytest.mark.parametrize("body", [{}, {"sampling_params": None}, {"sampling_params": 7}])
def test_a_body_without_sampling_parameters_is_not_changed(body):
    """vLLM rejects it."""
    assert ({}, set()) == Generate().place_sampling(body, {"temperature": 1.0}, {"top_p"})


def test_setting_no_sampling_parameters_changes_nothing():
    assert ({}, set()) == Generate().place_sampling({"sampling_params": {}}, {}, set())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_other_dialects_have_sampling_parameters_on_the_top_level(path):
    body = {"temperature": 0.5}

    assert body == DIALECTS[path].sampling(body)
    assert DIALECTS[path].place_sampling(body, {"top_p": 1.0}, {"seed"}) == ({"top_p": 1.0}, {"seed"})
