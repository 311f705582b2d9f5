"""Playbacks of the recorded calls of agents: sessions on two days, in which dates, times and random ids differ.

`python -m tests.system.agents.record_playback` records them; tests/system/agents/test_playback.py runs the agents.
"""

from contextlib import asynccontextmanager

import orjson
import pytest
from tests.support.fakes import proxying
from tests.support.pages import ROOT
from tests.support.stored import stored_rollout, stored_steps

from proxy.server.listener import simulating
from proxy.simulator.options import Options
from proxy.simulator.script import read_script

SESSIONS = {
    path.stem: orjson.loads(path.read_bytes())
    for path in sorted((ROOT / "tests/system/agents/sessions").glob("*.json"))
}
SCRIPT = ROOT / "tests/system/agents/playback.yaml"
TERMS = {
    "sampling": {"cap": {"max_tokens": "auto"}},
    "models": {"*": "simulated"},
    "dialects": {"ignore_hosted_tools": True},
}
OFF, APPEND = {"continuation": {"mode": "off"}}, {"continuation": {"mode": "append"}}
DRIFTING = {"noncanonical_rate": 0.3, "seed": 1}  # many replies have other ids when they are rendered


@pytest.fixture(scope="module", params=SESSIONS)
def recording(request):
    """The recorded sessions of an agent."""
    return SESSIONS[request.param]


class Session:
    """A proxy, and the calls of an agent to it."""

    def __init__(self, http, url):
        self._http, self._url = http, url

    async def open(self, rollout, **playback):
        terms = {"rollout_id": rollout, "playback": playback}
        async with self._http.post(f"{self._url}/rollouts", json=terms) as response:
            assert response.status == 201, await response.text()

    async def send(self, rollout, calls, *, until=None):
        """Send calls, and return the status and the origin of each response, up to the first with the status `until`."""
        seen = []
        for path, body in calls:
            async with self._http.post(f"{self._url}/rollouts/{rollout}{path}", json=body) as response:
                seen.append((response.status, response.headers.get("X-Playback"), await response.text()))
            if until == seen[-1][0]:
                break
        return seen

    async def rows(self, rollout):
        """Return the exported sequences, without the names of their rollout."""
        url = f"{self._url}/rollouts/{rollout}/export?format=sequences&inherited=trained"
        async with self._http.get(url) as response:
            rows = (await response.json())["rows"]
        names = ("token_ids", "mask", "logprobs", "spans", "finish_reason")
        return sorted(orjson.dumps([row[name] for name in names]) for row in rows)


@pytest.fixture
def session(http, store):
    """Start a proxy: each has a cold process, as after a restart."""

    @asynccontextmanager
    async def started(engine, **settings):
        async with proxying(engine, store, **TERMS, **settings) as served:
            yield Session(http, served.url)

    return started


@pytest.fixture
async def engine():
    """An engine that replies by the script."""
    options = Options(max_model_len=2**17, script=read_script(SCRIPT), **DRIFTING)
    async with simulating("127.0.0.1:0", options) as url:
        yield url


@pytest.fixture
async def recorded(recording, session, engine, store):
    """The steps of the first session; their prompts were continued by ids."""
    async with session(engine, **APPEND) as agent:
        seen = await agent.send("r", recording["sessions"][0])
    assert {status for status, *_ in seen} == {200}, seen
    steps = await stored_steps(store, "r")
    assert any("rendered" in (step.extra.get("continuation") or {}) for step in steps)
    return steps


def presets_of(recording):
    """Return the terms of a playback of this agent."""
    return {"presets": [recording["preset"]]} if recording["preset"] else {}


async def test_the_session_of_another_day_is_answered_without_an_engine(recording, session, recorded, store):
    """Each call gets the response of its step, and the export has the same sequences."""
    async with session(None) as agent:
        await agent.open("p", of="r", **presets_of(recording))
        seen = await agent.send("p", recording["sessions"][1], until=422)
        sources, played = await agent.rows("r"), await agent.rows("p")
    steps = {step.step_id: step for step in await stored_steps(store, "p")}

    assert [(200, "answered")] * len(recorded) == [(status, how) for status, how, _ in seen], seen[-1]
    assert {step.step_id for step in recorded} == steps.keys()
    assert all(step.choices == steps[step.step_id].choices for step in recorded)
    assert all(step.response == steps[step.step_id].response for step in recorded)
    assert sources == played


async def test_branches_before_each_step_have_its_prompt_ids(recording, session, engine, recorded, store):
    """The process is cold, continuation is off, and the template renders other ids."""
    for at, branch in enumerate(recorded):
        async with session(engine, **OFF) as agent:
            await agent.open(f"b{at}", of="r", before=branch.step_id, **presets_of(recording))
            seen = await agent.send(f"b{at}", recording["sessions"][1], until=422)
        steps = await stored_steps(store, f"b{at}")
        live = [step for step in steps if not step.inherited]
        origins = {step.extra["branched_from"]["step_id"]: step for step in live if "branched_from" in step.extra}
        inherited = {step.step_id for step in steps if step.inherited}

        assert {status for status, *_ in seen} == {200}, seen[-1]
        assert (await stored_rollout(store, f"b{at}")).has_branched
        assert {step.step_id for step in recorded[:at]} == inherited
        assert branch.step_id in origins
        assert all(prompts_of(step) == prompts_of(origins.get(step.step_id, step)) for step in recorded)
        assert [[]] * len(recorded) == [list(step.problems) for step in steps]


async def test_what_follows_a_live_reply_continues_its_ids(recording, session, recorded, store):
    """Though the texts are the source's, as with a policy that thinks something else: its ids are never sent then."""
    options = Options(max_model_len=2**17, script=read_script(SCRIPT), noncanonical_rate=0.9, seed=7)
    async with simulating("127.0.0.1:0", options) as other:
        for at, branch in enumerate(recorded):
            async with session(other, **APPEND) as agent:
                await agent.open(f"b{at}", of="r", before=branch.step_id, **presets_of(recording))
                seen = await agent.send(f"b{at}", recording["sessions"][1], until=422)
                sources, rows = await agent.rows("r"), await agent.rows(f"b{at}")

            assert {status for status, *_ in seen} == {200}, seen[-1]
            assert len(sources) == len(rows)
    assert ids_of(recorded).isdisjoint(ids_of((await stored_steps(store, "b0"))[:1]))


def ids_of(steps):
    return {tuple(choice.ids) for step in steps for choice in step.choices}


def prompts_of(step):
    return [list(prompt) for prompt in step.prompts]


@pytest.mark.parametrize("name", ["claude-code", "codex", "codex-default", "opencode"])
async def test_without_the_preset_a_session_is_refused(name, session, engine):
    """Otherwise the tests above prove nothing."""
    first, second = SESSIONS[name]["sessions"]
    async with session(engine) as agent:
        await agent.send("r", first)
        await agent.open("p", of="r")
        *_, (status, _, text) = await agent.send("p", second, until=422)

    assert status == 422
    assert "is a playback of" in text
