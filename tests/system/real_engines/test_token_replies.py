"""Token pieces and ids on the choices of a real engine's responses, with its own tokenizer."""

import orjson
import pytest

from proxy.upstream.tokenizers import load

from . import environment
from .through import through_proxy

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Say hello."}], "seed": 7, "max_tokens": 60}
HEADERS = {"X-Reply-Tokens": "pieces", "X-Reply-Ids": "choices"}
VERIFIERS = {"return_tokens_as_token_ids": True, "return_token_ids": True, "prompt_logprobs": 1}


@pytest.fixture(scope="module")
def folder():
    return environment.ensure().model


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("engine", "alternatives"), [("vllm", 0), ("vllm", 3), ("sglang", 0)], indirect=["engine"]
)  # SGLang names alternatives by their text
async def test_every_token_and_every_alternative_is_its_vocabulary_entry(
    engine, tmp_path, folder, stream, alternatives
):
    """The pieces are the sampled ids, and alternatives have a token's own logprob, too."""
    vocabulary = load(str(folder))._loaded.get_vocab()
    async with through_proxy(engine.url, tmp_path, tokenizer=folder) as through, through.agent("r1") as agent:
        options = {"logprobs": True, "top_logprobs": alternatives, "stream": stream, "extra_headers": HEADERS}
        response = await agent.chat.completions.create(**BODY, **options)
        choices = [choice async for chunk in response for choice in chunk.choices] if stream else response.choices
        (step,) = await through.steps("r1")
    entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    ids = step["choices"][0]["ids"]

    assert ids == [vocabulary[entry.token] for entry in entries] == choices[-1].response_token_ids
    assert step["prompt_ids"] == choices[-1].prompt_token_ids
    assert {len(entry.top_logprobs) for entry in entries} == {alternatives}
    for entry in entries if alternatives else ():
        named = {vocabulary[other.token]: other.logprob for other in entry.top_logprobs}
        assert named[vocabulary[entry.token]] == entry.logprob


async def test_the_flags_of_verifiers_on_chat(vllm, tmp_path, direct):
    """Including `logprobs: 1`: key by key the response of the engine alone."""
    request = {**BODY, "logprobs": 1, "extra_body": VERIFIERS}
    async with through_proxy(vllm.url, tmp_path) as through, through.agent("r1") as agent:
        response = await agent.chat.completions.create(**request)
    alone = await direct.chat.completions.create(**request)
    shown, direct_json = (
        orjson.loads(completion.model_dump_json(exclude={"id", "created"})) for completion in (response, alone)
    )

    assert direct_json == shown
    assert len(response.choices[0].token_ids) == len(response.choices[0].logprobs.content)
