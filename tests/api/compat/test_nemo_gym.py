"""NeMo Gym's model server (0.7.0) with TokenTape as its engine, as docs/trainers.md configures it."""

import openai
import pytest
import yaml
from tests.support.fakes import proxying
from tests.support.pages import ROOT, blocks_of
from tests.support.stored import stored_steps

from proxy.server.listener import simulating
from proxy.simulator.options import Options

(CONFIG,) = [
    block
    for block in blocks_of(ROOT / "docs" / "trainers.md")
    if block.checked_by == "tests/api/compat/test_nemo_gym.py"
]
# `VLLMModel` with `return_token_id_information` and `request_prompt_and_generation_token_ids`.
REQUESTED = {"logprobs": True, "top_logprobs": 0}
EXTRA = {"return_tokens_as_token_ids": True, "return_token_ids": True}


@pytest.mark.parametrize("path", ["", "/rollouts/r1"])
async def test_the_ids_and_logprobs_that_it_requests_are_those_of_the_step(store, path):
    """It compares the choice's ids with those in its logprobs, and takes the prompt's ids from the response."""
    async with (
        simulating("127.0.0.1:0", Options(model="m")) as engine,
        proxying(engine, store) as served,
        openai.AsyncOpenAI(base_url=f"{served.url}{path}/v1", api_key="none") as client,
    ):
        messages = [{"role": "user", "content": "Hello"}]
        response = await client.chat.completions.create(
            model="m", messages=messages, max_tokens=6, extra_body=EXTRA, **REQUESTED
        )
    (name,) = (await store.list()).names
    (step,) = await stored_steps(store, name)
    (choice,), content = step.choices, response.choices[0].logprobs.content

    assert {"return_token_id_information", "request_prompt_and_generation_token_ids"} < set(
        yaml.safe_load(CONFIG.text)["policy_model"]["responses_api_models"]["vllm_model"]
    )
    assert step.prompts[0].tolist() == response.prompt_token_ids
    assert choice.ids.tolist() == response.choices[0].token_ids
    assert choice.ids.tolist() == [int(entry.token.removeprefix("token_id:")) for entry in content]
    assert list(choice.logprobs) == pytest.approx([entry.logprob for entry in content])
