"""A tape in place of an engine: files, archives, and what an engine answers besides calls."""

import aiohttp
import pytest
from tests.support.archives import archiver, finished
from tests.support.fakes import settings_for
from tests.support.taped import Agent, playing, record

from proxy.server.playback import with_tapes


async def test_an_agent_is_answered_from_the_file_of_its_rollout(store, tmp_path):
    """The responses are the recorded ones, and no call is sampled."""
    path = await record(store, tmp_path, "r1")
    async with playing(path) as url, aiohttp.ClientSession() as http:
        agent = Agent(http, f"{url}/rollouts/r1/v1")
        assert await agent.run() == [200] * 3
        async with http.get(f"{url}/rollouts/r1-playback-1") as response:
            shown = await response.json()
        async with http.get(f"{url}/rollouts/r1-playback-1/steps") as response:
            played = (await response.json())["steps"]
        async with http.get(f"{url}/rollouts/r1/steps") as response:
            recorded = (await response.json())["steps"]

    assert agent.replies[2]["choices"][0]["message"]["content"] == "You are welcome."
    assert tuple(shown["playback"][name] for name in ("of", "answered", "live", "mismatches")) == ("r1", 3, 0, 0)
    for name in ("step_id", "prompt_ids", "choices", "response"):
        assert [step[name] for step in recorded] == [step[name] for step in played]


async def test_what_an_engine_answers_besides_calls_is_answered_too(store, tmp_path):
    """The list of models has the tape's; tokens are counted; health probes and the routes of operators succeed."""
    path = await record(store, tmp_path, "r1")
    async with playing(path) as url, aiohttp.ClientSession(url) as http:
        async with http.get("/v1/models") as response:
            assert [model["id"] for model in (await response.json())["data"]] == ["policy"]
        hello = [{"role": "user", "content": "Hello"}]
        async with http.post("/v1/messages/count_tokens", json={"model": "policy", "messages": hello}) as response:
            assert (await response.json())["input_tokens"] > 0
        probe = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        async with http.post("/v1/chat/completions", json=probe) as response:
            assert response.status == 200
        for path in ("/health", "/ready", "/engines", "/metrics"):
            async with http.get(path) as response:
                assert response.status == 200


async def test_the_tape_is_an_archive_too(store, tmp_path):
    """A folder, or one of its files."""
    await finished(store, "r1", steps=2)
    await archiver(store, tmp_path / "archive").sweep()
    (file,) = (tmp_path / "archive").glob("*/*.parquet")
    for path in (tmp_path / "archive", file):
        async with playing(path) as url, aiohttp.ClientSession(url) as http, http.get("/rollouts/r1/steps") as response:
            assert len((await response.json())["steps"]) == 2


async def test_files_without_rollouts_and_several_processes_are_refused(tmp_path):
    (tmp_path / "folder").mkdir()
    for name, error in (("none.jsonl", FileNotFoundError), ("folder", ValueError)):
        with pytest.raises(error):
            async with playing(tmp_path / name):
                pass
    with pytest.raises(ValueError, match="workers: 1"):
        async with with_tapes(settings_for(None, workers=2), "x"):
            pass
