"""The example of a group of Harbor trials, with a stand-in for Harbor's job; its trials call the simulator."""

import ast
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import harbor_group
import pytest
from openai import AsyncOpenAI
from tests.support.fakes import settings_for
from tests.support.trainers import PUBLISHED

from proxy.server.listener import running, simulating
from proxy.simulator.options import Options
from tokentape import AsyncClient

REWARDS = [1.0, 0.0, None, 0.5]


class Job:
    """Run a trial for each agent; the third one fails before its verifier."""

    def __init__(self, config):
        self._config = config

    @classmethod
    async def create(cls, config):
        return cls(config)

    def on_trial_ended(self, callback):
        self._ended = callback

    async def run(self):
        for agent, reward in zip(self._config.agents, REWARDS, strict=True):
            async with AsyncOpenAI(base_url=agent.base_url, api_key=agent.env["OPENAI_API_KEY"]) as client:
                messages = [{"role": "user", "content": "hi"}]
                await client.chat.completions.create(model="policy", messages=messages, max_tokens=4)
            verified = None if reward is None else SimpleNamespace(rewards={"reward": reward})
            result = SimpleNamespace(verifier_result=verified, exception_info="died" if reward is None else None)
            await self._ended(SimpleNamespace(config=SimpleNamespace(agent=agent), result=result))


@pytest.fixture
def harbor(monkeypatch):
    """A module with the names that the example imports."""
    module = ModuleType("harbor")
    module.AgentConfig = module.JobConfig = module.TaskConfig = SimpleNamespace
    module.Job = Job
    monkeypatch.setitem(sys.modules, "harbor", module)


async def test_each_trial_is_a_rollout_with_the_verifiers_reward(harbor, store):
    async with (
        simulating("127.0.0.1:0", Options()) as engine,
        running(settings_for(engine), store) as served,
        AsyncClient(served.url) as client,
    ):
        name = await harbor_group.run_group(client, Path("tasks/hello"), "mini-swe-agent", "openai/policy", 4)
        group = await client.group(name)
        batch = await client.claim_batch(consumer="trainer", groups=1, format="atif")

    assert [(rollout["status"], rollout["reward"], rollout["steps"]) for rollout in group["rollouts"]] == [
        ("completed", 1.0, 1),
        ("completed", 0.0, 1),
        ("failed", None, 1),
        ("completed", 0.5, 1),
    ]
    assert group["metadata"] == {"task": "hello"}
    assert [entry["group_id"] for entry in batch["groups"]] == [name]


async def test_a_job_that_fails_leaves_no_rollout_open(harbor, store, monkeypatch):
    """Its group is complete, with the trials that ended."""

    async def fail(job):
        raise RuntimeError("no containers")

    monkeypatch.setattr(Job, "run", fail)
    async with running(settings_for(None), store) as served, AsyncClient(served.url) as client:
        with pytest.raises(RuntimeError, match="no containers"):
            await harbor_group.run_group(client, Path("tasks/hello"), "mini-swe-agent", "openai/policy", 4)
        (group,) = [group async for group in client.groups()]

    assert (group["status"], group["finished"]) == ("complete", 4)


@pytest.mark.parametrize(
    ("agent", "url", "key"),
    [
        ("claude-code", "http://h/rollouts/r", "ANTHROPIC_API_KEY"),
        ("codex", "http://h/rollouts/r/v1", "OPENAI_API_KEY"),
    ],
)
def test_an_agent_gets_its_base_url_and_key_by_the_fields_of_harbors_configuration(agent, url, key):
    config = harbor_group.agent_of({"base_url": "http://h/rollouts/r/v1", "api_key": "k"}, agent, "m")
    tree = ast.parse((PUBLISHED / "harbor/models/trial/config.py").read_text())
    (published,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "AgentConfig"]
    fields = {node.target.id for node in published.body if isinstance(node, ast.AnnAssign)}

    assert (config["base_url"], config["env"]) == (url, {key: "k"})
    assert config.keys() <= fields
