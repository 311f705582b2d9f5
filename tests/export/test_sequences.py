"""The format `sequences`: the canonical rows."""

from forests import make_choice, make_step

from proxy.export import FORMATS, Fill
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.sequence import Options

FACTS = RolloutFacts("r1", "g1", reward=0.5)


def test_rows():
    """There is one row for each branch, and a line for each step that nothing is trained of."""
    steps = [make_step("a", [1], [10]), make_step("b", [2], [20], problems=("echo",))]
    found = FORMATS["sequences"].rows(FACTS, steps, Options())

    assert [("r1", "g1", 0, [1, 10], 0.5)] == [
        (row["rollout_id"], row["group_id"], row["branch"], row["token_ids"], row["reward"]) for row in found.rows
    ]
    assert [{"step_id": "b", "why": "echo"}] == found.skipped


def test_empty():
    """A rollout without a single exact step has no rows; none is invented."""
    found = FORMATS["sequences"].rows(FACTS, [make_step("a", [1], make_choice(0, []))], Options())

    assert ([], [{"step_id": "a", "why": "no token was sampled"}]) == (found.rows, found.skipped)


def test_fill():
    """Where nothing was sampled there is null, or a fill if one was asked for."""
    steps = [make_step("a", [1], make_choice(0, [1024]))]
    plain, filled = (
        FORMATS["sequences"].rows(FACTS, steps, Options(), Fill(prompt_logprob=value)).rows[0]["logprobs"]
        for value in (None, 0.0)
    )

    assert ([None, -1.0], [0.0, -1.0]) == (plain, filled)
