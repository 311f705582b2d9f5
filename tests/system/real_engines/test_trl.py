"""examples/trl_grpo.py: TRL's GRPOTrainer with rollouts from the proxy and a vLLM that gets new weights at each step.

It uses its own engine, because the weights change.
"""

import asyncio
import os
import re
import subprocess
from pathlib import Path

import pytest

from . import environment
from .conftest import VARIABLES, start_vllm
from .through import through_proxy

ROOT = Path(__file__).parents[3]
STEP = re.compile(r"step (\d+): policy-recorded (\S+), (\d+) tokens, reward (\S+)")


@pytest.fixture(scope="module")
def trl():
    """TRL's Python and the model that it trains."""
    return environment.ensure_trl()


@pytest.fixture
def engine(trl, tmp_path):
    """A vLLM that serves this model as `policy`; without a parser, its random text is not read as reasoning."""
    with start_vllm(trl.model, "policy", tmp_path / "vllm.log") as started:
        yield started


async def train(trl, proxy: str, folder: Path, *arguments: str) -> list[tuple[float, int]]:
    """Run three steps of the example; return each one's largest difference of logprobs and number of trained tokens."""
    program = [str(trl.python), str(ROOT / "examples" / "trl_grpo.py"), "--url", proxy, "--model", str(trl.model)]
    options = ["--steps", "3", "--rate", "1e-3", "--out", str(folder), *arguments]
    done = await asyncio.to_thread(
        subprocess.run,
        [*program, *options],
        env=os.environ | VARIABLES | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = STEP.findall(done.stdout)
    assert [step for step, *_ in lines] == ["0", "1", "2"], done.stdout
    return [(float(difference), int(tokens)) for _, difference, tokens, _ in lines]


async def test_the_trainers_logprobs_equal_the_recorded_ones_at_each_step(trl, engine, tmp_path):
    """Up to float32's last digits if new weights are pushed at each step; without that, they diverge at once."""
    async with through_proxy(engine.url, tmp_path) as proxy:
        pushed = await train(trl, proxy.url, tmp_path / "pushed", "--engine", engine.url)
        left = await train(trl, proxy.url, tmp_path / "left")

    assert min(tokens for _, tokens in [*pushed, *left]) >= 4 * 32
    assert max(difference for difference, _ in pushed) < 1e-4
    assert max(difference for difference, _ in left) > 1e-2
