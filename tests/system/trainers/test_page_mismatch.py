# ruff: noqa: F401, F811 - `page` is a fixture
"""The hooks of docs/trainers.md that report a trainer's logprobs, run by the trainers' published methods."""

import asyncio
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from tests.support.trainers import load_published, torch
from tests.system.trainers.test_page import GRPO_ARGS, TASK, VLLM, async_args, page, play

from tokentape import AsyncClient

Tensor = torch.Tensor


def tensors(rows, dtype=np.float32):
    return [np.asarray(row, dtype).view(Tensor) for row in rows]


async def mismatch_of(page, step):
    """Return the tokens that were reported of a step, and their mean difference."""
    async with AsyncClient(page.url) as client:
        shown = await client.batch_mismatch(f"{page.RUN}-{step}")
    return shown["tokens"], shown["cells"]["all"]["all"]["abs_mean"]


async def announce(page, version=3):
    async with AsyncClient(page.url) as client:
        await client.put_policy(version)


async def test_trl_reports_by_the_column_of_its_inputs(page, monkeypatch):
    """A row without trained tokens is not reported."""
    await announce(page)

    def scored_by_trl(trainer, inputs):
        made = page.rollout_func([each["prompt"] for each in inputs], SimpleNamespace(args=GRPO_ARGS))
        for each, name in zip(inputs, made["rollout_id"], strict=True):
            each["rollout_id"] = name
        width = max(map(len, made["completion_ids"]))
        pad = [[*row, *[0] * (width - len(row))] for row in made["logprobs"]]
        bits = [[*row, *[0] * (width - len(row))] for row in made["env_mask"]]
        bits[2] = [0] * width
        trainer.trained = sum(map(sum, bits))
        ones = np.ones((len(pad), width), np.int64).view(Tensor)
        return {
            "completion_mask": ones,
            "tool_mask": np.array(bits).view(Tensor),
            "old_per_token_logps": np.array(pad).view(Tensor),
        }

    monkeypatch.setattr(page.GRPOTrainer, "_generate_and_score_completions", scored_by_trl)
    trainer = object.__new__(page.ReportingGRPOTrainer)
    trainer.model, trainer.state = SimpleNamespace(training=True), SimpleNamespace(global_step=4)
    trainer.accelerator = SimpleNamespace(process_index=0)
    await asyncio.to_thread(trainer._generate_and_score_completions, [{"prompt": TASK} for _ in range(3)])

    assert (trainer.trained, pytest.approx(0.0, abs=1e-6)) == await mismatch_of(page, 4)


async def test_trls_asynchronous_trainer_reports_each_version_once(page, monkeypatch):
    """By the recorded logprobs, which are all that its batch has of a row."""
    await play(page)
    worker = page.ReportingWorker([TASK], async_args())
    async with AsyncClient(page.url) as client:
        await worker.fill(client, wait_s=0)
    samples = [worker.rollout_buffer.get() for _ in range(4)]
    old = [sample.old_log_probs[sample.completion_mask.astype(bool)] for sample in samples]
    flat = np.concatenate(old)
    inputs = {
        "token_index": np.array([*range(len(flat)), -1]),
        "old_log_probs": np.append(flat, np.float32(0)),
        "segment_id": np.array([*np.repeat(range(4), [len(each) for each in old]), 0]),
    }

    class Model:
        hooks = 0

        def register_forward_hook(self, hook):
            self.hooks += 1
            hook(self, None, SimpleNamespace(log_probs=SimpleNamespace(detach=lambda: flat[None])))
            return SimpleNamespace(remove=lambda: None)

    class Numbers(np.ndarray):
        def unique(self):
            return np.unique(np.asarray(self))

        def cpu(self):
            return self

        def numpy(self):
            return np.asarray(self)

    inputs = {name: values.view(Numbers) for name, values in inputs.items()}
    monkeypatch.setattr(page.AsyncGRPOTrainer, "compute_loss", lambda *_: 0.5, raising=False)
    trainer, model = object.__new__(page.ReportingAsyncGRPOTrainer), Model()
    trainer.model_version, trainer.rollout_worker = 3, worker
    losses = [await asyncio.to_thread(trainer.compute_loss, model, inputs) for _ in range(2)]

    assert (losses, model.hooks) == ([0.5, 0.5], 1)
    assert (len(flat), pytest.approx(0.0, abs=1e-6)) == await mismatch_of(page, 3)


