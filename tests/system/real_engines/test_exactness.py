"""The engine gives recorded ids the logprobs with which it sampled them, whichever way a call asked for them."""

import aiohttp
import pytest

from .calls import CHAT, COMPLETIONS, QUESTION, TOOL
from .through import through_proxy

# What ends in the logprobs of the model itself: no temperature, penalty, bias or grammar.
_CHAT = {"model": "tiny", "messages": QUESTION, "temperature": 1, "max_tokens": 60}
_TEXT = {"model": "tiny", "prompt": "Once upon a time", "temperature": 1, "max_tokens": 60}
CALLS = {
    "chat": (CHAT, _CHAT),
    "greedy": (CHAT, _CHAT | {"temperature": 0}),
    "n=3": (CHAT, _CHAT | {"n": 3}),
    "long": (CHAT, _CHAT | {"max_tokens": 400, "ignore_eos": True}),
    "tools": (CHAT, _CHAT | {"tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}}),
    "stop string": (CHAT, _CHAT | {"stop": ["e"]}),
    "completions": (COMPLETIONS, _TEXT),
    "two prompts": (COMPLETIONS, _TEXT | {"prompt": ["Once upon", "The quick brown fox"], "n": 2}),
    "ids in": (COMPLETIONS, _TEXT | {"prompt": [46, 77, 306, 1020]}),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_recorded_ids_score_as_they_were_sampled(engine, tmp_path, stream):
    """Each token of each choice, within a ten-thousandth."""
    far, count = {}, 0
    async with through_proxy(engine.url, tmp_path) as proxy, aiohttp.ClientSession() as http:
        for number, (name, (path, body)) in enumerate(CALLS.items()):
            async with http.post(f"{proxy.url}/rollouts/r{number}{path}", json=body | {"stream": stream}) as response:
                assert response.status == 200, await response.text()
                await response.read()
            (step,) = await proxy.steps(f"r{number}")
            assert step["fidelity"]["exact"], (name, step["fidelity"])
            for row in await proxy.rows(f"r{number}"):
                scored = [None, *await engine.score(row["token_ids"])]
                trained = [index for index, bit in enumerate(row["mask"]) if bit]
                differences = [abs(row["logprobs"][index] - scored[index]) for index in trained]
                far[name] = max(*differences, far.get(name, 0))
                count += len(trained)

    assert {} == {name: difference for name, difference in far.items() if difference > 1e-4}
    assert count > 700
