"""What holds for every format."""

import pytest
from forests import make_step

from proxy.export import FORMATS
from proxy.export.base import skipped_rows
from proxy.trajectory.rollout import RolloutFacts
from proxy.trajectory.sequence import Options, Skipped


@pytest.mark.parametrize("name", FORMATS)
def test_names(name):
    """A format is known by its own name."""
    assert name == FORMATS[name].name


@pytest.mark.parametrize("name", FORMATS)
def test_repeatable(name):
    """An export changes nothing: the same rollout gives the same rows."""
    steps = [make_step("a", [1], [10], [20]), make_step("b", [1, 10, 2], [30])]
    first, again = (FORMATS[name].rows(RolloutFacts("r1"), steps, Options()) for _ in range(2))

    assert first == again


def test_report():
    """What was left out is told by its step id and the reason."""
    assert [{"step_id": "a", "why": "echo"}] == skipped_rows([Skipped("a", "echo")])
