"""Completions answers, in SGLang's shapes."""

import orjson
import pytest
from recorded import load_http

from proxy.simulator.options import Options

OURS = Options(model="smollm2", max_model_len=2048, shape="sglang")
PATH = "/v1/completions"


@pytest.fixture
async def sglang(start):
    """An engine that speaks SGLang's protocol."""
    return await start(OURS)


@pytest.mark.parametrize("name", ["cmpl_return_token_ids", "cmpl_token_prompt"])
async def test_answers_have_the_recorded_shape(sglang, skeleton, name):
    """An answer has the keys, their order, and the nulls of SGLang's answer to the same request."""
    recorded = load_http("sglang", name)
    prompt = "Return the" if isinstance(recorded.body["prompt"], str) else [350, 261]
    answer = await sglang(PATH, **{**recorded.body, "prompt": prompt, "max_tokens": 200})

    assert skeleton(orjson.loads(recorded.answer)) == skeleton(answer)


async def test_chunks_have_the_recorded_shapes(sglang, skeleton, chunks_of):
    """The chunks are of the shapes of SGLang's chunks, first and last ones included."""
    recorded = load_http("sglang", "cmpl_stream_return_token_ids")
    body = {**recorded.body, "prompt": "Return the", "max_tokens": 200}
    ours = [skeleton(chunk) for chunk in await sglang.stream(PATH, **body)]
    theirs = [skeleton(chunk) for chunk in chunks_of(recorded.answer.strip() + b"\n\n")]

    assert set(ours) == set(theirs)
    assert (ours[0], ours[-2:]) == (theirs[0], theirs[-2:])


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"prompt": ["If", "Return the"]}, {"stop": "e c"}, {"echo": True}])
async def test_streamed_and_unstreamed_are_twins(sglang, more):
    """Streamed or not, the same seed gives each choice the same ids, logprobs and text; none is lost."""
    body = {"prompt": "Return the", "seed": 3, "max_tokens": 30, "return_token_ids": True, "logprobs": 2, **more}
    whole = await sglang(PATH, **body)
    chunks = await sglang.stream(PATH, **body)

    for choice in whole["choices"]:
        told = [each for chunk in chunks for each in chunk["choices"] if each["index"] == choice["index"]]
        assert "".join(each["text"] for each in told) == choice["text"]
        assert [token for each in told for token in each["token_ids"]] == choice["token_ids"]
        assert told[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        for key, entries in choice["logprobs"].items():
            assert [entry for each in told for entry in each["logprobs"][key]] == entries
        assert told[-1]["matched_stop"] == choice["matched_stop"]


async def test_an_echo_stands_before_the_text(sglang):
    """An echoed prompt stands before the text."""
    answer = await sglang(PATH, prompt="Return the", echo=True, seed=1)

    assert answer["choices"][0]["text"].startswith("Return the")
