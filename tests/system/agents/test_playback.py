"""Real agents whose recorded sessions are played back, on another day: without an engine, and as branches before each step."""

import asyncio
import os
from collections import Counter

import orjson
import pytest
import replace_agent
from tests.support.commands import started
from tests.support.fakes import proxying
from tests.support.stored import stored_rollout, stored_steps

from proxy.simulator.script import read_script
from proxy.trajectory.thread_rules import PRESETS
from tokentape import AsyncClient

from .clients import LOOPS
from .conftest import WINDOW
from .recorded import recorded
from .running import PROGRAMS, installed_version
from .taped import ANOTHER_DAY, SCRIPT, TAPED, Taped
from .test_loops import APPEND, DRIFTING, OFF, TERMS, show_the_stop_token

pytestmark = pytest.mark.timeout(900)  # an agent runs once for each of its calls


@pytest.fixture(params=TAPED, ids=[agent.name for agent in TAPED])
def agent(request):
    """An agent."""
    return request.param


@pytest.fixture
async def taped(agent, scripted, store, http, environment, tmp_path):
    """Record a session of the agent: the URL of the engine, the steps, and the exported sequences."""
    async with scripted(script=read_script(SCRIPT), **DRIFTING) as engine:
        async with proxying(engine, store, **TERMS, **APPEND) as served:
            await show_the_stop_token(http, served.url)
            await agent.play(served.url, "r", environment, tmp_path / "session", {"TZ": "UTC"})
            rows = await sequences(http, served.url, "r")
        yield engine, await stored_steps(store, "r"), rows


async def sequences(http, url, rollout):
    """Return the exported sequences, without what names their rollout."""
    async with http.get(f"{url}/rollouts/{rollout}/export?format=sequences&inherited=trained") as response:
        assert response.status == 200
        rows = orjson.loads(await response.read())["rows"]
    names = ("token_ids", "mask", "logprobs", "spans", "finish_reason")
    return sorted(orjson.dumps([row[name] for name in names]) for row in rows)


async def play(agent, url, http, environment, folder, rollout, **playback):
    """Open a playback and let the agent run in it."""
    terms = {"of": "r", "presets": [agent.preset] if agent.preset else [], **playback}
    async with http.post(f"{url}/rollouts", json={"rollout_id": rollout, "playback": terms}) as response:
        assert response.status == 201, await response.text()
    await agent.play(url, rollout, environment, folder, {"TZ": ANOTHER_DAY})


async def test_a_full_playback_calls_no_engine_and_has_the_same_sequences(
    agent, taped, store, http, environment, tmp_path
):
    """The proxy has no engine. Calls of sub-agents may come in another order."""
    _, sources, rows = taped
    async with proxying(None, store, **TERMS) as served:
        await play(agent, served.url, http, environment, tmp_path / "session", "p")
        played = await sequences(http, served.url, "p")
    steps = {step.step_id: step for step in await stored_steps(store, "p")}

    assert agent.calls == len(sources)
    assert (await stored_rollout(store, "p")).mismatch is None
    assert {step.step_id for step in sources} == steps.keys()
    assert all(
        (step.choices, step.response) == (steps[step.step_id].choices, steps[step.step_id].response) for step in sources
    )
    assert rows == played


async def test_branches_before_each_step_have_its_prompt_ids(agent, taped, store, http, environment, tmp_path):
    """Each in a cold process with continuation off, with a template that renders other ids."""
    engine, sources, _ = taped
    assert any("rendered" in (step.extra.get("continuation") or {}) for step in sources)
    for at, branch in enumerate(sources):
        async with proxying(engine, store, **TERMS, **OFF) as served:
            await play(agent, served.url, http, environment, tmp_path / "session", f"b{at}", before=branch.step_id)
        rollout, steps = await stored_rollout(store, f"b{at}"), await stored_steps(store, f"b{at}")
        live = [step for step in steps if not step.inherited]
        origins = {step.extra["branched_from"]["step_id"]: step for step in live if "branched_from" in step.extra}

        assert rollout.mismatch is None
        assert rollout.has_branched
        assert {step.step_id for step in sources[:at]} == {step.step_id for step in steps if step.inherited}
        assert agent.calls == len(steps)
        assert branch.step_id in origins
        assert all(prompts_of(step) == prompts_of(origins.get(step.step_id, step)) for step in sources)
        assert Counter() == Counter(problem for step in steps for problem in step.problems)


