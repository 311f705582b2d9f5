"""The code of docs/trainers.md, run in order against a proxy with the trainers' published classes."""

import asyncio
import itertools
import sys
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, Optional

import msgspec
import numpy as np
import pydantic
import pytest
from tests.support.fakes import settings_for
from tests.support.pages import ROOT, blocks_of
from tests.support.trainers import import_published, load_published, torch

from proxy.server.listener import running, simulating
from proxy.simulator.options import Options
from tokentape import AsyncClient

CHECKED = "tests/system/trainers/test_page.py"
PROGRAMS = [block for block in blocks_of(ROOT / "docs" / "trainers.md") if block.checked_by == CHECKED]
TASK = [{"role": "user", "content": "What is 2 + 2?"}]
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}


def published() -> dict[str, ModuleType]:
    """The page's imports: each trainer's own classes, without its package's dependencies."""
    abstract = {"ABC": ABC, "abstractmethod": abstractmethod}
    verl = load_published(
        "verl/experimental/agent_loop/agent_loop.py",
        "AgentLoopMetrics", "AgentLoopOutput", "AgentLoopBase", "_agent_loop_registry", "register",
        BaseModel=pydantic.BaseModel, Optional=Optional, Any=Any, torch=torch, **abstract,
    )  # fmt: skip
    datum, model_input = import_published("tinker", "types.datum", "types.model_input", without=["httpx"])
    return {
        "trl.experimental.async_grpo.async_rollout_worker": load_published(
            "trl/experimental/async_grpo/async_rollout_worker.py", "RolloutSample", dataclass=dataclass, np=np
        ),
        "verl.experimental.agent_loop.agent_loop": verl,
        "openrlhf.utils.agent": load_published("openrlhf/utils/agent.py", "AgentExecutorBase", **abstract),
        "areal.api.workflow_api": load_published("areal/api/workflow_api.py", "RolloutWorkflow", **abstract),
        "torch": torch,
        **not_installable(),
        "tinker.types.datum": datum,
        "tinker.types.model_input": model_input,
    }


@dataclass
class TrajectoryID:
    """SkyRL's trajectory ID (a956457); its trainer reads the fields as attributes."""

    instance_id: str
    repetition_id: int


class Sample(SimpleNamespace):
    """slime's (624b824), created from a dict."""

    @classmethod
    def from_dict(cls, fields):
        return cls(**fields)


class TrainingSample(msgspec.Struct, array_like=True, gc=False):
    """prime-rl's (559b447)."""

    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    temperatures: list[float]
    env_name: str
    ref_logprobs: list[float] | None = None
    mm_kwargs: dict | None = None
    routed_experts: dict | None = None
    mm_token_type_ids: list[int] | None = None
    rl_weights: list[float] | None = None
    ce_weights: list[float] | None = None
    ref_kl_weights: list[float] | None = None
    advantages: list[float] | None = None


def not_installable() -> dict[str, ModuleType]:
    """Replace the trainers that cannot be installed by the classes that the page names."""
    classes = {
        "skyrl.train.generators.base": {"GeneratorInterface": ABC, "TrajectoryID": TrajectoryID},
        "slime.rollout.base_types": {"RolloutFnTrainOutput": SimpleNamespace},
        "slime.utils.types": {"Sample": Sample},
        "prime_rl.transport.types": {"TrainingSample": TrainingSample},
    }
    modules = {name: ModuleType(name) for name in classes}
    for name, names in classes.items():
        vars(modules[name]).update(names)
    return modules


@pytest.fixture
async def page(store, monkeypatch):
    """The names that the page's programs define, against a proxy."""
    names: dict[str, Any] = {}
    modules = published()
    for package in {part for name in modules for part in _upwards(name)} - modules.keys():
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    async with simulating("127.0.0.1:0", Options()) as engine, running(settings_for(engine), store) as served:
        for program in PROGRAMS:
            text = program.text.replace("http://127.0.0.1:8400", served.url)
            exec(compile(text, program.place, "exec"), names)
        yield SimpleNamespace(**names, url=served.url)


