"""Our rows in the trainers' published classes and parsers: each one's own result for the shared example equals ours.

slime, prime-rl and SkyRL are missing: the first two are not on PyPI, the last does not support Python 3.11. TRL's
`rollout_func` has no class: its trainer reads the dict in the middle of a step.
"""

import asyncio
import enum
import typing
from array import array
from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Optional

import numpy as np
import pydantic
import pytest
from openai.types.chat import ChatCompletion
from tests.support import worked
from tests.support.trainers import import_published, load_published, torch

from proxy.export import FORMATS, Fill
from proxy.export.base import PLAIN
from proxy.trajectory.sequence import Options, Scores

TURNS = [(worked.P, worked.S1, worked.L1), ([*worked.P, *worked.S1, *worked.T], worked.S2, worked.L2)]


def listed(tensors):
    """Return tensors as lists."""
    return {key: tensor.tolist() for key, tensor in tensors.items()}


def test_trl_async_accepts_our_row():
    """TRL's reconciliation of the turns gives the arrays of our row, clean; its sample accepts the row."""
    names = (
        "TurnRecord",
        "TrainingSequence",
        "_common_prefix_len",
        "DriftKind",
        "_SampleBuilder",
        "_chain_to_sequences",
    )
    worker = load_published(
        "trl/experimental/async_grpo/async_rollout_worker.py", *names, "RolloutSample",
        dataclass=dataclass, field=field, enum=enum, np=np,
    )  # fmt: skip
    (made,), tally = worker._chain_to_sequences([worker.TurnRecord(*turn) for turn in TURNS], "r1", 16)
    (row,) = worked.rows("trl_async")

    assert {kind: tally[kind] for kind in ("clean", "realign", "fork")} == {"clean": 1, "realign": 0, "fork": 0}
    assert {key: row[key] for key in ("input_ids", "completion_mask", "old_log_probs")} == {
        key: value for key, value in asdict(made).items() if key != "rollout_id"
    }
    assert worker.RolloutSample(prompt=[], completion=[], **row).model_version == 3


def test_verl_accepts_our_row():
    """verl's AgentLoopOutput accepts every field by name, and its trainer can pad the result."""
    loop = load_published(
        "verl/experimental/agent_loop/agent_loop.py", "AgentLoopMetrics", "AgentLoopOutput",
        BaseModel=pydantic.BaseModel, Optional=Optional, Any=Any, torch=torch,
    )  # fmt: skip
    (row,) = worked.rows("verl")
    assert row.keys() <= loop.AgentLoopOutput.model_fields.keys()
    made = loop.AgentLoopOutput.model_validate(row, strict=True).as_dict()

    assert row["prompt_ids"] == made["prompts"].tolist()
    assert (row["response_ids"], row["response_mask"]) == (made["responses"].tolist(), made["response_mask"].tolist())
    assert row["response_logprobs"] == made["rollout_log_probs"].tolist()
    assert made["rm_scores"].tolist() == [0.0] * 8 + [1.0]


@pytest.mark.parametrize("top_k", [0, 2])
def test_verls_teacher_logprobs_are_ours(top_k):
    """verl's own reading of a teacher's scores has ours at each trained token, in the same alignment."""
    utils = load_published(
        "verl/workers/rollout/vllm_rollout/utils.py", "extract_prompt_logprobs", Optional=Optional, RequestOutput=Any
    )
    ids = [*worked.P, *worked.S1, *worked.T, *worked.S2]
    entries = [
        {str(token): SimpleNamespace(logprob=-token / 512, rank=9)}
        | {str(rank): SimpleNamespace(logprob=-rank / 4, rank=rank) for rank in range(1, top_k + 1)}
        for token in ids
    ]
    theirs: dict[str, Any] = {}
    utils.extract_prompt_logprobs(SimpleNamespace(prompt_logprobs=[None, *entries[1:]]), top_k, theirs)
    trained = [at for at, token in enumerate(ids) if token in {*worked.S1, *worked.S2}]
    likely = [(rank, -rank / 4) for rank in range(1, top_k + 1)] * len(trained)
    scores = Scores(
        "teacher", "big", None, array("f", [-ids[at] / 512 for at in trained]), top_k,
        array("i", [token for token, _ in likely]), array("f", [logprob for _, logprob in likely]),
    )  # fmt: skip
    (row,) = worked.rows("verl", fill=Fill(scores=[scores]))
    ours = row["extra_fields"]

    assert len(ids) == len(ours["teacher_ids"]) == len(theirs["prompt_ids"])
    for at in trained:
        assert theirs["prompt_ids"][at - 1] == ours["teacher_ids"][at - 1]
        assert theirs["prompt_logprobs"][at - 1] == ours["teacher_logprobs"][at - 1]


