"""SGLang's completions."""

import orjson
import pytest
from tests.support.recorded import load

from proxy.simulator.options import Options

SGLANG = Options(model="smollm2", max_model_len=2048, shape="sglang")
PATH = "/v1/completions"


@pytest.fixture
async def sglang(start):
    """An engine with SGLang's API."""
    return await start(SGLANG)


@pytest.mark.parametrize("name", ["cmpl_utf8_n_inj", "cmpl_token_ids_n_plain"])
async def test_completions_have_the_recorded_shape(sglang, skeleton, name):
    """A completion has the keys, their order and the nulls of SGLang's completion for the same request."""
    recorded = load(f"recorded/{name}", "sglang")
    prompt = "Return the" if isinstance(recorded.body["prompt"], str) else [350, 261]
    completion = await sglang(PATH, **{**recorded.body, "prompt": prompt, "max_tokens": 200})

    assert skeleton(orjson.loads(recorded.response)) == skeleton(completion)


async def test_chunks_have_the_recorded_shapes(sglang, skeleton, chunks_from):
    """The chunks have the shapes of SGLang's chunks, and so do the first one and the last two."""
    recorded = load("each_token/cmpl_greedy_s_inj", "sglang")
    body = {**recorded.body, "prompt": "Return the", "max_tokens": 5}
    simulated_chunks = [skeleton(chunk) for chunk in await sglang.stream(PATH, **body)]
    recorded_chunks = [skeleton(chunk) for chunk in chunks_from(recorded.response.strip() + b"\n\n")]

    assert set(simulated_chunks) == set(recorded_chunks)
    assert (simulated_chunks[0], simulated_chunks[-2:]) == (recorded_chunks[0], recorded_chunks[-2:])


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"prompt": ["If", "Return the"]}, {"stop": "e c"}, {"echo": True}])
async def test_streamed_and_unstreamed_are_equal(sglang, more):
    """Streamed or not, the same seed gives each choice the same ids, logprobs and text."""
    body = {"prompt": "Return the", "seed": 3, "max_tokens": 30, "return_token_ids": True, "logprobs": 2, **more}
    complete = await sglang(PATH, **body)
    chunks = await sglang.stream(PATH, **body)

    for choice in complete["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        for key, entries in choice["logprobs"].items():
            assert [entry for part in parts for entry in part["logprobs"][key]] == entries
        assert parts[-1]["matched_stop"] == choice["matched_stop"]


async def test_an_echo_precedes_the_text(sglang):
    """An echoed prompt precedes the text."""
    completion = await sglang(PATH, prompt="Return the", echo=True, seed=1)

    assert completion["choices"][0]["text"].startswith("Return the")
