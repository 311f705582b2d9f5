"""The statistics behind a verdict."""

import pytest

from proxy.rollouts.audit.statistics import ChanceModel, Pair, go_together, line_through, nearly_all_agree, no_chance


def pairs(recorded, scored) -> list[Pair]:
    return [Pair(index, *values) for index, values in enumerate(zip(recorded, scored, strict=True))]


def test_values_that_most_tokens_have_are_not_informative():
    """Of 100 tokens, 90 of them certain, 10 are evidence."""
    values = [-0.001] * 90 + [-float(n) for n in range(1, 11)]
    both = pairs(values, values)
    likeness = ChanceModel(both, 0.01)

    assert [False] * 90 + [True] * 10 == [likeness.is_informative(pair) for pair in both]
    assert not no_chance(both[:90], likeness)
    assert no_chance(both[90:], likeness)


@pytest.mark.parametrize(("misses", "agree"), [(0, True), (2, True), (3, False)])
def test_at_most_a_tenth_of_the_pairs_may_differ(misses, agree):
    """The ends of spans have no partner at an offset."""
    values = [-float(n) for n in range(20)]
    assert agree == nearly_all_agree(pairs([-100.0 - n for n in range(misses)] + values[misses:], values), 0.01)


def test_few_or_constant_values_never_correlate():
    values = [-float(n) for n in range(30)]

    assert go_together(pairs(values, values))
    assert not go_together(pairs(values[:19], values[:19]))
    assert not go_together(pairs([1.0] * 30, [1.0] * 30))
    assert not go_together([])


def test_the_correlation_and_slope_of_pairs():
    assert pytest.approx((1.0, 2.0)) == line_through(pairs([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]))
