"""Token ids beyond the vocabulary of a real engine: SGLang 0.5.23 on a CPU exits if its scheduler reads one."""

import aiohttp
import pytest

from proxy.cli.audit import sender
from proxy.rollouts.scoring.requests import OtherVocabulary, find_scorer

from .calls import CHAT, QUESTION
from .through import through_proxy

SIZE = 4096
KNOWN, UNKNOWN = [46, 77, SIZE - 1], [46, SIZE, 77]
BODIES = {
    CHAT: lambda ids: {"model": "tiny", "messages": QUESTION, "max_tokens": 4, "input_ids": ids},
    "/v1/completions": lambda ids: {"model": "tiny", "prompt": ids, "max_tokens": 4},
    "/generate": lambda ids: {"input_ids": ids, "sampling_params": {"max_new_tokens": 4}},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_agents_own_id_beyond_the_vocabulary_is_a_400(sglang, tmp_path, path, stream):
    """Negative ones as well. The engine is alive afterwards, and every other id is sent."""
    async with through_proxy(sglang.url, tmp_path) as proxy:
        url, found = f"{proxy.url}/rollouts/r1{path}", []
        for ids in (UNKNOWN, [-1], KNOWN):
            async with proxy.http.post(url, json=BODIES[path](ids) | {"stream": stream}) as response:
                found.append((response.status, await response.text()))
        (step,) = await proxy.steps("r1")

    assert [status for status, _ in found] == [400, 400, 200]
    assert f"is no token id of the engine, which has {SIZE} of them" in found[0][1]
    assert step["prompt_ids"] == KNOWN


@pytest.mark.parametrize("ids", [UNKNOWN, [46, 77, 2**31 - 1]])
async def test_an_engine_that_scores_rejects_an_id_beyond_its_vocabulary(engine, ids):
    """It is another vocabulary; the engine is alive afterwards, and its scores are those without a bias."""
    async with aiohttp.ClientSession() as session:
        scorer = await find_scorer(sender(session, engine.url), None, "tiny")
        with pytest.raises(OtherVocabulary):
            await scorer.score(ids)

        assert [None, *await engine.score([*KNOWN, 1, 5])] == await scorer.score([*KNOWN, 1, 5])
