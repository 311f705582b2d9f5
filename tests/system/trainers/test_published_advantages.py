"""Our advantages, returns and penalty equal the trainers' published code, for rewards that the trainers can have."""

import asyncio
import logging
from collections import defaultdict
from functools import cache
from types import SimpleNamespace
from typing import Optional
from unittest.mock import MagicMock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.trainers import Array, load_published, torch

from proxy.trajectory.advantages import ESTIMATORS, SoftPenalty, returns
from proxy.trajectory.facts import RolloutFacts

GROUPS = st.lists(st.lists(st.floats(-10, 10, width=16), min_size=2, max_size=8), min_size=1, max_size=4)


def array(values):
    """Return values as an array with a tensor's interface, of 64 bits so that rounding hides nothing."""
    return np.asarray(values, dtype=np.float64).view(Array)


@cache
def core_algorithms():
    """Return verl's estimators."""
    whitening = load_published(
        "verl/utils/torch_functional.py", "masked_sum", "masked_mean", "masked_var", "masked_whiten", torch=torch
    )  # fmt: skip
    return load_published(
        "verl/trainer/ppo/core_algos.py", "compute_grpo_outcome_advantage", "compute_rloo_outcome_advantage",
        "compute_reinforce_plus_plus_outcome_advantage", torch=torch, np=np, defaultdict=defaultdict, verl_F=whitening,
        Optional=Optional, register_adv_est=lambda _: lambda estimator: estimator, AdvantageEstimator=MagicMock(),
    )  # fmt: skip


def verl(name, rewards, index=None, **options):
    """Return verl's advantages of responses of one token, in the groups that `index` names."""
    scores = array(rewards)[:, None]
    groups = {} if index is None else {"index": np.array(index)}
    found, _ = getattr(core_algorithms(), name)(scores, array(np.ones(scores.shape)), **groups, **options)
    return np.asarray(found)[:, 0].tolist()


def ours(name, *groups):
    return [value for group in groups for (value,) in ESTIMATORS[name]([[reward] for reward in group])]


def index_of(groups):
    return [number for number, group in enumerate(groups) for _ in group]


@given(GROUPS)
def test_dr_grpo_and_rloo_are_verls(groups):
    rewards = [reward for group in groups for reward in group]
    of_verl = verl("compute_grpo_outcome_advantage", rewards, index_of(groups), norm_adv_by_std_in_grpo=False)

    assert of_verl == pytest.approx(ours("dr_grpo", *groups), abs=1e-9)
    assert verl("compute_rloo_outcome_advantage", rewards, index_of(groups)) == pytest.approx(
        ours("rloo", *groups), abs=1e-9
    )


@given(st.lists(st.floats(-10, 10, width=16), min_size=2, max_size=8).filter(lambda rewards: np.std(rewards) > 0.01))
def test_grpo_is_verls_with_the_population_standard_deviation(rewards):
    ratio = np.std(rewards, ddof=1) / np.std(rewards)
    of_verl = verl("compute_grpo_outcome_advantage", rewards, [0] * len(rewards))

    assert [value * ratio for value in of_verl] == pytest.approx(ours("grpo", rewards), rel=1e-3, abs=1e-6)


@given(GROUPS.filter(lambda groups: np.std([reward for group in groups for reward in group]) > 0.01))
def test_reinforce_pp_is_verls_over_a_batch_with_the_population_standard_deviation(groups):
    rewards = [reward for group in groups for reward in group]
    config = SimpleNamespace(gamma=1.0)
    of_verl = verl("compute_reinforce_plus_plus_outcome_advantage", rewards, config=config)
    ratio = np.std(rewards, ddof=1) / np.std(rewards)

    assert [value * ratio for value in of_verl] == pytest.approx(ours("reinforce_pp", rewards), rel=1e-3, abs=1e-6)


@cache
def score_group():
    """Return the scoring of TRL's asynchronous trainer."""
    return load_published(
        "trl/experimental/async_grpo/async_rollout_worker.py", "_AsyncRolloutLoop._score_group", np=np, asyncio=asyncio,
        is_async_callable=lambda _: False, logger=logging.getLogger(), RolloutSample=SimpleNamespace,
    )._score_group  # fmt: skip