def _upwards(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


async def play(page, groups=1, size=4, sampling=None):
    """Record groups that are ready to be claimed."""
    async with AsyncClient(page.url) as client:
        await client.put_policy(3)
        for _ in range(groups):
            await page.play(client, TASK, size, sampling)


async def sampled_with(page):
    """Return the sampling parameters of each recorded step, of all rollouts."""
    async with AsyncClient(page.url) as client:
        steps = [step async for rollout in client.rollouts() async for step in client.steps(rollout["rollout_id"])]
    facts = {"logprobs_mode", "constrained"}  # a field of the engine's logprobs, not of the request
    return [{name: value for name, value in step["sampling"].items() if name not in facts} for step in steps]


async def test_trl_gets_a_completion_of_each_prompt(page):
    """Prompts are repeated as its sampler repeats them; rows are in their order, sampled with the trainer's settings."""
    stop = {"stop": ["END"]}
    args = SimpleNamespace(max_completion_length=24, generation_kwargs=stop, **SAMPLING)
    other = [{"role": "user", "content": "Name a city, and describe it at length."}]
    made = await asyncio.to_thread(page.rollout_func, [TASK] * 3 + [other] * 3, SimpleNamespace(args=args))
    lengths = [len(ids) for ids in made["prompt_ids"]]

    assert {"prompt_ids", "completion_ids", "logprobs", "env_mask", "reward"} == made.keys()
    assert {6} == {len(entries) for entries in made.values()}
    assert lengths[0] < lengths[3]
    assert lengths == sorted(lengths)
    assert made["reward"] == page.recorded_reward(None, **{key: made[key] for key in ("reward", "env_mask")})
    assert [{**SAMPLING, **stop, "max_tokens": 24}] * 6 == await sampled_with(page)


def failing(page, monkeypatch, fails):
    """Let an attempt raise if `fails` accepts its number or its task."""
    attempt, numbers = page.attempt, itertools.count()

    async def attempt_or_fail(rollout, task):
        if fails(next(numbers), task):
            raise ValueError("the agent failed")
        return await attempt(rollout, task)

    monkeypatch.setitem(page.played.__globals__, "attempt", attempt_or_fail)


async def endings(page):
    async with AsyncClient(page.url) as client:
        return Counter([rollout["status"] async for rollout in client.rollouts()])


async def test_an_agent_that_fails_is_tried_again_and_ends_no_run(page, monkeypatch):
    """The others continue, and no rollout is left open."""
    failing(page, monkeypatch, lambda number, task: number < 2)
    args = SimpleNamespace(max_completion_length=24, generation_kwargs=None, **SAMPLING)
    made = await asyncio.to_thread(page.rollout_func, [TASK] * 3, SimpleNamespace(args=args))

    assert {3} == {len(entries) for entries in made.values()}
    assert all(any(mask) for mask in made["env_mask"])
    assert {"completed": 3, "failed": 2} == await endings(page)


@pytest.mark.parametrize("trainer", ["trl", "skyrl"])
async def test_a_task_with_failed_attempts_only_has_a_row_without_trained_tokens(page, monkeypatch, trainer):
    """The run ends only if all tasks fail."""
    other = [{"role": "user", "content": "Name a city."}]
    args = SimpleNamespace(max_completion_length=24, generation_kwargs=None, **SAMPLING)
    params = {"max_tokens": 24, "temperature": 0.5, "top_p": 0.9, "top_k": 20}

    async def run(tasks):
        if trainer == "trl":
            return (await asyncio.to_thread(page.rollout_func, tasks, SimpleNamespace(args=args)))["env_mask"]
        batch = {"prompts": tasks, "sampling_params": params, "trajectory_ids": list(tasks)}
        return (await page.RecordedGenerator().generate(batch))["loss_masks"]

    failing(page, monkeypatch, lambda number, task: task == other)
    masks = await run([TASK, other, TASK])
    with pytest.raises(RuntimeError, match="3 attempts at a task have no row"):
        await run([other])

    assert [True, False, True] == [any(mask) for mask in masks]
    assert {"completed": 2, "failed": 6} == await endings(page)


async def test_an_episode_of_areal_is_rejected_if_all_attempts_fail(page, monkeypatch):
    failing(page, monkeypatch, lambda number, task: True)
    gconfig = SimpleNamespace(
        greedy=False, temperature=0.5, max_new_tokens=24, min_new_tokens=0, stop_token_ids=[9], top_p=1.0, top_k=20,
        frequency_penalty=0.0, ignore_eos=False, stop=None,
    )  # fmt: skip

    assert None is await page.RecordedWorkflow(gconfig).arun_episode(None, {"messages": TASK})


async def test_a_group_with_an_agent_that_fails_is_trained_without_it(page, monkeypatch):
    """It is complete, and the member that failed is named."""
    failing(page, monkeypatch, lambda number, task: number == 1)
    await play(page)
    (group,) = await page.claimed(1, "skyrl")

    assert 3 == len(group["rollouts"])
    assert ["failed"] == [name for name in await endings(page) if name != "completed"]


def async_args(**fields):
    """The fields of TRL's AsyncGRPOConfig that the page reads."""
    return SimpleNamespace(
        queue_maxsize=64, max_staleness=3, max_completion_length=24, num_generations=4, **{**SAMPLING, **fields}
    )


async def test_trls_queue_is_filled_with_its_samples(page):
    """With each rollout of the group: numpy arrays, the announced version, and a number for each group."""
    await play(page, groups=2)
    worker = page.RecordedWorker([TASK], async_args())
    async with AsyncClient(page.url) as client:
        await worker.fill(client, wait_s=0)
    samples = [worker.rollout_buffer.get() for _ in range(8)]

    assert worker.rollout_buffer.empty()
    assert {3} == {sample.model_version for sample in samples}
    assert {sum(sample.completion_mask.tolist()) > 0 for sample in samples} == {True}
    assert {len(sample.input_ids.tolist()) == len(sample.old_log_probs.tolist()) for sample in samples} == {True}
    assert [4, 4] == list(Counter(sample.group_id for sample in samples).values())


async def test_trls_worker_generates_and_announces_until_its_thread_ends(page):
    """Once started, it fills the queue; once its thread has ended, its health check raises."""
    worker = page.RecordedWorker([TASK], async_args())
    await asyncio.to_thread(worker.update_model_version, 1)
    worker.start()
    samples = [await asyncio.to_thread(worker.rollout_buffer.get, timeout=60) for _ in range(8)]
    worker.check_health(1)
    await asyncio.to_thread(worker.stop)

    assert {1} == {sample.model_version for sample in samples}
    assert {**SAMPLING, "max_tokens": 24} in await sampled_with(page)
    with pytest.raises(RuntimeError, match="has stopped"):
        worker.check_health(1)


async def test_verls_agent_loop_returns_its_output(page):
    """Registered by name; within the lengths to which its worker pads, sampled with its settings."""
    loop = object.__new__(page.RecordedLoop)  # verl's own __init__ needs a model's tokenizer
    loop.rollout_config = SimpleNamespace(prompt_length=7, response_length=5)
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.0}
    output = await loop.run({**sampling, "logprobs": True}, raw_prompt=TASK)

    assert isinstance(output, page.AgentLoopOutput)
    assert 7 == len(output.prompt_ids)
    assert 5 >= len(output.response_ids) == len(output.response_mask) == len(output.response_logprobs)
    assert output.reward_score in (0.0, 1.0)
    assert [{**sampling, "max_tokens": 5}] == await sampled_with(page)


