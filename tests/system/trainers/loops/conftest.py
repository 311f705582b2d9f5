"""The trainers' own loops, on a CPU, with a real vLLM behind the proxy: `make test-trainers`.

A program runs in the trainers' Python and prints one JSON object as its last line. The engine serves the weights that
the trainers load; no update is pushed.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from tests.system.real_engines import environment
from tests.system.real_engines.conftest import TEST_S, VARIABLES, Engine, start_vllm
from tests.system.real_engines.through import Through

from proxy.config.settings import load
from proxy.server.listener import running

PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).parents[4]
# TRL compares its own logprobs with logprobs from the logits divided by the temperature.
MODE = "processed_logprobs"

Run = Callable[..., Awaitable[dict[str, Any]]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Apply each test's timeout to the test alone: building and starting the engine takes minutes."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(TEST_S, func_only=True))


@pytest.fixture(scope="session")
def trainers() -> environment.Environment:
    """The Python that has the trainers, and the model that they train."""
    return environment.ensure_trainers()


@pytest.fixture(scope="session")
def engine(trainers: environment.Environment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A vLLM that serves this model as `policy`."""
    log = tmp_path_factory.mktemp("engine") / "vllm.log"
    with start_vllm(trainers.model, "policy", log, f"--logprobs-mode={MODE}", "--enable-scale-out") as started:
        yield started


@pytest.fixture
async def proxy(engine: Engine, tmp_path: Path) -> AsyncIterator[Through]:
    """A proxy in front of it, with its own store."""
    endpoint = {"url": engine.url, "logprobs_mode": MODE}
    settings = load(
        listen="127.0.0.1:0", engines={"endpoints": [endpoint]}, store={"url": f"embedded:{tmp_path / 'store'}"}
    )
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(running(settings))
        yield Through(served.url, await stack.enter_async_context(aiohttp.ClientSession()))


@pytest.fixture
def run(trainers: environment.Environment, proxy: Through, tmp_path: Path) -> Run:
    """Run a program against the proxy; return what it prints."""

    async def run_program(name: str, *, model: bool = False, folder: bool = False) -> dict[str, Any]:
        arguments = [proxy.url, *([str(trainers.model)] if model else []), *([str(tmp_path / "out")] if folder else [])]
        process = await asyncio.create_subprocess_exec(
            *(str(trainers.python), str(PROGRAMS / f"{name}.py"), *arguments),
            env=os.environ | VARIABLES | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()[-4000:]
        found: dict[str, Any] = orjson.loads(output.splitlines()[-1])
        return found

    return run_program


@pytest.fixture
def recorded(proxy: Through) -> Callable[[], Awaitable[list[dict[str, Any]]]]:
    """Return the recorded steps of all rollouts."""

    async def read() -> list[dict[str, Any]]:
        rollouts = (await proxy.get("/rollouts?limit=1000"))["rollouts"]
        return [step for rollout in rollouts for step in await proxy.steps(rollout["rollout_id"])]

    return read
