"""The prompts of requests."""

import pytest

from proxy.simulator.errors import RefusedError
from proxy.simulator.options import Options
from proxy.simulator.prompts import room_for, text_to_tokenize
from proxy.simulator.requests import Common


@pytest.mark.parametrize(("length", "asked", "room"), [(1, None, 99), (1, 5, 5), (99, 5, 1), (60, 100, 40)])
def test_a_reply_has_the_room_that_is_left(length, asked, room):
    """A reply may have as many tokens as asked, but no more than the window leaves."""
    assert room == room_for(length, asked, Common(), Options(max_model_len=100))


@pytest.mark.parametrize(
    ("length", "asked", "least", "param"),
    [
        (101, 5, 0, "input_tokens"),
        (100, 5, 0, "max_tokens"),
        (1, 101, 0, "max_tokens"),
        (1, 0, 0, "max_tokens"),
        (1, 5, 6, "min_tokens"),
    ],
)
def test_what_does_not_fit_is_refused(length, asked, least, param):
    """A prompt or a length that the window cannot hold is refused, and the refusal names the field."""
    with pytest.raises(RefusedError) as refused:
        room_for(length, asked, Common(min_tokens=least), Options(max_model_len=100))

    assert param == refused.value.body["error"]["param"]


def test_a_text_is_given_or_rendered():
    """The text to tokenize is the prompt itself, or the messages rendered."""
    assert text_to_tokenize({"prompt": "Hi"}) == "Hi"
    assert text_to_tokenize({"messages": [{"role": "user", "content": "Hi"}]}).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("body", [{}, {"prompt": [1]}])
def test_a_body_without_a_text_is_refused(body):
    """A body with neither messages nor a prompt that is a string is refused."""
    with pytest.raises(RefusedError) as refusal:
        text_to_tokenize(body)

    assert refusal.value.status == 400
