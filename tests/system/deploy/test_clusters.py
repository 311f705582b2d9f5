"""deploy/slurm and deploy/skypilot: their shell code, run with the simulator in place of vLLM, and stubs of Slurm."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.system.cluster.nodes import free_port

from .conftest import DEPLOY
from .environment import program

BATCH = DEPLOY / "slurm" / "tokentape.sbatch"
TASK = DEPLOY / "skypilot" / "tokentape.yaml"
TRAINER = """
import json, os, urllib.request
url, key = os.environ["TOKENTAPE_URL"], os.environ["TOKENTAPE_API_KEY"]
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "hi"}]}).encode()
headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
call = urllib.request.Request(f"{url}/rollouts/r1/v1/chat/completions", body, headers)
usage = json.load(urllib.request.urlopen(call))["usage"]
open("trained", "w").write(f"{usage['completion_tokens'] > 0}")
"""


@pytest.fixture
def programs(tmp_path):
    """A folder of programs, and a function that writes one."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def write(name, text):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
        return path

    write("tokentape", f'exec {shlex.quote(sys.executable)} -m tokentape "$@"')
    write("train.py", "").write_text(TRAINER)
    return write


def ended(script: list[str], folder: Path, **environment: str) -> tuple[int, str]:
    """Run a script to its end; return its exit code and output."""
    paths = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(DEPLOY.parent)}
    own = {name: value for name, value in os.environ.items() if not name.startswith("TOKENTAPE_")}
    done = subprocess.run(
        script, cwd=folder, env={**own, **paths, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=150, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.fixture
def slurm(programs, tmp_path):
    """Run the batch script as Slurm does on two nodes, which are addresses of this machine."""
    programs("scontrol", r'[ "$*" = "show hostnames the-list" ] && printf "127.0.0.1\n127.0.0.2\n"')
    programs("srun", 'while [[ $1 == --* ]]; do shift; done; exec "$@"')
    programs("engine", 'exec tokentape simulate --model policy --listen "127.0.0.2:$2"')

    def run(**environment):
        ports = {"PORT": str(free_port()), "ENGINE_PORT": str(free_port())}
        job = {"SLURM_JOB_NODELIST": "the-list", "SLURM_SUBMIT_DIR": str(tmp_path)}
        return ended(["bash", str(BATCH)], tmp_path, **job, **ports, **environment)

    return run


def test_the_shell_code_has_no_finding():
    """ShellCheck reads both; the check can fail."""
    shellcheck = [program("shellcheck"), "--shell=bash", "-"]
    task = yaml.safe_load(TASK.read_text())
    for text in (BATCH.read_text(), task["setup"], task["run"]):
        done = subprocess.run(shellcheck, input=text, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "")
    assert subprocess.run(shellcheck, input="cd $1", capture_output=True, text=True, check=False).returncode == 1


def test_a_job_records_the_calls_of_its_trainer(slurm, tmp_path):
    """TokenTape and the trainer on the first node, the engine on the other; the store remains for the next job."""
    code, output = slurm(ENGINE="engine", TRAINER=f"{sys.executable} bin/train.py")

    assert code == 0, output
    assert (tmp_path / "trained").read_text() == "True"
    assert (tmp_path / "tokentape-data" / "appendonlydir").exists()


def test_a_job_ends_with_its_trainer_or_engine(slurm, programs):
    """With the exit code of the trainer; and at once if an engine does not start."""
    programs("fails", "exit 7")

    assert slurm(ENGINE="engine", TRAINER="fails")[0] == 7
    assert slurm(ENGINE="false", TRAINER="true")[0] == 1


def test_a_task_records_the_calls_of_its_trainer(programs, tmp_path):
    """Its `run` with other ports, and with this environment in place of what `setup` installs."""
    port, engine = str(free_port()), str(free_port())
    programs("../vllm/bin/vllm", f'exec tokentape simulate --model policy --listen "127.0.0.1:{engine}"')
    programs("../tokentape/bin/tokentape", 'exec "$HOME/bin/tokentape" "$@"')
    script = yaml.safe_load(TASK.read_text())["run"].replace("8400", port).replace("8000", engine)
    trainer = f"{sys.executable} bin/train.py"
    code, output = ended(
        ["bash", "-c", script], tmp_path, HOME=str(tmp_path), MODEL="m", TOKENTAPE_API_KEY="a-key", TRAINER=trainer
    )

    assert code == 0, output
    assert (tmp_path / "trained").read_text() == "True"
