"""The examples, run as users run them, with the simulator: shortened in `make test`, in full in `make examples`."""

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.fakes import proxying

from proxy.server.listener import simulating
from proxy.simulator.options import Options


def pytest_addoption(parser):
    parser.addoption("--whole", action="store_true", help="run the examples in full, and print their output")


@pytest.fixture
def whole(request):
    """Return whether examples run in full."""
    return request.config.getoption("whole", False)


@pytest.fixture
async def simulated(store):
    """A proxy in front of the simulator, and the simulator: their URLs."""
    async with simulating("127.0.0.1:0", Options()) as engine, proxying(engine, store) as served:
        yield served.url, engine


@pytest.fixture
def run(whole, capfd):
    """Run an example's `main` with a command line, beside the event loop; return its result and its output."""

    async def run(main: Callable[[list[str]], Any], *arguments: object) -> tuple[Any, str]:
        returned = await asyncio.to_thread(main, [str(argument) for argument in arguments])
        output = capfd.readouterr().out
        if whole:
            with capfd.disabled():
                sys.stdout.write(f"\n$ {main.__module__}.py {' '.join(map(str, arguments))}\n{output}")
        return returned, output

    return run
