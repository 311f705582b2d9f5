"""The most likely token ids at each position of a prompt."""

import pytest
from tests.support.fakes import proxying
from tests.support.scripted import ScriptedEngine

from tokentape import AsyncClient
from tokentape.prompt_logprobs import _most_likely


@pytest.fixture
async def managed(url):
    """A ManagedServer of a proxy before the simulator."""
    async with AsyncClient(url) as client, client.managed_server() as managed:
        yield managed


@pytest.mark.parametrize(
    "prompt", [{"prompt": "Once upon"}, {"input_ids": [79, 110, 99]}, {"messages": [{"role": "user", "content": "hi"}]}]
)
@pytest.mark.parametrize("count", [{}, {"top_k": 3}, {"top_logprobs": 2}])
async def test_each_position_has_the_k_most_likely_ids(managed, prompt, count):
    """In descending order; the first position has none."""
    scores = await managed.get_logprobs(**prompt, **count)
    k = next(iter(count.values()), 1)

    assert {"prompt_tokens", "prompt_topk_token_ids", "prompt_topk_logprobs"} == scores.keys()
    assert prompt.get("input_ids", scores["prompt_tokens"]) == scores["prompt_tokens"]
    assert [0, *[k] * (len(scores["prompt_tokens"]) - 1)] == [len(ids) for ids in scores["prompt_topk_token_ids"]]
    assert all(logprobs == sorted(logprobs, reverse=True) for logprobs in scores["prompt_topk_logprobs"])


async def test_no_node_and_no_rollout_remains(managed):
    """The rollout of the call is deleted: nothing must train on its completion token."""
    await managed.get_logprobs(prompt="Once")

    assert [] == managed.current_nodes
    assert [] == [rollout async for rollout in managed.server.rollouts()]


@pytest.mark.parametrize("prompts", [{}, {"prompt": "a", "input_ids": [1]}])
async def test_exactly_one_prompt_is_required(managed, prompts):
    """The error lists the arguments to choose from."""
    with pytest.raises(ValueError, match="one of prompt, messages, input_ids"):
        await managed.get_logprobs(**prompts)


async def test_an_engine_without_prompt_logprobs_raises(engine, store):
    """NotImplementedError; the rollout is deleted too."""
    script = ScriptedEngine(engine)
    script.replies("yes")
    async with proxying(engine.url, store) as served, AsyncClient(served.url) as client:
        async with client.managed_server() as managed:
            with pytest.raises(NotImplementedError, match="no prompt logprobs"):
                await managed.get_logprobs(prompt="Once")
        assert [] == [rollout async for rollout in client.rollouts()]


def test_the_prompts_own_id_is_returned_only_if_it_is_among_the_most_likely():
    """vLLM adds it to each position."""
    positions = [None, {"7": {"logprob": -9.0}, "8": {"logprob": -0.5}, "9": {"logprob": -1.5}}]

    assert {"prompt_topk_token_ids": [[], [8, 9]], "prompt_topk_logprobs": [[], [-0.5, -1.5]]} == (
        _most_likely(positions, 2)
    )
