"""Linear rollouts over every chat template: one sequence in mode `append`, and the truth in mode `faithful`."""

from functools import cache

from tests.support.continuation_table import Combination, Outcome, combinations, outcome, table


@cache
def outcomes() -> list[Outcome]:
    return [outcome(combination) for combination in combinations()]


def test_linear_rollouts_are_one_sequence():
    """In mode `append`, from the first turn of a process on.

    With and without tools, reasoning, and content beside calls; also if the limit or a stop string cuts a reply, if all of
    it is reasoning, and if the agent sends text parts as one text.
    """
    assert [one.combination for one in outcomes() if not one.is_one_sequence] == [], "\n".join(table(outcomes()))
    assert len({one.combination.template for one in outcomes()}) > 35


def test_no_linear_rollout_is_wrong():
    """No bridge of a linear rollout differs from what the template writes."""
    assert [one.combination for one in outcomes() if one.wrong] == []


def test_the_turns_of_gpt_oss_fork_in_faithful():
    """Its model ends an answer with another token than its template writes for it in the history."""
    assert outcome(Combination("gptoss"), "faithful").refused == {"other_stop": 5}
    assert outcome(Combination("gptoss", tools=True), "faithful").refused == {"other_stop": 1}
