"""The format `tinker`: shifted by one."""

from dataclasses import replace

import pytest
import worked
from forests import make_step

from proxy.export import Inexpressible


def test_worked_example():
    """All is from position 1 on; the input lacks the last token."""
    assert [
        {
            "model_input": [101, 102, 103, 201, 202, 9, 301, 302, 303, 304, 203],
            "target_tokens": [102, 103, 201, 202, 9, 301, 302, 303, 304, 203, 9],
            "logprobs": [0.0, 0.0, -0.5, -0.25, -0.125, 0.0, 0.0, 0.0, 0.0, -1.0, -0.0625],
            "advantages": [0.0, 0.0, 0.5, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.5, 0.5],
        }
    ] == worked.rows("tinker")


def test_no_advantage():
    """Without an advantage there is no datum."""
    with pytest.raises(Inexpressible, match="requires an advantage; rollout .* has none"):
        worked.rows("tinker", facts=replace(worked.FACTS, advantages=None))


def test_first_position():
    """What was sampled at the very first position would be lost, and is refused."""
    with pytest.raises(
        Inexpressible, match="requires a prompt before the first sampled token; rollout .* has a sequence without one"
    ):
        worked.rows("tinker", [make_step("a", [], [10, 20])])
