"""Logprobs after temperature."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.simulator.distribution import load_distribution, prefix_of
from proxy.simulator.tempered import Tempered
from proxy.simulator.tokenizer import load_vocabulary

SIZE = len(load_vocabulary()["counts"])
IDS = st.lists(st.integers(0, SIZE - 1), max_size=5)


@given(IDS, st.sampled_from([0.3, 0.7, 1.0, 1.5]))
def test_the_chances_sum_to_one(ids, temperature):
    """At any temperature the probabilities of the whole vocabulary sum to one."""
    tempered = Tempered(load_distribution().odds(prefix_of(ids)), temperature)

    assert math.fsum(math.exp(tempered.logprob(token)) for token in range(SIZE)) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_zero_and_one_change_nothing(temperature):
    """Greedy calls and those at temperature 1 are told the model's own logprobs, bit by bit."""
    odds = load_distribution().odds(prefix_of([5]))

    assert all(odds.logprob(token) == Tempered(odds, temperature).logprob(token) for token in range(SIZE))


def test_a_low_temperature_lifts_the_likely():
    """Below 1 the likeliest token gets likelier, however low; above 1 less so."""
    odds = load_distribution().odds(prefix_of([5]))
    (best,) = odds.best(1)
    logprobs = [Tempered(odds, temperature).logprob(best) for temperature in (0.0001, 0.5, 1.0, 2.0)]

    assert logprobs == sorted(logprobs, reverse=True)
    assert logprobs[0] == pytest.approx(0, abs=1e-6)