def test_areals_interactions_are_our_row():
    """AReaL's dict of two consecutive interactions equals our row."""
    types = load_published(
        "areal/experimental/openai/types.py", "InteractionWithTokenLogpReward",
        dataclass=dataclass, field=field, torch=torch,
    )  # fmt: skip
    before = None
    for version, (prompt, ids, logprobs) in zip((3, 4), TURNS, strict=True):
        response = SimpleNamespace(
            input_tokens=prompt, input_len=len(prompt), output_tokens=ids, output_len=len(ids),
            output_logprobs=logprobs, output_versions=[version] * len(ids),
        )  # fmt: skip
        before = types.InteractionWithTokenLogpReward(
            model_response=response, reward=1.0, parent=before, chat_template_type="concat"
        )

    assert worked.rows("areal") == [listed(before.to_tensor_dict())]


def test_openrlhfs_experience_is_ours():
    """OpenRLHF makes the Experience that we export of our agent response."""
    generator = load_published(
        "openrlhf/trainer/ppo_utils/samples_generator.py", "SamplesGenerator._process_response_into_experience",
        Experience=SimpleNamespace, torch=torch,
    )  # fmt: skip
    (response,) = worked.rows("openrlhf")
    made = generator._process_response_into_experience(None, {"prompt": "", "label": "", **response}, max_len=2048)
    (experience,) = worked.rows("openrlhf_experience")

    assert experience == listed({key: vars(made)[key] for key in experience})


def test_tinkers_datum_accepts_our_row():
    """Tinker's Datum gives each field the type of its name."""
    its_datum, its_input = import_published("tinker", "types.datum", "types.model_input", without=["httpx"])
    (row,) = worked.rows("tinker")
    inputs = {key: value for key, value in row.items() if key != "model_input"}
    datum = its_datum.Datum(model_input=its_input.ModelInput.from_ints(row["model_input"]), loss_fn_inputs=inputs)

    assert row["model_input"] == datum.model_input.to_ints()
    assert {key: tensor.dtype for key, tensor in datum.loss_fn_inputs.items()} == {
        "target_tokens": "int64",
        "logprobs": "float32",
        "advantages": "float32",
    }
    assert inputs == {key: tensor.tolist() for key, tensor in datum.loss_fn_inputs.items()}


def test_atropos_accepts_our_group():
    """The model by which Atropos' API reads `POST /scored_data` accepts a group and has a field for each of its keys."""
    server = load_published(
        "atroposlib/api/server.py", "ScoredData",
        BaseModel=pydantic.BaseModel, field_validator=pydantic.field_validator,
        Any=Any, Dict=dict, List=list, Optional=Optional,
    )  # fmt: skip
    scores = Scores("t", None, None, array("f", [-1] * 5), 1, array("i", [7] * 5), array("f", [-0.5] * 5))
    for fill in (PLAIN, Fill(scores=[scores])):
        group = worked.gathered("scored_data", worked.FACTS, worked.FACTS, fill=fill)
        read = server.ScoredData.model_validate(group)

        assert ("distill_token_ids" in group) == (fill is not PLAIN)
        assert group == {key: value for key, value in read.model_dump().items() if key in group}


class _Module:
    """equinox' Module as far as needed: a frozen dataclass."""

    def __init_subclass__(cls, **named):
        super().__init_subclass__(**named)
        dataclass(frozen=True)(cls)


