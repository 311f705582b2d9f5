"""examples/bigram_engine.py: an engine with a table of logits as its policy."""

import aiohttp
import bigram_engine
import numpy as np
from bigram_engine import END, VOCABULARY, Policy, log_softmax

BODY = {"model": "policy", "messages": [{"role": "user", "content": "Say: A b!"}], "max_tokens": 6}


def skewed(seed):
    """Return logits that are not all equal."""
    return np.random.default_rng(seed).normal(size=(len(VOCABULARY),) * 2).astype("<f4")


def test_ids_and_logprobs_come_from_the_policy():
    """The prompt's ids are the message's letters; each logprob is the table's, given the previous token."""
    policy = Policy(seed=1)
    policy.load(skewed(2).tobytes())
    response = policy.answer(BODY)
    (choice,) = response["choices"]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    before = [*response["prompt_token_ids"], *choice["token_ids"]][-len(logprobs) - 1 : -1]

    assert [*map(VOCABULARY.index, "say a b"), END] == response["prompt_token_ids"]
    assert log_softmax(skewed(2))[before, choice["token_ids"]].tolist() == logprobs
    assert choice["message"]["content"] == "".join(VOCABULARY[token] for token in choice["token_ids"]).strip("\n")


def test_tokens_are_as_frequent_as_their_probability():
    """The policy gradient assumes this distribution; another one would be another policy."""
    policy = Policy(seed=3)
    policy.load(skewed(4).tobytes())
    firsts = [policy.sample(END, 1)[0][0] for _ in range(20_000)]
    seen = np.bincount(firsts, minlength=len(VOCABULARY)) / len(firsts)

    assert np.abs(seen - np.exp(log_softmax(skewed(4))[END])).max() < 0.01


async def test_weights_are_replaced_by_a_post_and_unknown_models_are_rejected():
    """A policy that always samples the EOS answers with one token."""
    ending = np.zeros_like(skewed(0))
    ending[:, END] = 100
    with bigram_engine.serving("127.0.0.1", 0) as url:
        async with aiohttp.ClientSession(url) as http:
            async with http.post("/load_weights", data=ending.tobytes()) as response:
                assert response.status == 200
            async with http.post("/v1/chat/completions", json=BODY) as response:
                (choice,) = (await response.json())["choices"]
            async with http.post("/v1/embeddings", json={}) as response:
                assert response.status == 404

    assert (choice["token_ids"], choice["finish_reason"], choice["message"]["content"]) == ([END], "stop", "")
