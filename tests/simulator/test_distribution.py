"""What may come after a prefix, and how likely it is."""

import math
from array import array

from hypothesis import given
from hypothesis import strategies as st

from proxy.simulator.distribution import Prefix, load_distribution, mix, prefix_of

MODEL = load_distribution()
SIZE = 2_048
IDS = st.lists(st.integers(0, SIZE - 1), max_size=20)


@given(IDS)
def test_the_chances_sum_to_one(ids):
    """After any prefix, the chances of all tokens sum to one."""
    odds = MODEL.odds(prefix_of(ids))

    assert math.isclose(1.0, math.fsum(odds.chance(token) for token in range(SIZE)), abs_tol=1e-12)


@given(IDS, st.integers(0, SIZE - 1))
def test_a_logprob_is_a_negative_float32(ids, token):
    """Each logprob is below zero, finite, and loses nothing as a float32."""
    logprob = MODEL.odds(prefix_of(ids)).logprob(token)

    assert logprob < 0
    assert logprob == array("f", [logprob])[0]


@given(IDS, IDS)
def test_only_the_ids_count(first, second):
    """The distribution depends on the prefix ids alone, however they were put together."""
    grown = prefix_of(first)
    for token in second:
        grown = grown.then(token)

    assert MODEL.odds(prefix_of([*first, *second])) == MODEL.odds(grown)


def test_an_earlier_id_moves_the_odds():
    """A change of any id before moves the distribution."""
    assert MODEL.odds(prefix_of([1, 300])) != MODEL.odds(prefix_of([2, 300]))


@given(IDS, st.integers(0, 30))
def test_the_best_are_the_most_likely(ids, count):
    """The best tokens are those of the greatest chances, in order, each once."""
    odds = MODEL.odds(prefix_of(ids))
    best = odds.best(count)

    assert sorted(map(odds.chance, range(SIZE)), reverse=True)[:count] == [odds.chance(token) for token in best]
    assert len(set(best)) == count


@given(IDS, st.integers(0, SIZE - 1))
def test_the_rank_counts_the_more_likely(ids, token):
    """A token's rank is one more than the number of tokens that are more likely."""
    odds = MODEL.odds(prefix_of(ids))

    assert 1 + sum(odds.chance(other) > odds.chance(token) for other in range(SIZE)) == odds.rank(token)


def test_an_empty_prefix_begins_a_sentence():
    """After nothing at all, something that begins a sentence is likely."""
    assert len(MODEL.odds(Prefix()).likely) == 8


@given(st.integers())
def test_mixing_stays_within_64_bits(value):
    """Mixed numbers are 64 bits wide, whatever went in."""
    assert 0 <= mix(value) < 1 << 64