def test_marins_conversion_marks_our_sampled_tokens():
    """Marin's conversion for its trainer puts our tokens where they were sampled."""
    types = load_published(
        "marin/rl/types.py", "RolloutMetadata", "Rollout", "RolloutGroup",
        dataclass=dataclass, eqx=SimpleNamespace(Module=_Module), np=np,
    )  # fmt: skip
    decoding = load_published("marin/rl/decoding.py", "RolloutDecodingTrace", dataclass=dataclass)
    batches = load_published("marin/rl/train_batch.py", "trim_and_pad", "convert_rollout_to_training_format", np=np)
    steps = [worked.first(sampling={"temperature": 0.5, "max_tokens": 16})]
    form = FORMATS["marin"]
    (group,) = form.gather([form.rows(worked.FACTS, steps, Options())])
    (row,) = group["rollouts"]
    arrays = {key: np.array(value) for key, value in row.items() if isinstance(value, list)}
    rollout = types.Rollout(**{
        **row, **arrays,
        "metadata": types.RolloutMetadata(**row["metadata"]),
        "decoding": decoding.RolloutDecodingTrace(**row["decoding"]),
    })  # fmt: skip
    made = batches.convert_rollout_to_training_format(rollout, 0.5, max_tokens=8, pad_to=8, pad_token_id=0)

    assert group.keys() == types.RolloutGroup.__annotations__.keys()
    assert [*worked.P, *worked.S1, 0, 0] == made["input_ids"].tolist()
    assert [0.0, 0.0, 0.0, *worked.L1, 0.0, 0.0] == made["policy_logprobs"].tolist()
    assert made["loss_masks"].tolist() == [0, 0, 0, 1, 1, 1, 0, 0]
    assert (made["temperature"], made["top_k"], made["truncated"]) == (0.5, -1, False)


@pytest.mark.parametrize("max_len", [None, 12, 5])
@pytest.mark.parametrize("finish_reason", ["stop", "length", "tool_calls"])
def test_verifiers_steps_are_ours(max_len, finish_reason):
    """verifiers' environment makes our step of the recorded response, except for fields that only ours has.

    Its step has no reward and no advantage before its rubric, as ours of a rollout without them.
    """
    names = ("parse_response_tokens", "parse_response_messages", "parse_is_truncated")
    classes = {"ChatCompletion": ChatCompletion, "TrajectoryStepTokens": dict, "ChatMessage": dict, "cast": typing.cast}
    parsers = load_published("verifiers/utils/response_utils.py", *names, **classes)
    environment = load_published(
        "verifiers/envs/multiturn_env.py", "MultiTurnEnv.add_model_response",
        TrajectoryStep=dict, **{name: getattr(parsers, name) for name in names},
    )  # fmt: skip
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call] if finish_reason == "tool_calls" else []}
    content = [{"token": "", "logprob": logprob, "top_logprobs": []} for logprob in worked.L1]
    choice = {"index": 0, "finish_reason": finish_reason, "message": message, "token_ids": worked.S1}
    answer = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "prompt_token_ids": worked.P}
    recorded = {**answer, "choices": [choice]}
    step = worked.first(worked.sampled(worked.S1, worked.L1, finish_reason=finish_reason), response=recorded)
    (row,) = worked.rows("verifiers", [step], options=Options(max_len=max_len))
    made = []

    async def add_trajectory_step(_state, step):
        made.append(step)

    itself = SimpleNamespace(message_type="chat", max_seq_len=max_len, add_trajectory_step=add_trajectory_step)
    response = ChatCompletion.model_validate({**answer, "choices": [{**choice, "logprobs": {"content": content}}]})
    asyncio.run(environment.add_model_response(itself, {"trajectory_id": "r1"}, worked.QUESTION, response))

    assert made[0].keys() == row.keys()
    assert {**made[0], "response": row["response"], "reward": 1.0, "advantage": 0.5, "extras": row["extras"]} == row
    unscored = replace(worked.FACTS, reward=None, advantages=None)
    (bare,) = worked.rows("verifiers", [step], options=Options(max_len=max_len), facts=unscored)
    assert {**made[0], "response": row["response"], "extras": row["extras"]} == bare


@pytest.mark.parametrize("max_len", [None, 12, 11, 10, 9, 3])
def test_verifiers_parser_reads_the_recorded_response(max_len):
    """It finds what our step has in the response that its client gets."""
    parser = load_published(
        "verifiers/utils/response_utils.py", "parse_response_tokens",
        ChatCompletion=ChatCompletion, TrajectoryStepTokens=dict,
    )  # fmt: skip
    rows = worked.rows("verifiers", options=Options(max_len=max_len))
    for (prompt, ids, logprobs), row in zip(TURNS, rows, strict=True):
        content = [{"token": "", "logprob": logprob, "top_logprobs": []} for logprob in logprobs]
        message = {"role": "assistant", "content": ""}
        choice = {"index": 0, "finish_reason": "stop", "message": message, "logprobs": {"content": content}}
        answer = {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "prompt_token_ids": prompt}
        response = ChatCompletion.model_validate({**answer, "choices": [{**choice, "token_ids": ids}]})
        assert asyncio.run(parser.parse_response_tokens(response, "chat", max_len)) == row["tokens"]
