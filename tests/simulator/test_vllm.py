"""vLLM's routes other than chat and completions; test_server.py has the rest."""

import orjson

from proxy.simulator.options import Options

GENERATE = {"token_ids": [5, 6, 7], "sampling_params": {"seed": 1, "max_tokens": 400, "ignore_eos": True}}


async def test_the_label_of_the_weights_can_be_updated(start, cassette):
    """The label is read and updated with the recorded bodies."""
    engine = await start(Options())
    before, update = cassette("scale_out/get_weight_info"), cassette("scale_out/update_weight_version")
    async with engine.client.get("/weight_info") as response:
        assert await response.json() == before.payload

    assert update.payload == await engine(update.path, **update.body)
    async with engine.client.get("/weight_info") as response:
        assert await response.json() == {"weight_version": "step-17"}


async def test_scale_out_can_be_disabled(start, cassette):
    """Without scale-out, generate returns the recorded error."""
    engine = await start(Options(scale_out=False))
    async with engine.client.post("/inference/v1/generate", json=GENERATE) as response:
        assert response.status == 403
        assert await response.read() == cassette("derender_cmpl").raw


async def test_the_version_can_change_during_a_call(start):
    """Tokens after an update of the label have the new version; the spans are contiguous."""
    engine = await start(Options(token_delay_s=0.002))
    async with engine.client.post("/inference/v1/generate", json={**GENERATE, "stream": True}) as response:
        first = await response.content.readuntil(b"\n\n")
        await engine("/update_weight_version", new_version="v2")
        rest = await response.read()
    *_, last = [orjson.loads(line[6:]) for line in (first + rest).split(b"\n\n") if line.startswith(b"data: {")]
    first_span, second_span = last["choices"][0]["weight_versions"]

    assert (first_span["version"], first_span["start"]) == ("default", 0)
    assert (second_span["version"], second_span["end"]) == ("v2", 400)
    assert first_span["end"] == second_span["start"]
