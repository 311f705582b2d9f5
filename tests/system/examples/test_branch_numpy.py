"""examples/branch_numpy.py: advantages of branches learn what whole rollouts of as many tokens do not."""

import bigram_engine
import branch_numpy
import numpy as np
import pytest
from tests.support.fakes import proxying

from tokentape import AsyncClient


async def test_branches_learn_faster_than_whole_rollouts(store, tmp_path, whole, capsys):
    """With the same number of sampled tokens; calls that are repeated sample none. The rows train each of them once."""
    tokens = 2000 if whole else 700
    with bigram_engine.serving("127.0.0.1", 0, 7, branch_numpy.CONTEXT) as engine:
        async with proxying(engine, store) as served:
            out = tmp_path / "branches.png"
            curves = await branch_numpy.compare(served.url, engine, runs=1, tokens=tokens, rate=30.0, out=out)
            async with AsyncClient(served.url) as client:
                counts = [rollout["counts"] async for rollout in client.rollouts()]
    (whole_rollouts,), (branches,) = curves.values()

    assert whole_rollouts[-1][0] == branches[-1][0] >= tokens
    assert branches[-1][1] > whole_rollouts[-1][1] + 0.1, curves
    assert whole_rollouts[-1][0] + branches[-1][0] == sum(it["sampled_tokens"] for it in counts)
    assert out.read_bytes().startswith(b"\x89PNG")
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_the_tokens_of_rows_have_the_letter_before_and_the_advantage_of_their_step():
    """`vine` has an advantage for each step, `rloo` one for the rollout; spans that are trained elsewhere do not count."""
    spans = [{"start": 2, "step_id": "s0", "owned": False}, {"start": 5, "step_id": "s1", "owned": True}]
    row = {"token_ids": [3, 27, 9, 4, 27, 5], "spans": spans, "advantages": {"s1": 0.5}}

    assert branch_numpy.sampled([row, {**row, "advantages": -1.0}]) == ([4, 4], [5, 5], [0.5, -1.0])


def test_an_update_raises_the_probability_of_tokens_with_a_higher_advantage():
    row = {"token_ids": [3, 27, 9], "spans": [{"start": 2, "step_id": "s", "owned": True}], "advantages": 1.0}
    other = {**row, "token_ids": [3, 27, 8], "advantages": -1.0}
    logits = np.zeros((28, 28), dtype=np.float32)
    assert branch_numpy.learn(logits, [row, other], 2.0) == 2

    assert pytest.approx([logits[3, 9], logits[3, 8]]) == [1.0, -1.0]
    assert pytest.approx(0.0) == logits.sum()


@pytest.mark.parametrize(("replies", "reward"), [("bcdefghi", 1.0), ("bcdefghx", 0.8), ("bcdxxxxx", 0.0)])
def test_the_reward_is_half_luck_and_half_the_share_of_right_replies(replies, reward):
    luck = branch_numpy.reward_of(["b", "c", "d", *"xxxxx"])

    assert pytest.approx(branch_numpy.reward_of(list(replies))) == luck + reward / 2
    assert 0 <= luck <= 0.5
