"""examples/record_agent.py: a runner for agents that do not know TokenTape."""

import sys
from itertools import groupby

import record_agent

from tokentape import AsyncClient


async def test_the_agent_is_recorded_unchanged_and_its_rows_are_printed(simulated, run):
    """Four calls, two with tool calls, are one row with a reward; its sampled tokens are the steps'."""
    url, _ = simulated
    (row,), output = await run(record_agent.main, "--url", url)
    async with AsyncClient(url) as client:
        steps = [step async for step in client.steps(row["rollout_id"])]
        rollout = await client.rollout(row["rollout_id"])

    assert [bool(step["request"].get("stream")) for step in steps] == [False, False, True, True]
    assert "look_up(" in output
    assert "calculate(" in output
    sampled = [
        [token for token, mask in run if mask]
        for is_sampled, run in groupby(zip(row["token_ids"], row["mask"], strict=True), lambda pair: pair[1])
        if is_sampled
    ]
    assert [step["choices"][0]["ids"] for step in steps] == sampled
    assert (rollout["status"], rollout["reward"]) == ("completed", 1.0)
    assert rollout["metadata"]["agent"].endswith("tool_agent.py")
    assert record_agent.shape_of(row) in output
    assert f"{row['rollout_id']}: completed, reward 1.0" in output


async def test_a_failing_agent_leaves_a_failed_rollout(simulated, run):
    """The exit status reports it, whether or not it made a call; there is no row to train."""
    url, _ = simulated
    rows, output = await run(record_agent.main, "--url", url, "--", sys.executable, "-c", "raise SystemExit(3)")

    assert rows == []
    assert ": failed, reward 0.0" in output


KEYED = """
import os, urllib.request
url = os.environ["OPENAI_BASE_URL"].partition("/rollouts/")[0]
head = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
body = b'{"model": "policy", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}'
urllib.request.urlopen(urllib.request.Request(url + "/v1/chat/completions", body, head)).close()
"""


async def test_the_key_alone_names_the_rollout(simulated, run):
    """An agent that does not accept a base URL with a path is recorded, too."""
    url, _ = simulated
    (row,), output = await run(record_agent.main, "--url", url, "--", sys.executable, "-c", KEYED)

    assert f"{row['rollout_id']}: completed" in output
    assert sum(row["mask"]) == 4


def test_a_row_is_printed_as_runs_of_prompt_and_sampled_tokens():
    """Prompt tokens are in brackets."""
    assert record_agent.shape_of({"mask": [0, 0, 1, 0, 1, 1, 1]}) == "[2] 1 [1] 3"
