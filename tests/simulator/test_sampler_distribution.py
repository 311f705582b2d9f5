"""The probability of each token after a prefix."""

import math
from array import array

from hypothesis import given
from hypothesis import strategies as st

from proxy.simulator.sampler import Prefix, load_next_token_model, mix, prefix_from

MODEL = load_next_token_model()
SIZE = 2_048
IDS = st.lists(st.integers(0, SIZE - 1), max_size=20)


@given(IDS)
def test_probabilities_sum_to_one(ids):
    """After any prefix, the probabilities of all tokens sum to one."""
    distribution = MODEL.distribution(prefix_from(ids))

    assert math.isclose(1.0, math.fsum(distribution.probability(token) for token in range(SIZE)), abs_tol=1e-12)


@given(IDS, st.integers(0, SIZE - 1))
def test_a_logprob_is_a_negative_float32(ids, token):
    """Each logprob is negative, finite and exact in float32."""
    logprob = MODEL.distribution(prefix_from(ids)).logprob(token)

    assert logprob < 0
    assert logprob == array("f", [logprob])[0]


@given(IDS, IDS)
def test_the_distribution_depends_on_the_ids_alone(first, second):
    """A prefix that is extended token by token has the same distribution as one built at once."""
    extended = prefix_from(first)
    for token in second:
        extended = extended.with_token(token)

    assert MODEL.distribution(prefix_from([*first, *second])) == MODEL.distribution(extended)


def test_an_earlier_id_changes_the_distribution():
    """An id before the last one changes the distribution."""
    assert MODEL.distribution(prefix_from([1, 300])) != MODEL.distribution(prefix_from([2, 300]))


@given(IDS, st.integers(0, 30))
def test_top_tokens_are_the_most_likely(ids, count):
    """The top tokens have the highest probabilities, in descending order, each token once."""
    distribution = MODEL.distribution(prefix_from(ids))
    top = distribution.top(count)
    highest = sorted(map(distribution.probability, range(SIZE)), reverse=True)[:count]

    assert highest == [distribution.probability(token) for token in top]
    assert len(set(top)) == count


@given(IDS, st.integers(0, SIZE - 1))
def test_the_rank_counts_more_likely_tokens(ids, token):
    """A token's rank is one more than the number of more likely tokens."""
    distribution = MODEL.distribution(prefix_from(ids))
    probability = distribution.probability(token)

    assert 1 + sum(distribution.probability(other) > probability for other in range(SIZE)) == distribution.rank(token)


def test_an_empty_prefix_begins_a_sentence():
    """After an empty prefix, eight tokens that begin sentences are likely."""
    assert len(MODEL.distribution(Prefix()).likely) == 8


@given(st.integers())
def test_mixing_stays_within_64_bits(value):
    """A mixed number has at most 64 bits for any input."""
    assert 0 <= mix(value) < 1 << 64
