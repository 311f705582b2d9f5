"""examples/openenv_session.py: sessions that TRL's worker for OpenEnv trains, with the published code of both."""

import asyncio
import enum
import importlib
import itertools
import json
import logging
import sys
import time
import uuid
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pydantic
import pytest
from openai import OpenAI
from tests.support.trainers import import_published, load_published

from tokentape import AsyncClient, Client

SAMPLING = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0.0}


@pytest.fixture(scope="module")
def published():
    """Return the example, with openenv's own classes, and TRL's rollout loop, without what both packages depend on."""
    names = ("client_types", "env_server.types", "harness.capture.validate", "harness.training", "harness.rollout")
    *_, check, training, rollout = import_published("openenv", *(f"core.{name}" for name in names), without=[])
    harness = ModuleType("openenv.core.harness")
    for name in ("TrainingTrace", "TrainingTurn"):
        setattr(harness, name, getattr(training, name))
    for name in ("ResourceSession", "ResourceSessionFactory", "ToolResult", "VerifyResult"):
        setattr(harness, name, getattr(rollout, name))
    parents = ("openenv", "openenv.core", "openenv.core.harness.capture")
    modules = {name: ModuleType(name) for name in parents} | {it.__name__: it for it in (harness, check)}
    with patch.dict(sys.modules, modules):
        yield importlib.import_module("openenv_session"), trl_loop(rollout.TrainableSession)


def trl_loop(trainable):
    """Return what TRL's worker runs for a session."""
    folder, used = "trl/experimental/async_grpo/", {"Any": Any, "dataclass": dataclass, "field": field}
    rows = (
        "TurnRecord",
        "TrainingSequence",
        "_common_prefix_len",
        "DriftKind",
        "_SampleBuilder",
        "_chain_to_sequences",
    )
    worker = load_published(f"{folder}async_rollout_worker.py", *rows, enum=enum, RolloutId=str, **used)
    shown = (
        "_tool_call_counts_by_name",
        "_tool_failures_by_name",
        "_messages_from_trace",
        "_turns_from_training_trace",
    )
    own = ("CaptureContractError", "HarnessRolloutOutcome", "_HarnessRolloutLoop._run_session", *shown)
    used |= {"TurnRecord": worker.TurnRecord, "_chain_to_sequences": worker._chain_to_sequences, "cast": cast}
    used |= {"time": time, "uuid": uuid, "itertools": itertools, "logger": logging.getLogger("trl")}
    return load_published(f"{folder}openenv_harness.py", *own, TrainableSession=trainable, **used)


def agent(code):
    """Return the command of an agent: two questions, and `code` in between."""
    program = f"""
import json, os, sys, time
from openai import OpenAI
client, messages = OpenAI(), [{{"role": "user", "content": json.loads(os.environ["TASK"])}}]
for turn in range(2):
    reply = client.chat.completions.create(model="policy", messages=messages, max_tokens=6, temperature=0.2)
    messages += [reply.choices[0].message.to_dict(), {{"role": "user", "content": "More."}}]
    if not turn:
        {code}
"""
    return [sys.executable, "-c", program]


async def run_session(published, url, command, *, grade=lambda _task, _transcript: 0.5, hangs=False):
    """Run a session as TRL's worker does; return its rollout ID, and what the worker returns."""
    example, loop = published
    factory = partial(example.Sessions, url, command, grade)(sampling=SAMPLING)
    created = []

    class Factory:
        def create(self, *args, **named):
            session = factory.create(*args, **named)
            created.append(session)
            if hangs:
                session.wait_for_completion = partial(time_out, url, session)
            return session

    worker = SimpleNamespace(
        _factory=Factory(), _EMPTY_ROLLOUT=(), _live_sessions=set(), _stop_event=asyncio.Event(), _adapter=None,
        _rollout_reward_fn=None, _fork_threshold_tokens=0,
    )  # fmt: skip
    result, metrics = await asyncio.to_thread(loop._run_session, worker, "Hello", 3)
    return created[0].rollout_id, result, metrics


def time_out(url, session):
    """Wait for the first step of a session, and then no longer for its agent."""
    with Client(url) as client:
        while not client.rollout(session.rollout_id)["counts"].get("steps"):
            time.sleep(0.02)
    type(session).wait_for_completion(session, 0)


