"""Logprobs, ends and errors of SGLang's responses."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.simulator.errors import invalid_value, sglang_body
from proxy.simulator.model import Token
from proxy.simulator.sampler import load_next_token_model, prefix_from
from proxy.simulator.sglang import LogprobFormatter, matched_stop, tempered
from proxy.simulator.tokenizer import load_tokenizer, load_vocabulary

SIZE = len(load_vocabulary()["counts"])
IDS = st.lists(st.integers(0, SIZE - 1), max_size=5)
DISTRIBUTION = load_next_token_model().distribution(prefix_from([5]))


def token(token_id=7, finish=None, stop=None):
    return Token(token_id, "", (), DISTRIBUTION, finish, stop)


def test_an_error_is_flat():
    """An error body is not nested and has no param."""
    assert list(sglang_body(invalid_value("No.", "x")).items()) == [
        ("object", "error"),
        ("message", "No. (parameter=x)"),
        ("type", "BadRequestError"),
        ("param", None),
        ("code", 400),
    ]


@pytest.mark.parametrize(
    ("last", "matched"),
    [
        (token(finish="stop"), 7),
        (token(finish="stop", stop="end"), "end"),
        (token(finish="length"), None),
        (token(), None),
    ],
)
def test_matched_stop_is_an_id_or_a_string(last, matched):
    """matched_stop is the id of an end token, a stop string, or None."""
    assert matched == matched_stop(last)


def test_an_incomplete_character_has_its_own_bytes():
    """The `bytes` of a token are its own, even if they are not valid UTF-8; its text then is U+FFFD."""
    formatter = LogprobFormatter(load_tokenizer(), 1.0)
    entry = formatter.chat_entry(token(0xF0), 0)

    assert (entry["bytes"], entry["token"], entry["top_logprobs"]) == ([0xF0], "\ufffd", [])


def test_entries_have_texts_on_request():
    """An entry is a logprob, an id, and the text or null; alternatives are ordered by probability."""
    formatter = LogprobFormatter(load_tokenizer(), 1.0)
    keys = formatter.output([token()], 3, with_text=False)
    likely = [logprob for logprob, _, _ in keys["output_top_logprobs"][0]]

    assert keys["output_token_logprobs"] == [[DISTRIBUTION.logprob(7), 7, None]]
    assert formatter.sampled(token(), with_text=True)[2] == load_tokenizer().decode([7])
    assert likely == sorted(likely, reverse=True)
    assert keys["output_token_logprobs_length"] == 1


@given(IDS, st.sampled_from([0.3, 0.7, 1.0, 1.5]))
def test_probabilities_sum_to_one(ids, temperature):
    """At any temperature the probabilities of the whole vocabulary sum to one."""
    logprob = tempered(load_next_token_model().distribution(prefix_from(ids)), temperature)

    assert math.fsum(math.exp(logprob(token)) for token in range(SIZE)) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_temperatures_0_and_1_change_nothing(temperature):
    """At temperatures 0 and 1 logprobs are exactly the model's own."""
    distribution = load_next_token_model().distribution(prefix_from([5]))
    logprob = tempered(distribution, temperature)

    assert all(distribution.logprob(token) == logprob(token) for token in range(SIZE))


def test_a_low_temperature_raises_the_most_likely_token():
    """The lower the temperature, the higher the logprob of the most likely token."""
    distribution = load_next_token_model().distribution(prefix_from([5]))
    (top,) = distribution.top(1)
    logprobs = [tempered(distribution, temperature)(top) for temperature in (0.0001, 0.5, 1.0, 2.0)]

    assert logprobs == sorted(logprobs, reverse=True)
    assert logprobs[0] == pytest.approx(0, abs=1e-6)