class Columns(dict):
    """A batch of verl's queue: lists of tensors by name."""

    def select(self, *names):
        return {name: self[name] for name in names}

    def to_padded_tensor(self):
        return self


class Column(list):
    def unbind(self):
        return self

    def tolist(self):
        return list(self)


class Keys(SimpleNamespace):
    """verl's KVBatchMeta."""

    def __len__(self):
        return len(self.keys)


class Queue:
    """verl's transfer queue, of one batch."""

    def __init__(self):
        self.columns = {}

    def kv_batch_get(self, keys, partition_id, select_fields):
        return Columns({name: Column(self.columns[name]) for name in select_fields})

    def kv_batch_put(self, keys, partition_id, fields):
        self.columns |= fields
        return Keys(keys=keys, partition_id=partition_id, extra_info={})


async def test_verl_reports_by_its_extra_fields_after_its_own_method(page, monkeypatch):
    """Its method asks the actor's workers, and puts the logprobs into the queue. A row that its loop cut is reported as far."""
    await announce(page)
    loop = object.__new__(page.RecordedLoop)
    loop.rollout_config = SimpleNamespace(prompt_length=7, response_length=5)
    outputs = [await loop.run({"temperature": 0.5}, raw_prompt=TASK) for _ in range(3)]
    queue = Queue()
    queue.columns["extra_fields"] = [output.extra_fields for output in outputs]
    queue.columns["response_mask"] = tensors([output.response_mask for output in outputs], np.int64)
    found = SimpleNamespace(detach=lambda: SimpleNamespace(item=lambda: 0.0))
    published = load_published(
        "verl/trainer/ppo/v1/trainer_base.py", "PPOTrainer._compute_old_log_prob", tq=queue, DataProto=SimpleNamespace,
        response_from_nested=lambda values, mask: values, agg_loss=lambda **_: found,
    )  # fmt: skip
    monkeypatch.setattr(page.PPOTrainerSync, "_compute_old_log_prob", published._compute_old_log_prob, raising=False)
    monkeypatch.setattr(page.transfer_queue, "kv_batch_get", queue.kv_batch_get, raising=False)
    trainer = object.__new__(page.ReportingTrainer)
    actor = SimpleNamespace(loss_agg_mode="", loss_scale_factor=1)
    rollout = SimpleNamespace(temperature=0.5, calculate_log_probs=False)
    trainer.config = SimpleNamespace(algorithm={}, actor_rollout_ref=SimpleNamespace(actor=actor, rollout=rollout))
    trainer.global_steps = 2

    def compute_log_prob(batch):
        own = tensors([output.response_logprobs for output in outputs])
        return queue.kv_batch_put(batch.keys, batch.partition_id, {"log_probs": own, "entropy": own})

    trainer.actor_rollout_wg = SimpleNamespace(compute_log_prob=compute_log_prob)
    metrics = {}
    batch = Keys(keys=["a", "b", "c"], partition_id="train", extra_info={})
    await asyncio.to_thread(trainer._compute_old_log_prob, batch, metrics)

    assert metrics == {"actor/entropy": 0.0}
    assert page.ReportingTrainer.registered == "reporting"
    trained = sum(sum(output.response_mask) for output in outputs)
    assert (trained, pytest.approx(0.0, abs=1e-6)) == await mismatch_of(page, 2)


