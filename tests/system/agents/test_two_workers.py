"""The same loops with real commands: `tokentape serve --workers 2` and `tokentape simulate --script`."""

import asyncio
import tempfile
from pathlib import Path

import orjson
import pytest
from tests.support.commands import started

from .clients import LOOPS
from .conftest import SCRIPT, WINDOW
from .recorded import is_scored_alike, recorded, scores_as_recorded
from .running import address
from .test_loops import TERMS, check_asides, run_loop, scripted_outcome


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The proxy's process and URL, and the engine's URL."""
    folder = tmp_path_factory.mktemp("workers")
    configuration = folder / "config.yaml"
    # The log's pipe is not read, and a full pipe would block the process.
    configuration.write_bytes(
        orjson.dumps({**TERMS, "store": {"url": f"embedded:{folder / 'store'}"}, "log": {"level": "error"}})
    )
    simulate = ("simulate", "--listen", "127.0.0.1:0", "--script", str(SCRIPT), "--max-model-len", str(WINDOW))
    serve = ("serve", "--config", str(configuration), "--workers", "2", "--listen", "127.0.0.1:0")
    with started(*simulate) as (_, engine, _), started(*serve, "--engine", engine) as (process, url, _):
        yield process, url, engine


@pytest.mark.parametrize("number", range(len(LOOPS)), ids=[loop.name for loop in LOOPS])
async def test_a_loop_is_recorded_exactly_by_two_workers(number, served, environment, http, tmp_path):
    """Any of its calls may reach either worker, which continues the other's steps (mode `faithful`, the default).

    Each worker has to see the stop token once before it continues calls that the template rewrites (decision 064).
    """
    loop, (_, url, engine) = LOOPS[number], served
    way, rollout = loop.ways[-1], f"loop-{number}"
    task = f"{loop.task} That is loop {number}."  # the engine fails once for each task
    outcome = await run_loop(loop, way, address(url, rollout), environment, tmp_path / "recorded", task=task)
    found = await recorded(http, url, rollout, loop.aside)
    scored = await scores_as_recorded(url, engine, rollout)

    assert scripted_outcome(loop) == outcome
    assert [step["status"] for step in found.steps] == ["complete", "error", "complete", "complete"]
    check_asides(loop, found)
    assert found.inexact == []
    assert found.refused in (loop.refused, "close"), found.why
    assert found.is_linear == (not found.refused and loop.conversations == 1)
    assert is_scored_alike(scored), scored


async def test_both_workers_received_calls(served, http):
    """Otherwise the tests above prove nothing. Workers share their metrics when metrics are requested."""
    process, url, _ = served
    async with asyncio.timeout(50):
        while sum(count > 0 for count in calls_of_each(process.pid)) < 2:
            async with http.get(f"{url}/metrics", headers={"Connection": "close"}) as response:
                await response.read()


def calls_of_each(pid: int) -> list[float]:
    """Return the number of calls of each worker."""
    (folder,) = Path(tempfile.gettempdir()).glob(f"tokentape-{pid}-*")
    return [
        sum(value for metric, *_, samples in orjson.loads(path.read_bytes()) if metric == "tokentape_calls"
            for (name, _), value in samples if name.endswith("_total"))
        for path in sorted(folder.glob("*.json"))
    ]  # fmt: skip
