"""The engine of conversations."""

import pytest

from benchmarks.continuation import stream
from benchmarks.load import conversation
from benchmarks.turns import REPLY, TurnsEngine, messages, rendering
from benchmarks.upstream import EVENTS

FIRST, GROWS = 1_000, 300


async def _recorded(http, url):
    async with http.get(f"{url}/steps") as response:
        steps = (await response.json())["steps"]
    async with http.get(f"{url}/export?format=sequences") as response:
        rows = (await response.json())["rows"]
    return steps, rows


@pytest.mark.parametrize(("mode", "texts"), [("exact", 0), ("drift", 3)])
async def test_the_second_turn_is_continued(proxied, mode, texts):
    """With and without drift the second prompt begins with the recorded ids; with drift, ids are read as text three times."""
    url, http = f"{proxied[0]}/rollouts/{mode}", proxied[1]
    body, sent = {"model": f"mode-{mode}-{FIRST}-{GROWS}"}, messages(FIRST, GROWS, 2)
    first = await stream(http, f"{url}/v1", {**body, "messages": sent[:1]})
    TurnsEngine.counts.clear()
    second = await stream(http, f"{url}/v1", {**body, "messages": sent})
    requests = dict(TurnsEngine.counts)
    steps, rows = await _recorded(http, url)

    assert first.content == REPLY
    assert second.prompt_tokens == len(steps[1]["prompt_ids"]) == FIRST + GROWS
    assert [step["fidelity"]["exact"] for step in steps] == [True, True]
    continued = steps[1]["extra"]["continuation"]
    assert (continued["kept"], continued["bridge"]) == (FIRST + EVENTS, GROWS - EVENTS)
    assert ("rendered" in continued) == (mode == "drift")
    assert len(rows) == 1
    assert {"/tokenize": 1, "/detokenize": texts, "/v1/chat/completions": 1} == {"/detokenize": 0, **requests}


async def test_each_turn_of_the_measured_conversation_is_continued(proxied):
    """The turns of the row `conversation` become one sequence, with one request to the tokenizer for each later turn."""
    url, http = proxied
    calls = conversation(FIRST, GROWS, 4, "faithful")
    name, _, value = calls.header.strip().partition(": ")
    for body in calls.bodies:
        async with http.post(f"{url}/rollouts/r{calls.path}", data=body, headers={name: value}) as response:
            assert response.status == 200
    steps, rows = await _recorded(http, f"{url}/rollouts/r")

    assert [FIRST + turn * GROWS for turn in range(4)] == [len(step["prompt_ids"]) for step in steps]
    assert all(step["fidelity"]["exact"] for step in steps)
    assert len(rows) == 1
    assert TurnsEngine.counts["/tokenize"] == 3


def test_a_drifted_rendering_has_another_split_of_the_first_sampled_token():
    """Only the sampled ids differ between the renderings."""
    exact, drift = (rendering(mode, FIRST, GROWS, 1) for mode in (b"exact", b"drift"))

    assert exact[:FIRST] == drift[:FIRST]
    assert exact[FIRST + 1 :] == drift[FIRST + 2 :]
    assert exact[FIRST] != drift[FIRST]
