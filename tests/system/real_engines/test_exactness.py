"""Recorded logprobs are those that the engine gives the recorded ids as a prompt, whichever way a call was made."""

import asyncio

import aiohttp
import pytest

from .calls import CHAT, COMPLETIONS, QUESTION, TOOL
from .test_conversation import DIGITS, say
from .through import through_proxy

TOLERANCE = 1e-4
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


async def differences(engine, row) -> list[float]:
    """Return how far the logprob of each trained token is from the engine's own, for tokens that can be compared."""
    scored = [None, *await engine.score(row["token_ids"])]
    compared = [span for span in row["spans"] if span["owned"] and not span["constrained"]]
    places = [index for span in compared for index in range(span["start"], span["end"])]
    return [abs(row["logprobs"][index] - scored[index]) for index in places]


async def call(proxy, http, name, rollout, *, stream):
    """Make one of CALLS, and check that its step is exact."""
    path, body = CALLS[name]
    async with http.post(f"{proxy.url}/rollouts/{rollout}{path}", json=body | {"stream": stream}) as response:
        assert response.status == 200, await response.text()
        await response.read()
    (step,) = await proxy.steps(rollout)
    assert step["fidelity"]["exact"], (name, step["fidelity"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_every_exported_sequence_scores_as_recorded(engine, tmp_path, stream):
    """Each token of each choice of each call, among others at the same time; and turns that extend each other, or fork."""
    worst, count = {}, 0
    async with through_proxy(engine.url, tmp_path) as proxy, aiohttp.ClientSession() as http:
        await asyncio.gather(*(call(proxy, http, name, name.replace(" ", "-"), stream=stream) for name in CALLS))
        for preserve in (True, False):
            async with proxy.agent(f"turns-{preserve}") as agent:
                messages = []
                for turn in range(3):
                    messages.append({"role": "user", "content": f"Turn {turn}."})
                    messages.append(await say(agent, messages, stream=stream, preserve=preserve, logit_bias={}))
        for name in (*(name.replace(" ", "-") for name in CALLS), "turns-True", "turns-False"):
            for row in await proxy.rows(name):
                found = await differences(engine, row)
                worst[name] = max(*found, worst.get(name, 0))
                count += len(found)

    assert {name: difference for name, difference in worst.items() if difference > TOLERANCE} == {}
    assert count > 1000


async def test_logprobs_under_a_grammar_are_those_after_its_mask(engine, tmp_path):
    """Scoring without the grammar returns lower ones, never higher; such tokens are marked as constrained."""
    async with through_proxy(engine.url, tmp_path) as proxy:
        async with proxy.agent("r1") as agent:
            await say(agent, list(QUESTION), stream=False, preserve=True, **DIGITS)
        (row,) = await proxy.rows("r1")
        (step,) = await proxy.steps("r1")
    scored = [None, *await engine.score(row["token_ids"])]
    pairs = [pair for *pair, bit in zip(row["logprobs"], scored, row["mask"], strict=True) if bit]

    assert all(score < logprob + TOLERANCE for logprob, score in pairs)
    assert max(logprob - score for logprob, score in pairs) > 1
    assert await differences(engine, row) == []
    assert DIGITS["regex"] in (
        step["sampling"].get("regex"),
        step["sampling"].get("structured_outputs", {}).get("regex"),
    )


async def test_scoring_detects_a_wrong_token_and_a_shifted_row(engine, tmp_path):
    """The tests above can fail: modified rows score differently."""
    async with through_proxy(engine.url, tmp_path) as proxy:
        async with proxy.agent("r1") as agent:
            await agent.chat.completions.create(model="tiny", messages=QUESTION, seed=5, max_tokens=60)
        (row,) = await proxy.rows("r1")
    (span,) = row["spans"]
    wrong = row["token_ids"].copy()
    wrong[span["start"] + 5] = (wrong[span["start"] + 5] + 1) % 4000
    shifted = [None, *row["logprobs"][:-1]]
    later = [span | {"start": span["start"] + 1}]

    assert max(await differences(engine, row)) < TOLERANCE
    assert max(await differences(engine, row | {"token_ids": wrong})) > 0.01
    assert max(await differences(engine, row | {"logprobs": shifted, "spans": later})) > 0.01
