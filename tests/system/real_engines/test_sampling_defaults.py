"""Sampling defaults: a step records the engine's own values of fields that its request omits."""

from .calls import QUESTION
from .through import through_proxy


async def test_vllms_defaults_are_recorded_with_a_call_that_sets_none(vllm, tmp_path):
    """As vLLM reports them with --enable-scale-out; a field of the request is recorded as sent."""
    async with through_proxy(vllm.url, tmp_path) as proxy:
        async with proxy.agent("r1") as agent:
            await agent.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=2)
            await agent.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=2, temperature=0)
        (engine,) = (await proxy.get("/engines"))["engines"]
        steps = await proxy.steps("r1")

    assert engine["sampling_defaults"]["temperature"] == 1.0
    assert [step["sampling"]["temperature"] for step in steps] == [1.0, 0]
    assert engine["sampling_defaults"].items() <= steps[0]["sampling"].items()
    assert all("temperature" not in step["sent"]["set"] for step in steps)