async def test_openrlhf_reports_by_the_label_after_its_own_method(page, monkeypatch):
    """Its method attaches the actor's logprobs to each experience."""
    await announce(page)
    run = page.ReportingExecutor().execute
    responses = [await run("2 + 2?", "4", VLLM, 2048, None, None) for _ in range(2)]
    samples, own = [], []
    for response in responses:
        mask = np.zeros(len(response["observation_tokens"]), np.int64)
        for start, end in response["action_ranges"]:
            mask[start:end] = 1
        ids, logprobs = response["observation_tokens"], response["rollout_log_probs"]
        bits, own_row = mask[None, 1:].view(Tensor), np.array([logprobs[1:]], np.float32).view(Tensor)
        samples.append(SimpleNamespace(
            sequences=ids, attention_mask=ids, action_mask=bits, mm_train_inputs=None, rewards=[1.0], info={},
            labels=[response["label"]],
        ))  # fmt: skip
        own.append(own_row)
    published = load_published(
        "openrlhf/trainer/ppo_utils/experience_maker.py", "RemoteExperienceMaker.make_experience", torch=SimpleNamespace(
            no_grad=torch.no_grad, zeros_like=lambda like, **_: np.zeros_like(like)
        ),
        ray=SimpleNamespace(put=lambda value: value), masked_mean=lambda *_, **__: 0.0, time=__import__("time"),
        timedelta=__import__("datetime").timedelta, logger=SimpleNamespace(info=lambda _: None),
    )  # fmt: skip
    monkeypatch.setattr(page.RemoteExperienceMaker, "make_experience", published.make_experience, raising=False)
    maker = object.__new__(page.ReportingMaker)
    train = SimpleNamespace(colocate_all=False, colocate_actor_ref=False)
    maker.strategy = SimpleNamespace(args=SimpleNamespace(
        ds=SimpleNamespace(ring_attn_size=1, tensor_parallel_size=1), train=train,
        algo=SimpleNamespace(kl=SimpleNamespace(use_loss=False)),
    ))  # fmt: skip
    maker.actor_model_group = maker.critic_model_group = maker.initial_model_group = None
    maker._dispatch_forward = lambda group, sync, **_: own
    maker._flatten_results = lambda refs, _factor: refs if refs is own else [None] * len(samples)
    await asyncio.to_thread(maker.make_experience, samples)

    trained = sum(int(each.action_mask.sum()) for each in samples)
    assert (trained, pytest.approx(0.0, abs=1e-6)) == await mismatch_of(page, 0)


async def test_slime_reports_by_the_index_of_its_samples(page, monkeypatch, tmp_path):
    """Two data-parallel ranks report their samples, and one of two tensor-parallel ranks does."""
    await play(page, groups=2, size=2)
    args = SimpleNamespace(rollout_batch_size=2, save=str(tmp_path))
    made = await asyncio.to_thread(page.generate_noted_rollout, args, 7, None)
    samples = [sample for group in made.samples for sample in group]
    mpu = ModuleType("megatron.core")
    monkeypatch.setitem(sys.modules, "megatron", ModuleType("megatron"))
    monkeypatch.setitem(sys.modules, "megatron.core", mpu)
    for rank, part in enumerate((samples[:1], samples[1:])):
        data = {
            "sample_indices": [sample.index for sample in part],
            "loss_masks": tensors([sample.loss_mask for sample in part], np.int64),
            "log_probs": tensors([sample.rollout_log_probs for sample in part]),
        }
        for tensor_rank in (0, 1):
            mpu.mpu = SimpleNamespace(
                get_tensor_model_parallel_rank=lambda tensor_rank=tensor_rank: tensor_rank,
                get_data_parallel_rank=lambda rank=rank: rank,
            )
            await asyncio.to_thread(page.report_mismatch, args, 7, data)
    await asyncio.to_thread(page.report_mismatch, args, 7, {})  # another pipeline stage

    trained = sum(sum(sample.loss_mask) for sample in samples)
    assert (trained, pytest.approx(0.0, abs=1e-6)) == await mismatch_of(page, 7)
