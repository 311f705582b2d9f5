"""`tokentape track`, as docs/trackers.md shows it, with W&B (offline) and MLflow's tracking server."""

import asyncio
import json
import os
import signal
import struct
import sys

import pytest
from mlflow import MlflowClient
from tests.support.fakes import proxying
from wandb.proto.wandb_internal_pb2 import Record

from proxy.server.listener import simulating
from proxy.simulator.options import Options
from tokentape import AsyncClient

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of MLflow, for SQLAlchemy


@pytest.fixture
async def url(store):
    """A proxy in front of the simulator."""
    async with simulating("127.0.0.1:0", Options()) as engine, proxying(engine, store) as served:
        yield served.url


@pytest.fixture
def run(url, tmp_path, monkeypatch):
    """Run the command in a process of its own; return the lines of its file."""
    for name, value in (
        ("WANDB_MODE", "offline"),
        ("WANDB_DIR", tmp_path / "wandb"),
    ):
        monkeypatch.setenv(name, str(value))
    (tmp_path / "wandb").mkdir()

    async def run(*options):
        arguments = ("-m", "tokentape", "track", "--url", url, "--file", str(tmp_path / "log"), "--once", *options)
        process = await asyncio.create_subprocess_exec(sys.executable, *arguments, env=os.environ)
        assert await process.wait() == 0
        return [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]

    return run


@pytest.fixture
async def mlflow(tmp_path, unused_tcp_port, monkeypatch):
    """A tracking server with a database."""
    arguments = ("--backend-store-uri", f"sqlite:///{tmp_path / 'mlflow.db'}", "--port", str(unused_tcp_port))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "mlflow", "server", *arguments, "--workers", "1"),
        env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        cwd=tmp_path,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    while b"startup complete" not in (line := await process.stderr.readline()):
        assert line, "the server ended"
    rest = asyncio.create_task(process.stderr.read())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{unused_tcp_port}")
    yield
    os.killpg(process.pid, signal.SIGKILL)
    await rest
    await process.wait()


async def finish(url, version, *names):
    """Announce a version, and finish rollouts of it with their position as reward."""
    body = {"model": "policy", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    async with AsyncClient(url) as client:
        await client.put_policy(version)
        for number, name in enumerate(names):
            await client.open_rollout(name)
            await client.send("POST", f"/rollouts/{name}/v1/chat/completions", body)
            await client.finish_rollout(name, reward=float(number))


def logged_in(path):
    """Return the steps and values in a file of W&B: a log of LevelDB with protobufs of wandb 0.31."""
    data, position, record, found = path.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        if (rest := 32768 - position % 32768) < 7:
            position += rest
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            row, record = Record.FromString(record).history, b""
            items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in row.item}
            values = {name: value for name, value in items.items() if name == "sample._type" or "." not in name}
            found += (
                [(row.step.num, {name: value for name, value in values.items() if name[0] != "_"})] if values else []
            )
    return found


async def test_wandb_has_each_rollout_once(url, run, tmp_path):
    """A process that continues an offline run logs all steps again: W&B ignores those that it has."""
    await finish(url, 3, "a", "b")
    await run("--wandb", "project", "--sample", "2")
    await finish(url, 4, "c")
    lines = await run("--wandb", "project", "--sample", "2")

    runs = [logged_in(path) for path in sorted((tmp_path / "wandb").glob("wandb/offline-run-*/*.wandb"))]
    expected = [{f"rollout/{name}": value for name, value in line["values"].items()} for line in lines]
    sampled = {"sample._type": "html-file"}  # of each second rollout, when it is first logged
    assert [
        [(0, expected[0] | sampled), (1, expected[1])],
        [(0, expected[0]), (1, expected[1]), (2, expected[2] | sampled)],
    ] == sorted(runs, key=len)
    assert {name: lines[1]["values"][name] for name in ("reward", "policy_version", "staleness")} == {
        "reward": 1.0,
        "policy_version": 3,
        "staleness": 0,
    }


@pytest.mark.usefixtures("mlflow")
async def test_mlflow_has_each_rollout_once_at_its_policy_version(url, run):
    """Also those that were written to the file by a process that died before it logged them."""
    await finish(url, 3, "a", "b")
    await run("--mlflow", "project", "--run", "today's first")
    await finish(url, 4, "c")
    await run("--sample", "0")
    lines = await run("--mlflow", "project", "--run", "today's first")

    client = await asyncio.to_thread(MlflowClient)
    (kept,) = client.search_runs([client.get_experiment_by_name("project").experiment_id])
    rewards = client.get_metric_history(kept.info.run_id, "rollout/reward")
    assert [file.path for file in client.list_artifacts(kept.info.run_id, "rollouts")] == ["rollouts/0.txt"]
    assert (kept.info.run_name, kept.data.metrics["rollouts"]) == ("today's first", 3.0)
    assert [(line["values"]["reward"], line["values"]["policy_version"], line["finished_ms"]) for line in lines] == [
        (metric.value, metric.step, metric.timestamp) for metric in rewards
    ]