@given(
    st.lists(st.floats(-10, 10, width=16), min_size=1, max_size=8).filter(
        lambda rewards: np.std(rewards) == 0 or np.std(rewards) > 0.01
    )
)
def test_grpo_equals_trls_async_trainer(rewards):
    """Which adds 1e-8 to the standard deviation, so that it is compared for larger ones, and has 0 for one rollout."""
    sequence = SimpleNamespace(input_ids=[1], completion_mask=[1], old_log_probs=[0.0])
    count = len(rewards)
    group = SimpleNamespace(
        prompts=[[]] * count, completions=[[]] * count, completions_ids=[[]] * count, reward_kwargs={},
        completions_sequences=[[sequence]] * count, tool_call_counts=[0] * count, tool_failure_counts=[0] * count,
        model_version=0, group_id=0,
    )  # fmt: skip
    trainer = SimpleNamespace(
        reward_funcs=[lambda **_: rewards],
        _env_reward_types=[],
        _provides_rollout_reward=False,
        reward_func_names=["r"],
    )
    samples = asyncio.run(score_group()(trainer, group))

    assert [sample.advantage for sample in samples] == pytest.approx(ours("grpo", rewards), rel=1e-3, abs=1e-6)


@cache
def cumulative_returns():
    """Return the returns of OpenRLHF."""
    return load_published(
        "openrlhf/trainer/ppo_utils/experience_maker.py", "RemoteExperienceMaker.get_cumulative_returns", torch=torch
    ).get_cumulative_returns  # fmt: skip


@given(st.lists(st.floats(-10, 10, width=16), min_size=1, max_size=8), st.floats(0.01, 1))
def test_returns_are_openrlhfs_where_each_turn_is_a_token(rewards, discount):
    row = array([rewards])
    names = [f"t{index:02}" for index in range(len(rewards))]
    facts = RolloutFacts("r", step_rewards=dict(zip(names, rewards, strict=True)))
    found = cumulative_returns()(None, row, array(np.ones(row.shape)), discount)

    assert np.asarray(found)[0].tolist() == pytest.approx(list(returns(names, facts, discount)), abs=1e-9)


@given(st.integers(1, 100), st.data())
def test_the_penalty_equals_verls_dapo_and_openrlhfs(max_len, data):
    """verl's is for responses of at most `max_len` tokens; OpenRLHF's also for longer ones."""
    buffer, length = data.draw(st.integers(1, max_len)), data.draw(st.integers(1, 2 * max_len))
    ours = SoftPenalty(max_len, buffer).of(length)

    assert ours == pytest.approx(openrlhf_penalty(length, max_len, buffer))
    if length <= max_len:
        assert ours == pytest.approx(verl_penalty(length, max_len, buffer))


@cache
def length_penalties():
    """Return the penalty of OpenRLHF, and the reward manager of verl."""
    openrlhf = load_published("openrlhf/trainer/ppo_utils/length_penalty.py", "apply_overlong_penalty", List=list)
    manager = load_published(
        "verl/workers/reward_manager/dapo.py", "DAPORewardManager.__call__", torch=torch, defaultdict=defaultdict
    )  # fmt: skip
    return openrlhf.apply_overlong_penalty, vars(manager)["__call__"]


def openrlhf_penalty(length, max_len, buffer):
    """Return what OpenRLHF adds to a reward."""
    experience = SimpleNamespace(response_length=np.array([length]), rewards=[0.0])
    length_penalties()[0]([experience], max_len, buffer)
    return experience.rewards[0]


def verl_penalty(length, max_len, buffer):
    """Return the reward of verl's DAPO reward manager for a response with score 0."""
    manager = SimpleNamespace(
        _extract_reward_from_rm_scores=lambda *_: None,
        tokenizer=SimpleNamespace(decode=lambda *_, **__: "", eos_token="</s>"),
        compute_score=lambda **_: 0.0, reward_fn_key="source", num_examine=0, max_resp_len=max_len,
        overlong_buffer_cfg=SimpleNamespace(enable=True, len=buffer, penalty_factor=1.0, log=False),
    )  # fmt: skip
    batch = {
        "prompts": array([1]), "responses": array(np.zeros(max_len)),
        "attention_mask": np.array([1] * (1 + length) + [0] * (max_len - length)).view(Array),
    }  # fmt: skip
    item = SimpleNamespace(batch=batch, non_tensor_batch={"reward_model": {"ground_truth": ""}, "source": "s"})

    class Data(list):
        batch = {"responses": array(np.zeros((1, max_len)))}

    return float(length_penalties()[1](manager, Data([item])).sum())
