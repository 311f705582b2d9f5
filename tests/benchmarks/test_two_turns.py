"""The engine of the curve `continuation`."""

import aiohttp
import pytest

from benchmarks.continuation import stream
from benchmarks.two_turns import BRIDGE, REPLY, TwoTurnEngine, rendering
from benchmarks.upstream import EVENTS, listen
from proxy.config.settings import load
from proxy.server.listener import running

TOKENS = 1_000


@pytest.fixture
async def measured(tmp_path):
    """A function that runs a conversation of two turns in `append`; it returns the steps, the rows and the requests."""
    server, port = await listen(TwoTurnEngine)
    settings = load(
        listen="127.0.0.1:0",
        engines={"endpoints": [{"url": f"http://127.0.0.1:{port}"}]},
        store={"url": f"embedded:{tmp_path / 'store'}"},
        continuation={"mode": "append"},
    )

    async def converse(mode):
        messages = [{"role": "user", "content": "Hello."}]
        body = {"model": f"mode-{mode}-{TOKENS}"}
        url = f"{served.url}/rollouts/{mode}"
        first = await stream(http, f"{url}/v1", {**body, "messages": messages})
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "Next."}]
        TwoTurnEngine.counts.clear()
        second = await stream(http, f"{url}/v1", {**body, "messages": messages})
        requests = dict(TwoTurnEngine.counts)
        async with http.get(f"{url}/steps") as response:
            steps = (await response.json())["steps"]
        async with http.get(f"{url}/export?format=sequences") as response:
            rows = (await response.json())["rows"]
        assert first.content == REPLY
        assert second.prompt_tokens == len(steps[1]["prompt_ids"])
        return steps, rows, requests

    async with running(settings) as served, aiohttp.ClientSession() as http:
        yield converse
    server.close()


@pytest.mark.parametrize(("mode", "texts"), [("exact", 0), ("drift", 3)])
async def test_the_second_turn_is_continued(measured, mode, texts):
    """With and without drift the second prompt begins with the recorded ids; with drift, ids are read as text three times."""
    steps, rows, requests = await measured(mode)

    assert [True, True] == [step["fidelity"]["exact"] for step in steps]
    assert (TOKENS, len(BRIDGE)) == tuple(steps[1]["extra"]["continuation"][name] for name in ("kept", "bridge"))
    assert ("rendered" in steps[1]["extra"]["continuation"]) == (mode == "drift")
    assert 1 == len(rows)
    assert {"/tokenize": 1, "/detokenize": texts, "/v1/chat/completions": 1} == {"/detokenize": 0, **requests}


def test_a_drifted_rendering_has_another_split_of_the_first_sampled_token():
    """Only the sampled ids differ between the renderings."""
    exact, drift = rendering(b"exact", TOKENS), rendering(b"drift", TOKENS)

    assert exact[: TOKENS - EVENTS] == drift[: TOKENS - EVENTS]
    assert exact[TOKENS - EVENTS + 1 :] == drift[TOKENS - EVENTS + 2 :]
    assert exact[TOKENS - EVENTS] != drift[TOKENS - EVENTS]
