"""Linear rollouts in mode `append`, over every chat template: one sequence, or a known reason."""

from functools import cache

from continuation_table import Outcome, combinations, outcome, table

# Where the template writes another stop token than was sampled, or content of a turn after the tool results.
REFUSED = {
    "diffusion_gemma": "other_stop",
    "gemma4": "other_stop",
    "gemma4_v3": "other_stop",
    "gemma4_v4": "other_stop",
    "gemma4_v5": "other_stop",
    "gptoss": "other_stop",
}


@cache
def outcomes() -> list[Outcome]:
    return [outcome(combination) for combination in combinations()]


def test_linear_rollouts_are_one_sequence():
    """In mode `append`, at least 90 % of the combinations of template, tools, content and reasoning are one sequence."""
    lines = table(outcomes())
    whole = sum(one.is_one_sequence for one in outcomes())
    assert whole >= 0.9 * len(outcomes()), "\n".join(lines)
    assert len({one.combination.template for one in outcomes()}) > 35


def test_no_linear_rollout_is_wrong():
    """No bridge of a linear rollout differs from what the template writes."""
    assert [] == [one.combination for one in outcomes() if one.wrong]


def test_refusals_are_known():
    """A linear rollout is several sequences only with the templates whose turns end differently when they are rendered."""
    several = {one.combination.template: one for one in outcomes() if not one.is_one_sequence}
    assert set(REFUSED) == set(several)
    for name, reason in REFUSED.items():
        assert reason in several[name].refused, several[name]
