"""Exports with `rescore` and a real engine: its logprobs of recorded ids, now."""

import pytest

from .through import through_proxy

QUESTION = [{"role": "user", "content": "Count to three."}]
SAMPLED = 120


def scorer_at(engine, **fields):
    return {"scorers": {"teacher": {"endpoints": [{"url": engine.url}], **fields}}}


@pytest.fixture
async def recorded(engine, tmp_path):
    """A running proxy with one engine as policy and teacher, and a rollout of two turns and three branches."""
    async with through_proxy(engine.url, tmp_path, rescore=scorer_at(engine, version="t1")) as through:
        request = {"model": "tiny", "max_tokens": SAMPLED, "seed": 7, "temperature": 1}
        request |= {"extra_body": {"ignore_eos": True}}
        async with through.agent("r") as agent:
            await agent.chat.completions.create(messages=QUESTION, **request)
            (step,) = await through.steps("r")
            ids = [*step["prompt_ids"], *step["choices"][0]["ids"], *range(300, 320)]
            await agent.completions.create(prompt=ids, n=3, **request)
        yield through


@pytest.mark.parametrize("scorer", ["policy", "teacher"])
async def test_the_logprobs_of_the_same_engine_agree_with_the_recorded_ones(recorded, scorer):
    """Within 1e-3 at temperature 1, for each trained token of each branch."""
    async with recorded.http.put(f"{recorded.url}/policy", json={"version": 5}) as response:
        assert response.status == 200
    rows = (await recorded.get(f"/rollouts/r/export?rescore={scorer}"))["rows"]

    assert len(rows) == 3
    assert [sum(row["mask"]) for row in rows] == [2 * SAMPLED, SAMPLED, SAMPLED]
    for row in rows:
        version = "5" if scorer == "policy" else "t1"
        assert {"engine": row["rescored"]["engine"], "model": "tiny", "policy_version": version} == row["rescored"]
        for bit, own, scored in zip(row["mask"], row["logprobs"], row["rescored_logprobs"], strict=True):
            assert (own is None and scored is None) if not bit else abs(own - scored) < 1e-3


async def test_the_most_likely_tokens_are_the_engines(recorded):
    """They are sorted, and no token of the row is more likely than the first of them."""
    (row, *_) = (await recorded.get("/rollouts/r/export?rescore=teacher&rescore_top_k=5"))["rows"]
    fields = ("mask", "token_ids", "rescored_logprobs", "rescored_top_ids", "rescored_top_logprobs")
    found = 0
    for bit, token, own, ids, logprobs in zip(*(row[name] for name in fields), strict=True):
        if bit:
            assert len(set(ids)) == len(logprobs) == 5
            assert logprobs == sorted(logprobs, reverse=True)
            assert own <= logprobs[0]
            if token in ids:
                found += 1
                assert own == pytest.approx(logprobs[ids.index(token)], abs=1e-6)
    assert found


async def test_an_engine_with_another_vocabulary_is_an_error(llamacpp, engine, tmp_path):
    """The ids of one model mean nothing to another one with a smaller vocabulary; llama.cpp itself cannot score ids."""
    async with through_proxy(llamacpp.url, tmp_path, rescore=scorer_at(engine)) as through:
        async with through.agent("r") as agent:
            await agent.chat.completions.create(messages=QUESTION, model="smollm2", max_tokens=40, temperature=1)
        for scorer, words in (
            ("teacher", "has another vocabulary than engine engine"),
            ("policy", "cannot score token ids"),
        ):
            async with through.http.get(f"{through.url}/rollouts/r/export?rescore={scorer}") as response:
                assert (response.status, words in (await response.json())["error"]["message"]) == (422, True)
