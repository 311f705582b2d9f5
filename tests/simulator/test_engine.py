"""The simulated engine, and the routes that both kinds have."""

import orjson
import pytest

from proxy.simulator.options import Options

PROMPT = "Return the"


async def test_the_engines_seed_is_used_without_a_requests_seed(start):
    """Requests without a seed give the same ids on an engine with a seed, and different ids on one without."""
    seeded, free = await start(Options(seed=3)), await start(Options())
    body = {"max_tokens": 30, "return_token_ids": True}
    same = [(await seeded.completion(PROMPT, **body))["choices"][0]["token_ids"] for _ in range(3)]
    different = [(await free.completion(PROMPT, **body))["choices"][0]["token_ids"] for _ in range(3)]

    assert same[0] == same[1] == same[2]
    assert len(set(map(tuple, different))) > 1


@pytest.fixture(params=["vllm", "sglang"])
async def served(request, start):
    """An engine of each shape, and its shape."""
    return request.param, await start(Options(shape=request.param, model="tiny", max_model_len=99))


async def test_the_model_is_listed(served):
    """The model list has one model with its name, owner and context window."""
    shape, engine = served
    (model,) = orjson.loads((await engine.get("/v1/models"))[1])["data"]

    assert (model["id"], model["max_model_len"]) == ("tiny", 99)
    assert model["owned_by"] == {"vllm": "tokentape-simulator", "sglang": "sglang"}[shape]
    assert ("permission" in model) == (shape == "vllm")


async def test_ids_become_text(served):
    """`/detokenize` returns the text of ids under the engine's own key."""
    shape, engine = served
    ids = (await engine("/tokenize", prompt="Return the"))["tokens"]

    assert await engine("/detokenize", tokens=ids) == {{"vllm": "prompt", "sglang": "text"}[shape]: "Return the"}


async def test_the_engine_is_healthy(served):
    """`/health` returns 200 with an empty body."""
    _, engine = served
    assert await engine.get("/health") == (200, b"")
