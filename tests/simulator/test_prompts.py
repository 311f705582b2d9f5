"""The prompts of requests."""

import pytest

from proxy.simulator.errors import RequestError
from proxy.simulator.options import Options
from proxy.simulator.prompts import text_to_tokenize, vllm_max_tokens
from proxy.simulator.requests import CommonFields


@pytest.mark.parametrize(("length", "requested", "max_tokens"), [(1, None, 99), (1, 5, 5), (99, 5, 1), (60, 100, 40)])
def test_max_tokens_fits_into_the_context_window(length, requested, max_tokens):
    """A reply may have as many tokens as requested, up to the remaining tokens of the context window."""
    assert max_tokens == vllm_max_tokens(length, requested, CommonFields(), Options(max_model_len=100))


@pytest.mark.parametrize(
    ("length", "requested", "min_tokens", "param"),
    [
        (101, 5, 0, "input_tokens"),
        (100, 5, 0, "max_tokens"),
        (1, 101, 0, "max_tokens"),
        (1, 0, 0, "max_tokens"),
        (1, 5, 6, "min_tokens"),
    ],
)
def test_a_request_that_does_not_fit_is_an_error(length, requested, min_tokens, param):
    """The error for a prompt or a length that does not fit into the context window names the field."""
    with pytest.raises(RequestError) as error:
        vllm_max_tokens(length, requested, CommonFields(min_tokens=min_tokens), Options(max_model_len=100))

    assert param == error.value.body["error"]["param"]


def test_the_text_is_the_prompt_or_rendered_messages():
    """The text to tokenize is the prompt itself or the rendered messages."""
    assert text_to_tokenize({"prompt": "Hi"}) == "Hi"
    assert text_to_tokenize({"messages": [{"role": "user", "content": "Hi"}]}).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("body", [{}, {"prompt": [1]}])
def test_a_body_without_text_is_an_error(body):
    """A body with neither messages nor a prompt that is a string is a 400 error."""
    with pytest.raises(RequestError) as error:
        text_to_tokenize(body)

    assert error.value.status == 400