async def test_trl_trains_what_was_sampled(published, simulated):
    """One row for both turns: the ids and logprobs of the steps, sampled as the worker says, and the reward of `grade`."""
    url, _ = simulated
    seen = []
    grade = lambda task, transcript: seen.append((task, len(transcript))) or 0.5  # noqa: E731
    name, (completion, ids, (row,), *_, reward), metrics = await run_session(published, url, agent("pass"), grade=grade)
    async with AsyncClient(url) as client:
        rollout, steps = await client.rollout(name), [step async for step in client.steps(name)]

    sampled = [(token, logprob) for step in steps for token, logprob in zip(*ids_of(step), strict=True)]
    trained = zip(row.input_ids, row.old_log_probs, row.completion_mask, strict=True)
    assert sampled == [(token, logprob) for token, logprob, is_trained in trained if is_trained]
    assert [token for token, _ in sampled] == ids
    assert steps[0]["prompt_ids"] == row.input_ids[: len(steps[0]["prompt_ids"])]
    assert [step["sampling"]["temperature"] for step in steps] == [0.7, 0.7]
    assert seen == [("Hello", 4)]
    assert (rollout["status"], rollout["reward"], reward, metrics["turns"]) == ("completed", 0.5, 0.5, 2)
    assert completion[-1]["role"] == "assistant"


def ids_of(step):
    (choice,) = step["choices"]
    return choice["ids"], choice["logprobs"]


@pytest.mark.parametrize(("code", "hangs"), [("raise SystemExit(3)", False), ("time.sleep(600)", True)])
async def test_an_agent_that_fails_or_hangs_has_no_reward(published, simulated, code, hangs):
    """What it sampled until then is in the trace; its rollout is finished and its process ended."""
    url, _ = simulated
    name, result, metrics = await run_session(published, url, agent(code), hangs=hangs)
    async with AsyncClient(url) as client:
        rollout = await client.rollout(name)

    assert (rollout["status"], result[-1], metrics["turns"]) == ("failed", None, 1)


async def test_a_call_that_ends_while_the_trace_is_read_has_a_turn_or_none(published, simulated):
    """The agent of a session that timed out still runs."""
    url, _ = simulated

    def traced():
        with Client(url) as client:
            opened, read = client.open_rollout("r1"), client.steps

            def call():
                with OpenAI(base_url=opened["base_url"], api_key=opened["api_key"]) as caller:
                    caller.completions.create(model="policy", prompt="Hello", max_tokens=2)

            def steps(name):
                yield from read(name)
                call()

            call()
            client.steps = steps
            return published[0].Session(client, "r1", None, None, None).fetch_training_trace()

    assert 1 <= len((await asyncio.to_thread(traced)).turns) <= 2


async def test_a_session_without_an_agent_leaves_no_open_rollout(published, simulated):
    """Its command does not exist."""
    url, _ = simulated
    factory = published[0].Sessions(url, ["/nowhere/agent"], None, sampling={})
    with pytest.raises(FileNotFoundError):
        await asyncio.to_thread(factory.create, "Hello", None, "r1")
    async with AsyncClient(url) as client:
        assert (await client.rollout("r1"))["status"] == "aborted"


async def test_the_program_prints_the_turns_of_a_session(published, simulated, run):
    """Two calls are two turns; the rollout is completed without a reward."""
    url, _ = simulated
    trace, output = await run(published[0].main, "--url", url, "--", *agent("pass"))
    async with AsyncClient(url) as client:
        (rollout,) = [rollout async for rollout in client.rollouts()]

    assert [turn.node_id for turn in trace.turns] == [line.partition(":")[0] for line in output.splitlines()]
    assert (len(trace.turns), rollout["status"], rollout["reward"]) == (2, "completed", None)


def test_its_trace_is_validated_by_openenv(published):
    """The published model refuses a turn whose prompt is trained."""
    example, _ = published
    turn = {"node_id": "s/0", "prompt_token_ids": [1], "completion_token_ids": [2], "per_token_logps": [-0.5]}
    example.TrainingTurn(**turn, loss_mask=[0, 1])
    with pytest.raises(pydantic.ValidationError, match="trainable_prompt"):
        example.TrainingTurn(**turn, loss_mask=[1, 1])
    json.dumps(example.TrainingTrace(turns=[example.TrainingTurn(**turn, loss_mask=[0, 1])]).to_trace_entries())
