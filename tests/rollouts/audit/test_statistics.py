"""The numbers behind a verdict."""

import pytest

from proxy.rollouts.audit.statistics import ChanceModel, Pair, go_together, line_through, nearly_all_agree, no_chance


def pairs(recorded, scored) -> list[Pair]:
    return [Pair(at, one, two) for at, (one, two) in enumerate(zip(recorded, scored, strict=True))]


def test_a_value_like_all_others_tells_nothing():
    """Of a hundred tokens of which ninety are certain, ten are evidence."""
    values = [-0.001] * 90 + [-float(n) for n in range(1, 11)]
    both = pairs(values, values)
    likeness = ChanceModel(both, 0.01)

    assert [False] * 90 + [True] * 10 == [likeness.is_informative(pair) for pair in both]
    assert not no_chance(both[:90], likeness)
    assert no_chance(both[90:], likeness)


@pytest.mark.parametrize(("misses", "agree"), [(0, True), (2, True), (3, False)])
def test_a_tenth_may_miss(misses, agree):
    """The ends of stretches have no partner at an offset."""
    values = [-float(n) for n in range(20)]
    assert agree == nearly_all_agree(pairs([-100.0 - n for n in range(misses)] + values[misses:], values), 0.01)


def test_few_values_never_go_together():
    """A correlation of a handful is no evidence, nor is one of constants."""
    values = [-float(n) for n in range(30)]

    assert go_together(pairs(values, values))
    assert not go_together(pairs(values[:19], values[:19]))
    assert not go_together(pairs([1.0] * 30, [1.0] * 30))
    assert not go_together([])


def test_the_line_through_pairs():
    """Correlation, and the slope of recorded over scored."""
    assert pytest.approx((1.0, 2.0)) == line_through(pairs([2.0, 4.0, 6.0], [1.0, 2.0, 3.0]))
