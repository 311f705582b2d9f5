"""Which playback the calls of a proxy without an engine belong to."""

import asyncio

import aiohttp
import orjson
import pytest
from tests.support.fakes import proxying
from tests.support.pages import ROOT
from tests.support.taped import SYSTEM, Agent, playing, record, recorder

from proxy.server.listener import simulating
from proxy.simulator.options import Options
from proxy.simulator.script import read_script
from tokentape.testing import _write

AGENTS = ROOT / "tests" / "system" / "agents"
SESSIONS = {path.stem: orjson.loads(path.read_bytes()) for path in sorted((AGENTS / "sessions").glob("*.json"))}
SCRIPT = AGENTS / "playback.yaml"
QUESTION = {"role": "user", "content": "What is the weather in Oslo?"}


@pytest.fixture
async def served(store, tmp_path):
    """The URL of a proxy with the tapes r1 and r2, and an HTTP session."""
    path = await record(store, tmp_path, "r1", "r2")
    async with playing(path) as url, aiohttp.ClientSession() as http:
        yield url, http


async def playbacks(http, url) -> dict[str, tuple[int, int]]:
    """The playbacks of a proxy with their answered and refused calls."""
    async with http.get(f"{url}/rollouts") as response:
        rollouts = (await response.json())["rollouts"]
    shown = {each["rollout_id"]: each["playback"] for each in rollouts if "playback" in each}
    return {name: (each["answered"], each["mismatches"]) for name, each in sorted(shown.items())}


async def test_each_run_of_the_agent_is_a_playback_of_its_own(served):
    """Its first call begins it; the tape is named by the URL or by the key."""
    url, http = served
    runs = [Agent(http, f"{url}/rollouts/r1/v1"), Agent(http, f"{url}/v1", Authorization="Bearer rollout:r1")]
    for agent in runs:
        assert await agent.run() == [200] * 3
    assert await Agent(http, f"{url}/rollouts/r2/v1").run("r2") == [200] * 3

    assert runs[0].replies[1]["choices"] == runs[1].replies[1]["choices"]
    assert await playbacks(http, url) == {"r1-playback-1": (3, 0), "r1-playback-2": (3, 0), "r2-playback-1": (3, 0)}


async def test_a_call_that_the_tape_does_not_have_is_refused(served):
    """The error names the difference; the next run begins a playback again, also if no call was answered."""
    url, http = served
    agent = Agent(http, f"{url}/rollouts/r1/v1")
    assert await agent.run("Rome") == [422]
    assert "Rome" in agent.replies[0]["error"]["message"]
    assert await agent.run() == [200] * 3
    messages = [SYSTEM, QUESTION, {"role": "assistant", "content": "?"}]
    assert (await agent.call("/chat/completions", {"model": "policy", "messages": messages, "max_tokens": 40}))[
        0
    ] == 422

    assert await playbacks(http, url) == {"r1-playback-1": (0, 1), "r1-playback-2": (3, 1)}


async def test_a_declared_retry_of_the_first_call_gets_its_response_again(served):
    url, http = served
    agent = Agent(http, f"{url}/rollouts/r1/v1")
    body = {"model": "policy", "messages": [SYSTEM, QUESTION], "max_tokens": 40}
    _, first = await agent.call("/chat/completions", body)
    _, again = await agent.call("/chat/completions", body, **{"X-Stainless-Retry-Count": "1"})

    assert first == again
    assert await playbacks(http, url) == {"r1-playback-1": (1, 0)}


async def test_parallel_first_calls_of_one_run_are_one_playback(store, tmp_path):
    """A tape that begins with several equal calls has an answer for each."""
    path = await record(store, tmp_path, "r1")
    lines = path.read_text().splitlines()
    more = [lines[0].replace('"step_id":"', f'"step_id":"{number}', 1) for number in range(4)]
    path.write_text("\n".join([*more, *lines]))
    body = {"model": "policy", "messages": [SYSTEM, QUESTION], "max_tokens": 40}
    async with playing(path) as url, aiohttp.ClientSession() as http:
        agent = Agent(http, f"{url}/v1")  # the only tape needs no name
        answered = await asyncio.gather(*(agent.call("/chat/completions", body) for _ in range(5)))
        assert [status for status, _ in answered] == [200] * 5
        assert await playbacks(http, url) == {"r1-playback-1": (5, 0)}
        assert (await agent.call("/chat/completions", body))[0] == 200
        assert await playbacks(http, url) == {"r1-playback-1": (5, 0), "r1-playback-2": (1, 0)}


async def test_a_call_that_names_no_tape_is_refused_with_their_names(served):
    """A rollout whose calls could be sampled is refused too: there is no engine."""
    url, http = served
    for base in (f"{url}/v1", f"{url}/rollouts/r9/v1"):
        agent = Agent(http, base)
        assert await agent.run() == [404]
        assert (
            "'r1', 'r2'" in agent.replies[0]["error"]["message"] or "'r2', 'r1'" in agent.replies[0]["error"]["message"]
        )
    for terms in ({}, {"playback": {"of": "r1", "on_mismatch": "sample"}}):
        async with http.post(f"{url}/rollouts", json={"rollout_id": f"own-{len(terms)}", **terms}) as response:
            assert response.status == 201
        assert await Agent(http, f"{url}/rollouts/own-{len(terms)}/v1").run() == [422]


