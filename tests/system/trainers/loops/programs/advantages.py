"""Advantages of verl's and OpenRLHF's code with a real torch. Argument: batches of groups of rewards, as JSON.

All groups of a batch have the same size. Each response is one token.
"""

import itertools
import json
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Optional, Union
from unittest.mock import MagicMock

import numpy as np
import torch
from tests.support.trainers import load_published

VERL = {
    "grpo": ("compute_grpo_outcome_advantage", {}),
    "dr_grpo": ("compute_grpo_outcome_advantage", {"norm_adv_by_std_in_grpo": False}),
    "rloo": ("compute_rloo_outcome_advantage", {}),
    "reinforce_pp": ("compute_reinforce_plus_plus_outcome_advantage", {"config": SimpleNamespace(gamma=1.0)}),
}
OPENRLHF = {"dr_grpo": "dr_grpo", "rloo": "rloo", "reinforce_pp": "reinforce"}

whitening = load_published(
    "verl/utils/torch_functional.py", "masked_sum", "masked_mean", "masked_var", "masked_whiten", torch=torch
)
core = load_published(
    "verl/trainer/ppo/core_algos.py", *{function for function, _ in VERL.values()}, torch=torch, np=np,
    defaultdict=defaultdict, verl_F=whitening, Optional=Optional, register_adv_est=lambda _: lambda estimator: estimator,
    AdvantageEstimator=MagicMock(),
)  # fmt: skip
reward = load_published("openrlhf/models/utils.py", "compute_reward", torch=torch, Union=Union, Optional=Optional)
maker = load_published(
    "openrlhf/trainer/ppo_utils/experience_maker.py", "RemoteExperienceMaker.compute_advantages_and_returns",
    "RemoteExperienceMaker.get_cumulative_returns", torch=torch, itertools=itertools, logger=MagicMock(),
    apply_length_penalties=lambda *_: None, compute_reward=reward.compute_reward,
)  # fmt: skip


def of_verl(name, groups):
    """Return the advantages of a batch's responses."""
    function, options = VERL[name]
    scores = torch.tensor([[reward] for group in groups for reward in group], dtype=torch.float64)
    index = np.array([number for number, group in enumerate(groups) for _ in group])
    found, _ = getattr(core, function)(scores, torch.ones_like(scores), index=index, **options)
    return found[:, 0].tolist()


def of_openrlhf(name, groups):
    """Return the advantages of a batch's responses."""
    rewards = torch.tensor([reward for group in groups for reward in group], dtype=torch.float64)
    advantage = SimpleNamespace(estimator=OPENRLHF[name], gamma=1.0, no_std_norm=False)
    args = SimpleNamespace(
        algo=SimpleNamespace(advantage=advantage), reward=SimpleNamespace(clip_range=None),
        rollout=SimpleNamespace(n_samples_per_prompt=len(groups[0])),
    )  # fmt: skip
    column = torch.zeros(len(rewards), 1, dtype=torch.float64)
    experience = SimpleNamespace(
        rewards=rewards, index=list(range(len(rewards))), info={}, kl=column, action_mask=column + 1, values=None
    )
    trainer = SimpleNamespace(
        strategy=SimpleNamespace(args=args), advantage_estimator=OPENRLHF[name], kl_ctl=SimpleNamespace(value=0.0),
        get_cumulative_returns=lambda *given: maker.get_cumulative_returns(None, *given),
    )  # fmt: skip
    (made,) = maker.compute_advantages_and_returns(trainer, [experience])
    return made.advantages[:, 0].tolist()


batches = json.loads(sys.argv[1])
print(
    json.dumps(
        {
            "verl": {name: [of_verl(name, groups) for groups in batches] for name in VERL},
            "openrlhf": {name: [of_openrlhf(name, groups) for groups in batches] for name in OPENRLHF},
        }
    )
)
