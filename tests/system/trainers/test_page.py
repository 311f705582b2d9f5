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
    grpo = load_published("trl/trainer/grpo_trainer.py", "GRPOTrainer._generate_and_score_completions", torch=torch)
    trl = ModuleType("trl")
    trl.GRPOTrainer = type("GRPOTrainer", (), {"_generate_and_score_completions": grpo._generate_and_score_completions})
    datum, model_input = import_published("tinker", "types.datum", "types.model_input", without=["httpx"])
    return {
        "trl": trl,
        **trainers_of_hooks(),
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


def trainers_of_hooks() -> dict[str, ModuleType]:
    """The classes that the hooks extend; a test gives them the published methods."""

    def register_trainer(name: str) -> Any:
        def register(cls: type) -> type:
            cls.registered = name
            return cls

        return register

    names = {
        "trl.experimental.async_grpo": {"AsyncGRPOTrainer": type("AsyncGRPOTrainer", (), {})},
        "transfer_queue": {},
        "verl.trainer.ppo.v1": {
            "PPOTrainerSync": type("PPOTrainerSync", (), {}), "register_trainer": register_trainer
        },
        "openrlhf.trainer.ppo_utils.experience_maker": {
            "RemoteExperienceMaker": type("RemoteExperienceMaker", (), {})
        },
    }  # fmt: skip
    modules = {name: ModuleType(name) for name in names}
    for name, defined in names.items():
        vars(modules[name]).update(defined)
    return modules


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

    assert made.keys() == {"prompt_ids", "completion_ids", "logprobs", "env_mask", "rollout_id", "reward"}
    assert {len(entries) for entries in made.values()} == {6}
    assert lengths[0] < lengths[3]
    assert lengths == sorted(lengths)
    assert made["reward"] == page.recorded_reward(None, **{key: made[key] for key in ("reward", "env_mask")})
    assert await sampled_with(page) == [{**SAMPLING, **stop, "max_tokens": 24}] * 6


def faulty(page, monkeypatch, fault, is_faulty):
    """Let an attempt go through `fault(rollout)` before, if `is_faulty` accepts its number or its task."""
    attempt, numbers = page.attempt, itertools.count()

    async def attempt_or_fail(task, rollout):
        if is_faulty(next(numbers), task):
            await fault(page, rollout)
        return await attempt(task, rollout)

    monkeypatch.setattr("tokentape.clients.LOOK_S", 0.05)
    monkeypatch.setitem(page.recorded.__globals__, "attempt", attempt_or_fail)


async def raises(page, rollout):
    raise ValueError("the agent failed")


async def hangs(page, rollout):
    """Hang until the rollout has ended, as it does after the page's limits."""
    async with AsyncClient(page.url) as client:
        await end_at_limits(page, client, rollout["rollout_id"])
    await asyncio.Event().wait()


async def killed(page, rollout):
    """An agent in a process that is killed."""
    agent = await asyncio.create_subprocess_exec("sh", "-c", "kill -9 $$")
    assert await agent.wait() == 0


async def end_at_limits(page, client, rollout_id):
    """Finish a rollout as TokenTape does at the page's limits, which it has."""
    seen = await client.rollout(rollout_id)
    assert {**page.LIMITS, "deadline_s": seen["deadline_s"]} == {name: seen[name] for name in page.LIMITS}
    await client.finish_rollout(rollout_id, "aborted")


async def endings(page):
    async with AsyncClient(page.url) as client:
        return Counter([rollout["status"] async for rollout in client.rollouts()])


GRPO_ARGS = SimpleNamespace(max_completion_length=24, generation_kwargs=None, **SAMPLING)
GCONFIG = SimpleNamespace(
    greedy=False, temperature=0.5, max_new_tokens=24, min_new_tokens=0, stop_token_ids=[9], top_p=1.0, top_k=20,
    frequency_penalty=0.0, ignore_eos=False, stop=None,
)  # fmt: skip
SKYRL = {"max_tokens": 24, "temperature": 0.5, "top_p": 0.9, "top_k": 20, "logprobs": 0}
VLLM = SimpleNamespace(temperature=0.5, top_p=0.9, top_k=20, min_tokens=1, max_tokens=24, stop=[])


async def requested(page, trainer, tasks):
    """Let a trainer request rollouts; return the loss mask of each."""
    if trainer == "trl":
        return (await asyncio.to_thread(page.rollout_func, tasks, SimpleNamespace(args=GRPO_ARGS)))["env_mask"]
    if trainer == "skyrl":
        batch = {"prompts": tasks, "sampling_params": SKYRL, "trajectory_ids": list(tasks)}
        return (await page.RecordedGenerator().generate(batch))["loss_masks"]
    if trainer == "verl":
        loop = object.__new__(page.RecordedLoop)  # verl's own __init__ needs a model's tokenizer
        loop.rollout_config = SimpleNamespace(prompt_length=64, response_length=64)
        return [(await loop.run({"temperature": 0.5}, raw_prompt=task)).response_mask for task in tasks]
    if trainer == "openrlhf":
        run = page.AgentExecutor().execute
        return [(await run("2 + 2?", "4", VLLM, 2048, None, None))["action_ranges"] for _ in tasks]
    run = page.RecordedWorkflow(GCONFIG).arun_episode
    return [(await run(None, {"messages": task}))["loss_mask"].tolist()[0] for task in tasks]


@pytest.mark.parametrize("fault", [raises, hangs, killed])
@pytest.mark.parametrize("trainer", ["trl", "verl", "openrlhf", "areal", "skyrl"])
async def test_an_agent_that_ends_badly_is_run_again_and_ends_no_run(page, monkeypatch, trainer, fault):
    """The others continue, and no rollout is left open."""
    faulty(page, monkeypatch, fault, lambda number, task: number == 0)
    async with AsyncClient(page.url) as client:
        await client.put_policy(3)  # AReaL requires a version
    masks = await asyncio.wait_for(requested(page, trainer, [TASK] * 3), 60)

    assert [any(mask) for mask in masks] == [True] * 3
    assert await endings(page) == {"completed": 3, "aborted": 1}


async def fed(page, trainer):
    """Let a trainer have the next group; return the number of its rows."""
    if trainer == "tinker":
        return len(await page.data())
    if trainer == "slime":
        made = await asyncio.to_thread(page.generate_rollout, SimpleNamespace(rollout_batch_size=1), 0, None)
        return len(made.samples[0])
    if trainer == "prime_rl":
        return len(await page.training_samples(1))
    if trainer == "skyrl":
        return len((await page.claimed(1, "skyrl"))[0]["rollouts"])
    worker = page.RecordedWorker([TASK], async_args())
    async with AsyncClient(page.url) as client:
        await worker.fill(client, wait_s=0)
    return worker.rollout_buffer.qsize()


FED = ["tinker", "slime", "prime_rl", "skyrl", "async_grpo"]


@pytest.mark.parametrize("fault", [raises, hangs, killed])
@pytest.mark.parametrize("trainer", FED)
async def test_a_group_with_an_agent_that_ends_badly_is_trained_whole(page, monkeypatch, trainer, fault):
    """Another rollout replaces the one of this agent."""
    faulty(page, monkeypatch, fault, lambda number, task: number == 1)
    await asyncio.wait_for(play(page, sampling=page.rules(24, temperature=0.5)), 60)

    assert await asyncio.wait_for(fed(page, trainer), 60) == 4
    assert await endings(page) == {"completed": 4, "aborted": 1}


RUNNER = """
import itertools, os, signal
numbers = itertools.count()
healthy = attempt

async def attempt(task, rollout):
    if next(numbers) < 3:
        return await healthy(task, rollout)
    await asyncio.Event().wait()

async def main():
    async with AsyncClient(PROXY) as client:
        playing = asyncio.create_task(play(client, [{"role": "user", "content": "2 + 2?"}], 4, rules(24, temperature=0.5)))
        while sum([group["finished"] async for group in client.groups()]) < 3:
            await asyncio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.parametrize("trainer", FED)
async def test_a_group_of_a_process_that_was_killed_is_trained_without_its_last_agent(page, trainer):
    """Once the limits have ended its rollout and those that replace it."""
    async with AsyncClient(page.url) as client:
        await client.put_policy(3)
    program = PROGRAMS[0].text.replace("http://127.0.0.1:8400", page.url) + RUNNER
    runner = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    assert await runner.wait() == -9
    training = asyncio.create_task(fed(page, trainer)) if trainer != "async_grpo" else None
    async with AsyncClient(page.url) as client:
        for _ in range(3):
            (rollout,) = [rollout async for rollout in client.rollouts(status="open")]
            await end_at_limits(page, client, rollout["rollout_id"])

    assert await asyncio.wait_for(training or fed(page, trainer), 60) == 3


@pytest.mark.parametrize("trainer", ["trl", "skyrl"])
async def test_a_task_with_failed_attempts_only_has_a_row_without_trained_tokens(page, monkeypatch, trainer):
    """The run ends only if all tasks fail."""
    other = [{"role": "user", "content": "Name a city."}]
    faulty(page, monkeypatch, raises, lambda number, task: task == other)
    masks = await requested(page, trainer, [TASK, other, TASK])
    with pytest.raises(RuntimeError, match="3 attempts at a task have no row"):
        await requested(page, trainer, [other])

    assert [any(mask) for mask in masks] == [True, False, True]
    assert await endings(page) == {"completed": 2, "aborted": 6}


async def test_an_episode_of_areal_is_rejected_if_all_attempts_fail(page, monkeypatch):
    faulty(page, monkeypatch, raises, lambda number, task: True)

    assert None is await page.RecordedWorkflow(GCONFIG).arun_episode(None, {"messages": TASK})


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
    assert {sample.model_version for sample in samples} == {3}
    assert {sum(sample.completion_mask.tolist()) > 0 for sample in samples} == {True}
    assert {len(sample.input_ids.tolist()) == len(sample.old_log_probs.tolist()) for sample in samples} == {True}
    assert list(Counter(sample.group_id for sample in samples).values()) == [4, 4]


async def test_trls_worker_generates_and_announces_until_its_thread_ends(page):
    """Once started, it fills the queue; once its thread has ended, its health check raises."""
    worker = page.RecordedWorker([TASK], async_args())
    await asyncio.to_thread(worker.update_model_version, 1)
    worker.start()
    samples = [await asyncio.to_thread(worker.rollout_buffer.get, timeout=60) for _ in range(8)]
    worker.check_health(1)
    await asyncio.to_thread(worker.stop)

    assert {sample.model_version for sample in samples} == {1}
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
    assert len(output.prompt_ids) == 7
    assert 5 >= len(output.response_ids) == len(output.response_mask) == len(output.response_logprobs)
    assert output.reward_score in (0.0, 1.0)
    assert await sampled_with(page) == [{**sampling, "max_tokens": 5}]


async def test_openrlhfs_executor_returns_its_response(page):
    """With its prompt and label, sampled with its settings."""
    params = SimpleNamespace(temperature=0.5, top_p=0.9, top_k=20, min_tokens=1, max_tokens=24, stop=[])
    response = await page.AgentExecutor().execute("2 + 2?", "4", params, 2048, None, None)

    assert (response["prompt"], response["label"]) == ("2 + 2?", "4")
    ((start, end),) = response["action_ranges"]
    assert 0 < start < end == len(response["observation_tokens"]) == len(response["rollout_log_probs"])
    assert await sampled_with(page) == [
        {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_tokens": 1, "max_tokens": 24}
    ]


async def test_areals_workflow_returns_its_tensors(page):
    """All of one length except the reward, sampled with its settings."""
    async with AsyncClient(page.url) as client:
        await client.put_policy(3)
    sampling = {"top_p": 0.9, "top_k": 20, "frequency_penalty": 0.0, "ignore_eos": False, "stop": ["END"]}
    gconfig = SimpleNamespace(
        greedy=False, temperature=0.5, max_new_tokens=24, min_new_tokens=0, stop_token_ids=[9], **sampling
    )
    tensors = await page.RecordedWorkflow(gconfig).arun_episode(None, {"messages": TASK})

    assert tensors.pop("rewards").shape == (1,)
    assert len({tensor.shape for tensor in tensors.values()}) == 1
    assert await sampled_with(page) == [{**sampling, "temperature": 0.5, "max_tokens": 24, "stop_token_ids": [9]}]


async def test_tinkers_data_are_made_of_batches(page):
    """A Datum for each rollout; it returns once it has the groups, and waits for no others."""
    await play(page)
    made = await page.data()

    assert len(made) == 4
    assert made[0].loss_fn_inputs.keys() == {"target_tokens", "logprobs", "advantages"}


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
    assert {len(entries) for entries in output.values() if entries is not None} == {2}
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

    assert list(map(len, groups)) == [2, 2, 2]
    assert [sum(sample.loss_mask) for sample in samples] == [sums[sample.rollout_id] for sample in samples]
    assert (len({sample.index for sample in samples}), len({sample.group_index for sample in samples})) == (6, 3)


async def test_prime_rls_samples_are_made_of_batches(page):
    """With the environment of the metadata, and the temperature that the trainer set."""
    await play(page, sampling=page.rules(24, temperature=0.5))
    samples = await page.training_samples(1)

    assert len(samples) == 4
    assert {(sample.env_name, sample.temperatures[0]) for sample in samples} == {("arithmetic", 0.5)}
