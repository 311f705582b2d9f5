"""Updates of policies by LoRA adapters of a real vLLM."""

import asyncio

import pytest

from tokentape import AsyncClient, ClientError

from . import environment
from .adapters import write_adapter
from .conftest import start_vllm
from .through import through_proxy

LORA = ("--enable-lora", "--max-loras=2", "--max-lora-rank=8")
QUESTION = [{"role": "user", "content": "Count to three."}]


@pytest.fixture(scope="module")
def lora_engine(tmp_path_factory):
    """A vLLM with the tiny model and without an adapter."""
    log = tmp_path_factory.mktemp("engine") / "vllm.log"
    with start_vllm(environment.ensure().model, "tiny", log, *LORA) as engine:
        yield engine


async def test_calls_sample_from_the_adapter_of_the_announced_version(lora_engine, tmp_path):
    """Adapters of the same matrices give the same tokens; a failed update changes nothing, also if there was no adapter."""
    adapters = {version: write_adapter(tmp_path / f"v{version}", seed) for version, seed in ((1, 1), (2, 2), (4, 1))}
    adapters[0], adapters[3] = tmp_path / "none", tmp_path / "none"
    refused = []
    async with (
        through_proxy(lora_engine.url, tmp_path) as through,
        AsyncClient(through.url) as client,
        through.agent("r") as agent,
    ):
        for version in range(5):
            try:
                await client.load_adapter("policy", str(adapters[version]), version)
            except ClientError as error:
                refused.append((version, error.status))
            if version:
                await agent.chat.completions.create(model="policy", messages=QUESTION, temperature=0, max_tokens=12)
        steps = await through.steps("r")
        (listed,) = (await through.get("/engines"))["engines"]

    assert refused == [(0, 502), (3, 502)]
    assert [step["policy_version"] for step in steps] == ["1", "2", "2", "4"]
    assert [step["fidelity"]["problems"] for step in steps] == [[]] * 4
    first, second, repeated, last = (step["choices"][0]["ids"] for step in steps)
    assert (first, second) == (last, repeated)
    assert first != second
    assert "policy" in listed["models"]


TWO = {"planner": {"models": ["planner"]}, "critic": {"models": ["critic"]}}


async def test_two_policies_are_adapters_of_one_engine_with_their_own_versions(lora_engine, tmp_path):
    """Both are loaded at once, and the base model is the policy `default`. An update of one leaves the tokens of the others."""
    adapters = [str(write_adapter(tmp_path / f"a{seed}", seed)) for seed in (1, 2, 3)]
    async with (
        through_proxy(lora_engine.url, tmp_path, policies=TWO) as through,
        AsyncClient(through.url) as client,
        through.agent("r") as agent,
    ):

        async def ids_of_all():
            for model in ("planner", "critic", "tiny"):
                await agent.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=12)
            return [step["choices"][0]["ids"] for step in (await through.steps("r"))[-3:]]

        await asyncio.gather(
            client.load_adapter(None, adapters[0], 1, policy="planner"),
            client.load_adapter(None, adapters[1], "c1", policy="critic"),
        )
        planner, critic, base = await ids_of_all()
        stream = await agent.chat.completions.create(
            model="critic", messages=QUESTION, temperature=0, max_tokens=400, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        await anext(stream)  # the engine samples it during the update of the other policy
        await client.load_adapter(None, adapters[2], 2, policy="planner", drain_s=0)
        async for _ in stream:
            pass
        updated = await ids_of_all()
        policies = {policy["name"]: policy["version"] for policy in (await client.policies())["policies"]}
        steps = await through.steps("r")

    assert len({tuple(ids) for ids in (planner, critic, base)}) == 3
    assert (updated[0] != planner, updated[1:]) == (True, [critic, base])
    assert policies == {"planner": "2", "critic": "c1", "default": None}
    critic_and_base = [("critic", "c1"), ("tiny", None)]
    assert [("planner", "1"), *critic_and_base, critic_and_base[0], ("planner", "2"), *critic_and_base] == [
        (step["model"]["served"], step["policy_version"]) for step in steps
    ]
    assert [step["fidelity"]["problems"] for step in steps] == [[]] * 7