async def test_a_playback_that_is_opened_answers_its_own_calls(served):
    url, http = served
    async with http.post(f"{url}/rollouts", json={"rollout_id": "own", "playback": {"of": "r1"}}) as response:
        base = (await response.json())["base_url"]
    assert await Agent(http, base).run() == [200] * 3

    assert await playbacks(http, url) == {"own": (3, 0)}


async def test_texts_to_ignore_hold_for_all_tapes(store, tmp_path):
    path = await record(store, tmp_path, "r1")
    async with playing(path, {"ignore": ["weather in *?", "Today is *."]}) as url, aiohttp.ClientSession() as http:
        agent = Agent(http, f"{url}/rollouts/r1/v1")
        assert await agent.run("Rome") == [200] * 3


async def test_runs_of_an_agent_that_continues_responses_by_their_ids_are_playbacks(store, tmp_path):
    """The id that a later call names is of the playback."""

    async def run(http, base):
        statuses, previous = [], None
        for text in ("Hello", "Go on"):
            agent = Agent(http, base)
            body = {"model": "policy", "input": text, "previous_response_id": previous, "max_output_tokens": 40}
            status, reply = await agent.call("/responses", body)
            statuses, previous = [*statuses, status], reply.get("id")
        return statuses, reply

    path = tmp_path / "tape.jsonl"
    async with recorder(store, tmp_path) as url, aiohttp.ClientSession() as http:
        assert (await run(http, f"{url}/rollouts/r1/v1"))[0] == [200, 200]
        async with http.get(f"{url}/rollouts/r1/steps", headers={"Accept": "application/x-ndjson"}) as response:
            path.write_bytes(await response.read())
    async with playing(path) as url, aiohttp.ClientSession() as http:
        (first, reply), (second, again) = [await run(http, f"{url}/rollouts/r1/v1") for _ in range(2)]
        assert first == second == [200, 200]
        assert reply["output"] == again["output"]
        assert reply["id"] != again["id"]
        assert await playbacks(http, url) == {"r1-playback-1": (2, 0), "r1-playback-2": (2, 0)}


@pytest.mark.parametrize("name", SESSIONS)
async def test_runs_of_real_agents_on_another_day_are_playbacks(name, store, tmp_path):
    """They send titles, sub-agents and several calls at a time; the file has what calls repeat once."""
    recording, path, terms = SESSIONS[name], tmp_path / "tape.jsonl", {"dialects": {"ignore_hosted_tools": True}}
    first, second = recording["sessions"]
    options = Options(max_model_len=2**17, script=read_script(SCRIPT))
    capped = {**terms, "sampling": {"cap": {"max_tokens": "auto"}}, "models": {"*": "simulated"}}
    async with (
        simulating("127.0.0.1:0", options) as engine,
        proxying(engine, store, **capped) as proxy,
        aiohttp.ClientSession() as http,
    ):
        assert [200] * len(first) == await send(http, f"{proxy.url}/rollouts/r", first)
        async with http.get(f"{proxy.url}/rollouts/r/steps?limit=1000") as response:
            _write(path, {"rollout_id": "r"}, (await response.json())["steps"])
    played = {"presets": [recording["preset"]]} if recording["preset"] else {}
    async with playing(path, played, **terms) as url, aiohttp.ClientSession() as http:
        for _ in range(2):
            assert [200] * len(first) == await send(http, f"{url}/rollouts/r", second)
        count = len(first)
        assert await playbacks(http, url) == {"r-playback-1": (count, 0), "r-playback-2": (count, 0)}


async def send(http, base, calls) -> list[int]:
    """Send recorded calls of an agent; return the statuses, up to the first failure."""
    statuses = []
    for path, body in calls:
        async with http.post(f"{base}{path}", json=body) as response:
            statuses.append(response.status)
            await response.read()
        if statuses[-1] != 200:
            break
    return statuses


async def test_old_playbacks_are_deleted(served, monkeypatch):
    """The store of a proxy that serves a tape for months does not grow."""
    url, http = served
    monkeypatch.setattr("proxy.rollouts.playback.MAX_KEPT", 2)
    for _ in range(4):
        assert await Agent(http, f"{url}/rollouts/r1/v1").run() == [200] * 3

    assert [*await playbacks(http, url)] == ["r1-playback-3", "r1-playback-4"]


async def test_a_name_that_a_playback_would_have_is_skipped(served):
    url, http = served
    async with http.post(f"{url}/rollouts", json={"rollout_id": "r1-playback-1"}) as response:
        assert response.status == 201
    assert await Agent(http, f"{url}/rollouts/r1/v1").run() == [200] * 3

    assert await playbacks(http, url) == {"r1-playback-2": (3, 0)}
