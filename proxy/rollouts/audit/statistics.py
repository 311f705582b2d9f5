"""Statistics of two sequences of numbers: informative values, the probability of chance agreement, correlation."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log, sqrt

_RARE = 0.05  # a token is informative if at most this share of the other values would agree with it as well
ONCE_IN_A_THOUSAND, NEVER = 1e-3, 1e-5
_MISSES = 0.1  # the share of informative tokens that may disagree at an offset: the ends of spans have no counterpart
TOGETHER = 0.8  # a correlation that 20 unrelated pairs reach about once in 30 000 times
_ENOUGH = 20


@dataclass(frozen=True, slots=True)
class Pair:
    """One token's recorded and scored logprob."""

    position: int
    recorded: float
    scored: float

    @property
    def size(self) -> float:
        """The size of the difference."""
        return abs(self.recorded - self.scored)


class ChanceModel:
    """How common each recorded value is among the scored ones."""

    def __init__(self, pairs: Sequence[Pair], tolerance: float) -> None:
        self.tolerance = tolerance
        self._values = sorted(pair.scored for pair in pairs)

    def __repr__(self) -> str:
        return f"<ChanceModel of {len(self._values)} values, tolerance {self.tolerance}>"

    def is_informative(self, pair: Pair) -> bool:
        """Return whether the agreement of this token is evidence."""
        return self._others(pair) <= _RARE * len(self._values)

    def log_chance(self, pair: Pair) -> float:
        """Return the logarithm of the odds that a value drawn from the scored ones agrees with this token."""
        return log(max(self._others(pair), 1) / (len(self._values) + 1))

    def _others(self, pair: Pair) -> int:
        """Return the number of scored values, other than its own, within the tolerance of its recorded one."""
        low = bisect_left(self._values, pair.recorded - self.tolerance)
        high = bisect_right(self._values, pair.recorded + self.tolerance)
        return high - low - (pair.size <= self.tolerance)


def no_chance(pairs: Iterable[Pair], model: ChanceModel, below: float = ONCE_IN_A_THOUSAND) -> bool:
    """Return whether the probability that these tokens agree by chance is below `below`."""
    return sum(model.log_chance(pair) for pair in pairs if model.is_informative(pair)) <= log(below)


def nearly_all_agree(pairs: Sequence[Pair], tolerance: float) -> bool:
    """Return whether nearly all informative tokens agree, beyond chance."""
    model = ChanceModel(pairs, tolerance)
    informative = [pair for pair in pairs if model.is_informative(pair)]
    agreeing = [pair for pair in informative if pair.size <= tolerance]
    return len(informative) - len(agreeing) <= max(1, _MISSES * len(informative)) and no_chance(agreeing, model)


def go_together(pairs: Sequence[Pair]) -> bool:
    """Return whether two sequences of numbers correlate, with enough values to decide."""
    return len(pairs) >= _ENOUGH and line_through(pairs)[0] >= TOGETHER


def line_through(pairs: Sequence[Pair]) -> tuple[float, float]:
    """Return the correlation of recorded and scored values, and the slope of recorded over scored; 0 if undefined."""
    count = len(pairs)
    x_mean = sum(pair.scored for pair in pairs) / count
    y_mean = sum(pair.recorded for pair in pairs) / count
    xx = sum((pair.scored - x_mean) ** 2 for pair in pairs)
    yy = sum((pair.recorded - y_mean) ** 2 for pair in pairs)
    xy = sum((pair.scored - x_mean) * (pair.recorded - y_mean) for pair in pairs)
    if xx <= 0 or yy <= 0:
        return 0.0, 0.0
    return xy / sqrt(xx * yy), xy / xx
