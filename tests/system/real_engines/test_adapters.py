"""Updates of the policy by LoRA adapters of a real vLLM."""

import pytest

from tokentape import AsyncClient, ClientError

from . import environment
from .adapters import write_adapter
from .conftest import start_vllm
from .through import through_proxy

QUESTION = [{"role": "user", "content": "Count to three."}]


@pytest.fixture(scope="module")
def lora_engine(tmp_path_factory):
    """A vLLM with the tiny model and without an adapter."""
    log = tmp_path_factory.mktemp("engine") / "vllm.log"
    with start_vllm(environment.ensure().model, "tiny", log, "--enable-lora", "--max-lora-rank=8") as engine:
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

    assert [(0, 502), (3, 502)] == refused
    assert ["1", "2", "2", "4"] == [step["policy_version"] for step in steps]
    assert [[]] * 4 == [step["fidelity"]["problems"] for step in steps]
    first, second, repeated, last = (step["choices"][0]["ids"] for step in steps)
    assert (first, second) == (last, repeated)
    assert first != second
    assert "policy" in listed["models"]
