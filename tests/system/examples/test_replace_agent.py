"""examples/replace_agent.py: an agent that dies, and is replaced from where it stopped."""

import sys

import replace_agent

from tokentape import AsyncClient

# Four calls. Its first attempt hangs before the third one.
AGENT = """
import pathlib, sys, time
from openai import OpenAI

hung, messages = pathlib.Path(sys.argv[1]), []
with OpenAI() as client:
    for number in range(4):
        if number == 2 and not hung.exists():
            hung.touch()
            time.sleep(1000)
        messages.append({"role": "user", "content": f"Count to {number}."})
        reply = client.chat.completions.create(model="policy", messages=messages, max_tokens=8, temperature=1)
        messages.append(reply.choices[0].message.to_dict())
"""


async def test_the_replacement_goes_through_the_steps_of_the_dead_agent_and_continues(simulated, run, tmp_path):
    """The dead rollout has no rows in its group; those of its replacement train what it repeats, too."""
    url, _ = simulated
    rows, output = await run(replace_agent.main, "--url", url, "--", sys.executable, "-c", AGENT, tmp_path / "hung")
    async with AsyncClient(url) as client:
        found = {each["status"]: each["rollout_id"] async for each in client.rollouts()}
        dead, played = [[step async for step in client.steps(found[name])] for name in ("failed", "completed")]

    assert (output.count("from the tape"), output.count("sampled\n")) == (2, 4)
    assert [step["step_id"] for step in dead] == [step["step_id"] for step in played[:2]]
    assert ["inherited" in step for step in played] == [True, True, False, False]
    assert {found["completed"]} == {row["rollout_id"] for row in rows}
    assert sum(sum(row["mask"]) for row in rows) == 4 * 8