async def test_openrlhfs_executor_returns_its_response(page):
    """With its prompt and label, sampled with its settings."""
    params = SimpleNamespace(temperature=0.5, top_p=0.9, top_k=20, min_tokens=1, max_tokens=24, stop=[])
    response = await page.AgentExecutor().execute("2 + 2?", "4", params, 2048, None, None)

    assert ("2 + 2?", "4") == (response["prompt"], response["label"])
    ((start, end),) = response["action_ranges"]
    assert 0 < start < end == len(response["observation_tokens"]) == len(response["rollout_log_probs"])
    assert [{"temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_tokens": 1, "max_tokens": 24}] == await sampled_with(
        page
    )


async def test_areals_workflow_returns_its_tensors(page):
    """All of one length except the reward, sampled with its settings."""
    async with AsyncClient(page.url) as client:
        await client.put_policy(3)
    sampling = {"top_p": 0.9, "top_k": 20, "frequency_penalty": 0.0, "ignore_eos": False, "stop": ["END"]}
    gconfig = SimpleNamespace(
        greedy=False, temperature=0.5, max_new_tokens=24, min_new_tokens=0, stop_token_ids=[9], **sampling
    )
    tensors = await page.RecordedWorkflow(gconfig).arun_episode(None, {"messages": TASK})

    assert (1,) == tensors.pop("rewards").shape
    assert 1 == len({tensor.shape for tensor in tensors.values()})
    assert [{**sampling, "temperature": 0.5, "max_tokens": 24, "stop_token_ids": [9]}] == await sampled_with(page)


