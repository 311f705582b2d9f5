"""Our advantages equal the advantages of the trainers' published code, run with a real torch."""

import os
import random
import subprocess
from pathlib import Path
from statistics import pstdev, stdev

import orjson
import pytest
from tests.system.real_engines import environment

from proxy.trajectory.advantages import BATCH, ESTIMATORS

PROGRAM = Path(__file__).parent / "programs" / "advantages.py"
ROOT = Path(__file__).parents[4]
DRAWN = random.Random(19)
BATCHES = [
    [[DRAWN.choice([0.0, 1.0, DRAWN.uniform(-5, 5)]) for _ in range(size)] for _ in range(count)]
    for size in (2, 3, 8)
    for count in (1, 2, 5)
    for _ in range(5)
]
MIXED = [groups for groups in BATCHES if all(pstdev(group) > 0.1 for group in groups)]


@pytest.fixture(scope="module")
def published():
    """The advantages of verl and OpenRLHF, by estimator and batch."""
    made = subprocess.run(
        [str(environment.ensure_trl().python), str(PROGRAM), orjson.dumps(MIXED).decode()],
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr.decode()[-4000:]
    return orjson.loads(made.stdout.splitlines()[-1])


def ours(name, groups):
    samples = [[reward for group in groups for reward in group]] if name == BATCH else groups
    return [value for group in samples for (value,) in ESTIMATORS[name]([[reward] for reward in group])]


@pytest.mark.parametrize(
    ("trainer", "name"),
    [
        ("verl", "dr_grpo"),
        ("verl", "rloo"),
        ("openrlhf", "dr_grpo"),
        ("openrlhf", "rloo"),
        ("openrlhf", "reinforce_pp"),
    ],
)
def test_advantages_equal_the_trainers(published, trainer, name):
    for groups, found in zip(MIXED, published[trainer][name], strict=True):
        assert found == pytest.approx(ours(name, groups), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", ["grpo", "reinforce_pp"])
def test_verl_divides_by_the_sample_standard_deviation(published, name):
    for groups, found in zip(MIXED, published["verl"][name], strict=True):
        compared = groups[0] if name == "grpo" else [reward for group in groups for reward in group]
        ratio = stdev(compared) / pstdev(compared)
        assert [value * ratio for value in found] == pytest.approx(ours(name, groups), rel=1e-4, abs=1e-5)
