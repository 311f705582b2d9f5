"""The laws of playbacks, with drawn agents: a full playback repeats the rollout, and a branch follows it up to its step."""

import asyncio
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import UNCHECKED
from tests.support.fakes import proxying
from tests.support.stored import stored_steps

from proxy.server.listener import simulating
from proxy.simulator.options import Options

DIALECTS = ("chat", "messages", "responses")
PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}


@dataclass(frozen=True)
class Agent:
    """A deterministic agent: threads that ask on or repeat a question, each in a dialect, one after the other or at once."""

    threads: tuple[tuple[str, tuple[bool, ...]], ...]  # dialect, and for each call whether it repeats the one before
    at_once: bool
    stream: bool


AGENTS = st.builds(
    Agent,
    st.lists(
        st.tuples(st.sampled_from(DIALECTS), st.lists(st.booleans(), min_size=1, max_size=4).map(tuple)),
        min_size=1,
        max_size=3,
    ).map(tuple),
    st.booleans(),
    st.just(False),
)


def body_of(dialect, turns):
    """The request that continues these turns of user and assistant."""
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(turns)]
    if dialect == "responses":
        return {"model": "m", "input": messages, "temperature": 1.0, "max_output_tokens": 6}
    return {"model": "m", "messages": messages, "temperature": 1.0, "max_tokens": 6}


def text_of(dialect, shown):
    """The text of a response."""
    if dialect == "chat":
        return shown["choices"][0]["message"]["content"]
    if dialect == "messages":
        return "".join(block.get("text", "") for block in shown["content"])
    return "".join(part["text"] for item in shown["output"] for part in item.get("content", ()))


class Run:
    """What an agent saw: for each thread the text of each call, or the status of the one that failed."""

    def __init__(self, http, urls, rollout, seed=0):
        self._http, self._urls, self._rollout, self._dice = http, urls, rollout, Random(seed)
        self.answered = 0

    async def all(self, agent):
        threads = [self._thread(number, dialect, calls) for number, (dialect, calls) in enumerate(agent.threads)]
        if agent.at_once:
            return await asyncio.gather(*threads)
        return [await thread for thread in threads]

    async def _thread(self, number, dialect, calls):
        turns, seen = [f"Thread {number}?"], []
        for repeats in calls:
            url = f"{self._dice.choice(self._urls)}/rollouts/{self._rollout}{PATHS[dialect]}"
            async with self._http.post(url, json=body_of(dialect, turns)) as response:
                if response.status != 200:
                    seen.append(response.status)
                    break
                self.answered += response.headers.get("X-Playback") == "answered"
                seen.append(text_of(dialect, await response.json()))
            if not repeats:
                turns = [*turns, seen[-1] or ".", "And?"]
        return seen


@pytest.fixture
async def urls(store):
    """Two proxies that share a store and an engine."""
    async with (
        simulating("127.0.0.1:0", Options()) as engine,
        proxying(engine, store) as first,
        proxying(engine, store) as second,
    ):
        yield first.url, second.url


async def opened(http, urls, name, **playback):
    async with http.post(f"{urls[0]}/rollouts", json={"rollout_id": name, "playback": playback}) as response:
        assert response.status == 201, await response.text()


@pytest.fixture
def numbers():
    """Numbers for the rollouts of the examples."""
    return iter(range(10_000))


@settings(max_examples=25, deadline=None, suppress_health_check=UNCHECKED)
@given(agent=AGENTS, at=st.integers(0, 11), through=st.booleans())
async def test_a_playback_repeats_its_source_and_a_branch_parts_from_it_at_its_step(
    http, store, urls, numbers, agent, at, through
):
    """Each step is used once, no call reaches an engine before the branch step, and its prompt ids are the source's."""
    number = next(numbers)
    source, whole, branch = f"r{number}", f"w{number}", f"b{number}"
    recorded = await Run(http, urls, source).all(agent)
    sources = await stored_steps(store, source)

    await opened(http, urls, whole, of=source)
    run = Run(http, urls, whole, seed=1)
    played = await run.all(agent)
    steps = await stored_steps(store, whole)
    assert run.answered == len(sources)
    assert sorted(map(str, played)) == sorted(map(str, recorded)) if agent.at_once else played == recorded
    assert sorted(step.step_id for step in steps) == sorted(step.step_id for step in sources)
    by_id = {step.step_id: step for step in sources}
    for step in steps:
        origin = by_id[step.step_id]
        assert (step.choices, step.body, step.problems) == (origin.choices, origin.body, origin.problems)

    chosen = sources[at % len(sources)]
    await opened(http, urls, branch, of=source, **{"through" if through else "before": chosen.step_id})
    seen = await Run(http, urls, branch, seed=2).all(agent)
    own = await stored_steps(store, branch)
    inherited = [step for step in own if step.inherited]
    live = [step for step in own if not step.inherited]
    is_reached = through or len(own) > len(inherited)
    assert is_reached
    assert not [status for thread in seen for status in thread if status == 422]
    assert {step.step_id for step in inherited} <= {step.step_id for step in sources[: at % len(sources) + through]}
    assert not any(step.problems for step in own)
    for step in live:
        facts = step.extra.get("branched_from")
        if facts is not None and facts["step_id"] == chosen.step_id and not through:
            assert list(step.prompts[0]) == list(chosen.prompts[0])
