"""The short form of the training soak in `make test-faults`."""

import pytest
from tests.system.faults.training.run import run


@pytest.mark.timeout(300)  # each wait within has its own timeout
async def test_every_group_ends_and_every_trained_row_was_sampled_once_with_its_own_reward(tmp_path):
    """Two policies, agents that die, and processes that are killed meanwhile."""
    counts = await run(tmp_path, 1, groups=6, at_once=2, replicas=2, pause_s=1.5, idle_s=3)

    assert counts["groups"].get("done", 0) >= 2
    assert counts["trained tokens"] > 100
