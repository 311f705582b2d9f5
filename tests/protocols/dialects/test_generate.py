"""vLLM's generate endpoint."""

import pytest

from proxy.errors import NotFound
from proxy.protocols.accumulators import GenerateAccumulator
from proxy.protocols.dialects import DIALECTS
from proxy.protocols.dialects.generate import Generate


def test_what_a_client_asks_to_see():
    """Logprobs and the number of samples stand with the sampling parameters; the ids asked for are the prompt's."""
    asked = Generate().response_options(
        {
            "sampling_params": {"n": 2, "logprobs": 0},
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
        }
    )

    assert (True, True, True, 2, 2) == (asked.token_ids, asked.logprobs, asked.usage, asked.samples, asked.choices)
    assert isinstance(Generate().accumulator(), GenerateAccumulator)
    assert b'"type":"not_found_error"' in Generate().error(NotFound("x"))
    assert isinstance(DIALECTS["/inference/v1/generate"], Generate)


@pytest.mark.parametrize("sampling", [None, [], 7, "n", {}])
def test_a_client_that_says_nothing_asks_for_one_sample_and_no_more(sampling):
    """Whatever stands where the sampling parameters should."""
    asked = Generate().response_options({"token_ids": [1], "sampling_params": sampling, "n": 5, "logprobs": 1})

    assert (False, False, False, 1, 1) == (asked.token_ids, asked.logprobs, asked.usage, asked.samples, asked.choices)


def test_sampling_parameters_are_read_from_their_object():
    """Without the spelling of the bound on tokens that vLLM does not know there."""
    given = {"temperature": 0.5, "max_completion_tokens": 9}

    assert {"temperature": 0.5} == Generate().sampling({"sampling_params": given, "temperature": 1.0})
    assert {} == Generate().sampling({"temperature": 1.0})


def test_sampling_parameters_are_placed_in_their_object():
    """A new one: the client's is left as it is."""
    body = {"sampling_params": {"temperature": 0.5, "top_p": 0.9, "max_tokens": 7}}
    fields = {"temperature": 1.0, "max_completion_tokens": 9}

    assert ({"sampling_params": {"temperature": 1.0, "max_tokens": 9}}, set()) == Generate().place_sampling(
        body, fields, {"top_p"}
    )
    assert {"sampling_params": {"temperature": 0.5, "top_p": 0.9, "max_tokens": 7}} == body


@pytest.mark.parametrize("body", [{}, {"sampling_params": None}, {"sampling_params": 7}])
def test_a_body_without_sampling_parameters_is_left_alone(body):
    """vLLM refuses it, and must go on doing so."""
    assert ({}, set()) == Generate().place_sampling(body, {"temperature": 1.0}, {"top_p"})


def test_nothing_to_place_changes_nothing():
    """Not even by a copy."""
    assert ({}, set()) == Generate().place_sampling({"sampling_params": {}}, {}, set())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_other_dialects_have_them_on_the_top_level(path):
    """Where fields are set and unset as they are."""
    body = {"temperature": 0.5}

    assert body == DIALECTS[path].sampling(body)
    assert ({"top_p": 1.0}, {"seed"}) == DIALECTS[path].place_sampling(body, {"top_p": 1.0}, {"seed"})
