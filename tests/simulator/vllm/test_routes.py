"""vLLM's routes beside chat and completions; test_server has the engine as clients meet it."""

import orjson

from proxy.simulator.options import Options

GENERATE = {"token_ids": [5, 6, 7], "sampling_params": {"seed": 1, "max_tokens": 400, "ignore_eos": True}}


async def test_the_label_of_the_weights_can_be_moved(start, cassette):
    """Labels are told and taken by the recorded bodies."""
    engine = await start(Options())
    told, moved = cassette("scale_out/get_weight_info"), cassette("scale_out/update_weight_version")
    async with engine.client.get("/weight_info") as response:
        assert await response.json() == told.answer

    assert moved.answer == await engine(moved.path, **moved.body)
    async with engine.client.get("/weight_info") as response:
        assert await response.json() == {"weight_version": "step-17"}


async def test_generate_can_be_left_out(start, cassette):
    """An engine without scale-out refuses generate in the recorded words."""
    engine = await start(Options(scale_out=False))
    async with engine.client.post("/inference/v1/generate", json=GENERATE) as response:
        assert response.status == 403
        assert await response.read() == cassette("derender_cmpl").raw


async def test_a_version_may_change_while_tokens_are_sampled(start):
    """Tokens after a change of the label are of the new version; spans meet where it was."""
    engine = await start(Options(token_delay_s=0.002))
    async with engine.client.post("/inference/v1/generate", json={**GENERATE, "stream": True}) as response:
        first = await response.content.readuntil(b"\n\n")
        await engine("/update_weight_version", new_version="v2")
        rest = await response.read()
    *_, last = [orjson.loads(line[6:]) for line in (first + rest).split(b"\n\n") if line.startswith(b"data: {")]
    one, two = last["choices"][0]["weight_versions"]

    assert (one["version"], one["start"]) == ("default", 0)
    assert (two["version"], two["end"]) == ("v2", 400)
    assert one["end"] == two["start"]