@pytest.mark.parametrize("agent", [agent for agent in TAPED if agent.runs == "cli"], ids=lambda agent: agent.name)
async def test_a_killed_agent_is_replaced_from_where_it_stopped(
    agent, scripted, store, environment, tmp_path, monkeypatch
):
    """By examples/replace_agent.py: the dead one's steps are inherited, and the next one does the rest of the work."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{environment.programs}:{os.environ['PATH']}")
    command = ["bash", "-euo", "pipefail", str(PROGRAMS / agent.program), *agent.words]
    options = ["--dies-after", "2", *(["--preset", agent.preset] if agent.preset else [])]
    async with scripted(script=read_script(SCRIPT)) as engine, proxying(engine, store, **TERMS) as served:
        rows = await asyncio.to_thread(replace_agent.main, ["--url", served.url, *options, "--", *command])
        async with AsyncClient(served.url) as client:
            found = {each["status"]: each["rollout_id"] async for each in client.rollouts()}
    dead, played = [await stored_steps(store, found[status]) for status in ("failed", "completed")]
    complete = {step.step_id for step in dead if step.status == "complete"}

    assert 2 <= len(complete) < agent.calls
    assert complete == {step.step_id for step in played if step.inherited}
    assert agent.calls == len(played)
    assert {found["completed"]} == {row["rollout_id"] for row in rows}
    assert sum(sum(row["mask"]) for row in rows) == sum(step.sampled for step in played)


def prompts_of(step):
    return [list(prompt) for prompt in step.prompts]


async def test_the_recorded_sessions_are_of_the_version_that_runs(agent, environment):
    """`python -m tests.system.agents.record_playback` records them again."""
    recording = orjson.loads((SCRIPT.parent / "sessions" / f"{agent.name}.json").read_bytes())

    assert recording["version"] == await installed_version(agent.runs, agent.package, environment)


# The others of script.yaml write and read a file at the same time, so that their results are not the same in each run.
PLAYED = [loop for loop in LOOPS if loop.calls]


@pytest.mark.parametrize("loop", PLAYED, ids=[loop.name for loop in PLAYED])
async def test_each_tool_loop_is_played_without_an_engine(loop, scripted, store, http, environment, tmp_path):
    """Of each client and framework of docs/clients.md. The recorded run had an error that it retried."""
    preset = next((name for name, known in PRESETS.items() if known.package == loop.package), None)
    words = (loop.task, loop.dialect, loop.ways[-1])
    agent = Taped(loop.name, loop.package, preset, loop.runs, loop.file, words, len(loop.calls))
    async with scripted() as engine, proxying(engine, store, **TERMS) as served:
        await agent.play(served.url, "r", environment, tmp_path / "session", {"TZ": "UTC"})
    async with proxying(None, store, **TERMS) as served:
        await play(agent, served.url, http, environment, tmp_path / "session", "p")
    sources = [step.step_id for step in await stored_steps(store, "r") if step.status == "complete"]

    assert sorted(sources) == sorted(step.step_id for step in await stored_steps(store, "p"))


async def test_two_workers_play_after_a_restart(environment, http, tmp_path):
    """Either worker gets a call of an agent and of its sub-agents; each step of the tape is used once."""
    (agent,) = [agent for agent in TAPED if agent.name == "claude-code"]
    configuration = tmp_path / "config.yaml"
    settings = {**TERMS, "store": {"url": f"embedded:{tmp_path / 'store'}"}, "log": {"level": "error"}}
    configuration.write_bytes(orjson.dumps(settings))
    serve = ("serve", "--config", str(configuration), "--workers", "2", "--listen", "127.0.0.1:0")
    simulate = ("simulate", "--listen", "127.0.0.1:0", "--script", str(SCRIPT), "--max-model-len", str(WINDOW))
    with started(*simulate) as (_, engine, _):
        with started(*serve, "--engine", engine) as (_, url, _):
            await agent.play(url, "r", environment, tmp_path / "session", {"TZ": "UTC"})
            sources = await recorded(http, url, "r")
        with started(*serve, "--engine", engine) as (_, url, _):
            await play(agent, url, http, environment, tmp_path / "session", "p")
            await play(agent, url, http, environment, tmp_path / "session", "b", before=sources.steps[4]["step_id"])
            full, branch = await recorded(http, url, "p"), await recorded(http, url, "b")

    ids = [step["step_id"] for step in sources.steps]
    assert agent.calls == len(ids)
    assert sorted(ids) == sorted(step["step_id"] for step in full.steps)
    assert all("inherited" in step for step in full.steps)
    assert set(ids[:4]) == {step["step_id"] for step in branch.steps if "inherited" in step}
    assert agent.calls == len(branch.steps)
