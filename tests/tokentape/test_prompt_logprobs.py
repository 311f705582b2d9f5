"""The likeliest ids at each place of a prompt."""

import pytest
from fakes import proxying
from scripted import ScriptedEngine

from tokentape import AsyncClient
from tokentape.prompt_logprobs import _most_likely


@pytest.fixture
async def managed(url):
    """ManagedServer of a proxy before the simulator."""
    async with AsyncClient(url) as client, client.managed_server() as managed:
        yield managed


@pytest.mark.parametrize(
    "given", [{"prompt": "Once upon"}, {"input_ids": [79, 110, 99]}, {"messages": [{"role": "user", "content": "hi"}]}]
)
@pytest.mark.parametrize("count", [{}, {"top_k": 3}, {"top_logprobs": 2}])
async def test_prompts_are_scored(managed, given, count):
    """A list a place, of so many ids, the likeliest first; nothing of the first place."""
    told = await managed.get_logprobs(**given, **count)
    k = next(iter(count.values()), 1)

    assert {"prompt_tokens", "prompt_topk_token_ids", "prompt_topk_logprobs"} == told.keys()
    assert given.get("input_ids", told["prompt_tokens"]) == told["prompt_tokens"]
    assert [0, *[k] * (len(told["prompt_tokens"]) - 1)] == [len(place) for place in told["prompt_topk_token_ids"]]
    assert all(place == sorted(place, reverse=True) for place in told["prompt_topk_logprobs"])


async def test_scoring_leaves_nothing_behind(managed):
    """No node, and no rollout with a sampled token that nobody wants to train on."""
    await managed.get_logprobs(prompt="Once")

    assert [] == managed.current_nodes
    assert [] == [rollout async for rollout in managed.server.rollouts()]


@pytest.mark.parametrize("given", [{}, {"prompt": "a", "input_ids": [1]}])
async def test_exactly_one_thing_is_scored(managed, given):
    """And the error says which there are."""
    with pytest.raises(ValueError, match="one of prompt, messages, input_ids"):
        await managed.get_logprobs(**given)


async def test_an_engine_that_scores_no_prompts_is_said_to(engine, store):
    """NotImplementedError, and nothing left behind either."""
    script = ScriptedEngine(engine)
    script.says("yes")
    async with proxying(engine.url, store) as served, AsyncClient(served.url) as client:
        async with client.managed_server() as managed:
            with pytest.raises(NotImplementedError, match="no prompt logprobs"):
                await managed.get_logprobs(prompt="Once")
        assert [] == [rollout async for rollout in client.rollouts()]


def test_the_prompts_own_id_is_not_among_the_most_likely():
    """vLLM tells it beside them."""
    places = [None, {"7": {"logprob": -9.0}, "8": {"logprob": -0.5}, "9": {"logprob": -1.5}}]

    assert {"prompt_topk_token_ids": [[], [8, 9]], "prompt_topk_logprobs": [[], [-0.5, -1.5]]} == _most_likely(
        places, 2
    )
