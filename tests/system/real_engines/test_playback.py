"""Playbacks with a real engine: branches before each step of tool loops and chats, their prompt ids and their scores."""

import pytest

from .test_continuation import TURNS, converse, fields_of
from .test_exactness import TOLERANCE, differences
from .through import through_proxy


async def open_rollout(proxy, name, **terms):
    """Open a rollout that continues its steps by ids."""
    async with proxy.http.post(
        f"{proxy.url}/rollouts", json={"rollout_id": name, "continuation": "append", **terms}
    ) as response:
        assert response.status == 201, await response.text()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("tools", [False, True], ids=["chat", "tools"])
async def test_a_branch_before_each_step_goes_on_from_the_recorded_ids(engine, tmp_path, tools, stream):
    """Inherited steps are the recorded ones, the branch step has their prompt ids, and each live token scores as recorded."""
    agent = {"extra": fields_of(engine, "strips"), "stream": stream, "tools": tools, "number": 1}
    async with through_proxy(engine.url, tmp_path) as proxy:
        await open_rollout(proxy, "r1")
        await converse(proxy, "r1", **agent)
        recorded = await proxy.steps("r1")
        await open_rollout(proxy, "whole", playback={"of": "r1"})
        await converse(proxy, "whole", **agent)
        for at, step in enumerate(recorded):
            await open_rollout(proxy, f"b{at}", playback={"of": "r1", "before": step["step_id"]})
            await converse(proxy, f"b{at}", **agent)
        whole = await proxy.steps("whole")
        branches = [await proxy.steps(f"b{at}") for at in range(TURNS)]
        rows = [await proxy.rows(f"b{at}") for at in range(TURNS)]
        worst = max([max(await differences(engine, row), default=0) for (row,) in rows])

    compared = ("step_id", "prompt_ids", "choices")
    assert [[step[name] for name in compared] for step in whole] == [
        [step[name] for name in compared] for step in recorded
    ]
    for at, steps in enumerate(branches):
        assert [step["step_id"] for step in steps[:at]] == [step["step_id"] for step in recorded[:at]]
        assert steps[at]["prompt_ids"] == recorded[at]["prompt_ids"]
        assert steps[at]["extra"]["branched_from"]["ids"] is True
        assert all(step["fidelity"]["exact"] for step in steps)
        assert len(steps) == TURNS
    assert tools or worst < TOLERANCE
