"""examples/grpo_torch.py, shortened: a transformer that learns from exported rows, and a vLLM that gets its weights.

It starts its own engine, because the weights change.
"""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

from . import environment
from .conftest import VARIABLES

ROOT = Path(__file__).parents[3]
UPDATE = re.compile(r"update +(\d+)  reward (\S+)  ratio-1 (\S+)")


async def test_the_importance_ratio_is_1_before_the_first_update_and_after_the_others(tmp_path):
    """So the engine samples with the weights of each update; rewards are those of an agent that calls its tool."""
    program = [str(environment.ensure().python), str(ROOT / "examples" / "grpo_torch.py")]
    short = ["--imitate", "60", "--steps", "4", "--groups", "2", "--size", "4", "--rate", "3e-2"]
    where = ["--out", str(tmp_path / "out"), "--tokentape", str(Path(sys.executable).with_name("tokentape"))]
    done = await asyncio.to_thread(
        subprocess.run, [*program, *short, *where], capture_output=True, text=True, check=False,
        env=os.environ | VARIABLES | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    updates = [(float(reward), float(ratio)) for _, reward, ratio in UPDATE.findall(done.stdout)]
    ratios = [ratio for _, ratio in updates]

    assert len(updates) == 4, done.stdout
    assert max(ratios) < 1e-3
    assert ratios[0] > 0
    assert max(ratios[1:]) > 0  # tokens of later weights were compared
    assert len((tmp_path / "out" / "rows.ndjson").read_text().splitlines()) >= 4 * 8
