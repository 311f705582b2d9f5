"""Updates that change the weights of real engines while calls are in flight."""

import asyncio
import re
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path

import aiohttp
import numpy as np
import orjson
import pytest

from tokentape import AsyncClient

from . import environment
from .calls import QUESTION, THINKING_OFF
from .test_exactness import TOLERANCE
from .test_leaving import described, until  # noqa: F401 - a fixture
from .through import through_proxy

TOKENS = 400
PAGE = Path(__file__).parents[3] / "docs" / "training-loop.md"
LOADING = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[2]
CHANGED = ".mlp.down_proj.weight"
BODY = {
    "model": "tiny",
    "messages": QUESTION,
    "max_tokens": TOKENS,
    "temperature": 1,
    "ignore_eos": True,
    **THINKING_OFF,
}


@pytest.fixture
def other_weights(tmp_path):
    """A folder with the tiny model, in which one matrix of each layer has the opposite sign."""
    folder = tmp_path / "other"
    shutil.copytree(environment.ensure().model, folder)
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(raw[:8], "little")
    offsets = [entry["data_offsets"] for name, entry in orjson.loads(raw[8:begin]).items() if name.endswith(CHANGED)]
    for start, end in offsets:
        matrix = np.frombuffer(raw, "<f4", (end - start) // 4, begin + start)
        np.negative(matrix, out=matrix)
    assert offsets
    path.write_bytes(raw)
    return folder


async def load(engine, folder, version):
    """Load these weights into a running engine as docs/training-loop.md does."""
    functions = {}
    exec(compile(LOADING, "docs/training-loop.md", "exec"), functions)
    if engine.kind == "vllm":
        await asyncio.to_thread(functions["load_into_vllm"], engine.url, str(folder))
    else:
        await asyncio.to_thread(functions["load_into_sglang"], engine.url, str(folder), version)


async def differences(engine, row):
    """Return how far a recorded logprob is from the engine's own at most, by the version of the token."""
    scored = [None, *await engine.score(row["token_ids"])]
    worst = {}
    for span in row["spans"]:
        for index in range(span["start"], span["end"]) if span["owned"] else ():
            version, difference = span["policy_version"], abs(row["logprobs"][index] - scored[index])
            worst[version] = max(worst.get(version, 0), difference)
    return worst


async def test_each_part_of_a_resumed_call_scores_by_the_weights_that_sampled_it(
    engine, other_weights, tmp_path, audited
):
    """The audit compares the spans of the version that the engine has; by the other weights, they score otherwise."""
    own, seen = environment.ensure().model, {}
    async with (
        through_proxy(engine.url, tmp_path) as proxy,
        aiohttp.ClientSession() as http,
        AsyncClient(proxy.url) as client,
    ):

        async def agent(number):
            body = BODY | {"stream": number % 2 == 1}
            url = f"{proxy.url}/rollouts/r{number}/v1/chat/completions"
            with suppress(aiohttp.ClientPayloadError):  # of random weights, which sample special tokens
                async with http.post(url, json=body) as response:
                    assert response.status == 200, await response.text()
                    await response.read()

        try:
            await until(lambda kind: kind == engine.kind, proxy.kind)
            await load(engine, own, 0)
            await client.put_policy(0)
            least = await engine.metric("sampled") + 6 * TOKENS // 4
            calls = [asyncio.create_task(agent(number)) for number in range(6)]
            await until(lambda sampled: sampled >= least, lambda: engine.metric("sampled"))
            await client.update_policy(1, partial(load, engine, other_weights, 1))
            await asyncio.gather(*calls)
            found = [row for number in range(6) for row in await proxy.rows(f"r{number}")]
            rows = [
                row for row in found if [span["policy_version"] for span in row["spans"] if span["owned"]] == ["0", "1"]
            ]
            for version, folder in ((1, other_weights), (0, own)):
                await load(engine, folder, version)
                report = await audited(*rows, version=str(version))
                seen[version] = [await differences(engine, row) for row in rows], report["verdicts"]
        finally:
            await load(engine, own, "default")

    assert len(rows) > 0
    assert [{"aligned": len(rows)}] * 2 == [verdicts for _, verdicts in seen.values()]
    for old, new in zip(seen[0][0], seen[1][0], strict=True):
        assert old["0"] < TOLERANCE < 0.1 < new["0"]
        assert new["1"] < TOLERANCE < 0.1 < old["1"]