async def test_tinkers_data_are_made_of_batches(page):
    """A Datum for each rollout; it returns once it has the groups, and waits for no others."""
    await play(page)
    made = await page.data()

    assert 4 == len(made)
    assert {"target_tokens", "logprobs", "advantages"} == made[0].loss_fn_inputs.keys()


async def test_skyrls_generator_returns_one_output_in_order(page):
    """The output has the trainer's own trajectory IDs; a claimed group's IDs are objects of the trainer's class."""
    ids = [TrajectoryID("a", 0), TrajectoryID("a", 1)]
    params = {"max_tokens": 24, "temperature": 0.5, "top_p": 0.9, "top_k": 20, "logprobs": 0}
    output = await page.RecordedGenerator().generate(
        {"prompts": [TASK, TASK], "sampling_params": params, "trajectory_ids": ids}
    )
    await play(page, size=2)
    (group,) = await page.claimed(1, "skyrl")
    found = page.with_trajectory_ids(group["data"])["trajectory_ids"]

    assert ids == output["trajectory_ids"]
    assert {2} == {len(entries) for entries in output.values() if entries is not None}
    assert {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "max_tokens": 24} in await sampled_with(page)
    assert [(group["group_id"], 0), (group["group_id"], 1)] == [(row.instance_id, row.repetition_id) for row in found]


async def test_slimes_samples_of_several_groups_share_no_number(page):
    """Each rollout has the denominator of its own loss mask, over all groups and claims."""
    await play(page, groups=3, size=2)
    args = SimpleNamespace(rollout_batch_size=3)
    groups = (await asyncio.to_thread(page.generate_rollout, args, 0, None)).samples
    samples = [sample for group in groups for sample in group]
    sums = Counter()
    for sample in samples:
        sums[sample.rollout_id] += sum(sample.loss_mask)

    assert [2, 2, 2] == list(map(len, groups))
    assert [sum(sample.loss_mask) for sample in samples] == [sums[sample.rollout_id] for sample in samples]
    assert (6, 3) == (len({sample.index for sample in samples}), len({sample.group_index for sample in samples}))


async def test_prime_rls_samples_are_made_of_batches(page):
    """With the environment of the metadata, and the temperature that the trainer set."""
    await play(page, sampling=page.rules(24, temperature=0.5))
    samples = await page.training_samples(1)

    assert 4 == len(samples)
    assert {("arithmetic", 0.5)} == {(sample.env_name, sample.temperatures[0]) for sample in samples}
