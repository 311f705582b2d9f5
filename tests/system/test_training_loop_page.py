"""docs/training-loop.md: its program, with agents that fail and with a trainer that starts again."""

import asyncio
import contextlib
import io
import re
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from openai import OpenAIError
from tests.support.fakes import settings_for

from proxy.server.listener import running, simulating
from proxy.simulator.options import Options
from tokentape import AsyncClient

PAGE = (Path(__file__).parents[2] / "docs" / "training-loop.md").read_text()
AGENTS, TRAINER, _ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
START = "asyncio.run(main())\n"
UPDATE = '"""Load the new weights into the engines, in the way of your engine and trainer."""'
DYING = """update.calls = getattr(update, "calls", 0) + 1
    if update.calls == 2:
        import os
        os._exit(9)"""


def run(url: str, failing: int, update: str = UPDATE) -> list[str]:
    """Run the program as pasted, with this body of `update`; return what it prints.

    The first `failing` attempts raise, but the first one hangs: its rollout ends, as it does after the page's limits.
    """
    assert TRAINER.endswith(START)
    assert UPDATE in TRAINER
    names: dict = {}
    exec(compile(AGENTS.replace("http://127.0.0.1:8400", url), "docs/training-loop.md", "exec"), names)
    attempt, left = names["attempt"], iter(range(failing))

    async def attempt_or_fail(rollout):
        number = next(left, None)
        if number == 0:
            async with AsyncClient(url) as client:
                await client.finish_rollout(rollout["rollout_id"], "aborted")
            await asyncio.Event().wait()
        if number is not None:
            raise OpenAIError("the agent failed")
        return await attempt(rollout)

    names["attempt"] = attempt_or_fail
    with contextlib.redirect_stdout(io.StringIO()) as printed, patch("tokentape.clients.LOOK_S", 0.05):
        exec(compile(TRAINER.replace(UPDATE, update), "docs/training-loop.md", "exec"), names)
    return printed.getvalue().splitlines()


async def test_the_program_ends_twice_and_trains_each_group_once(store):
    """The second run continues the versions of the first; agents that fail are replaced; at most two batches remain."""
    async with (
        simulating("127.0.0.1:0", Options()) as engine,
        running(settings_for(engine), store) as served,
        AsyncClient(served.url) as client,
    ):
        printed = [await asyncio.to_thread(run, served.url, failing) for failing in (5, 0)]
        groups = {group["group_id"]: group["status"] async for group in client.groups()}
        trained = [line.split()[:2] for lines in printed for line in lines]

        assert (await client.policy())["version"] == "6"
        assert {group for group, _ in trained} == {group for group, status in groups.items() if status == "done"}
        assert len(trained) == len({rollout for _, rollout in trained}) == 6 * 2 * 4
        assert any("~1" in rollout for _, rollout in trained)
        assert len(groups) <= 12 + 2 * 4


async def test_the_program_ends_with_an_error_if_the_weights_cannot_be_loaded(store):
    """Calls resume with the old version."""
    async with (
        simulating("127.0.0.1:0", Options()) as engine,
        running(settings_for(engine), store) as served,
        AsyncClient(served.url) as client,
    ):
        with pytest.raises(ExceptionGroup, match="unhandled errors") as raised:
            await asyncio.to_thread(run, served.url, 0, "raise OSError('the engine is unreachable')")

        assert raised.group_contains(OSError, match="the engine is unreachable")
        assert None is (await client.policy())["version"]


async def test_the_program_can_be_started_again_after_it_died_in_a_weight_update(store):
    """The pause that it left ends, and three batches are trained; the batch that it had stays leased meanwhile."""
    async with (
        simulating("127.0.0.1:0", Options()) as engine,
        running(settings_for(engine), store) as served,
        AsyncClient(served.url) as client,
    ):
        program = (AGENTS + TRAINER.replace(UPDATE, DYING)).replace("http://127.0.0.1:8400", served.url)
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.DEVNULL)
        assert await process.wait() == 9
        statuses = [group["status"] async for group in client.groups()]
        printed = await asyncio.to_thread(run, served.url, 0)

        assert statuses.count("claimed") == 2
        assert (await client.policy())["version"] == "3"
        assert len({line.split()[1] for line in printed}) == 3 * 2 * 4
