"""Fixtures of the agent tests: their environment, the scripted engine, and the results table."""

from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from proxy.server.listener import simulating
from proxy.simulator.options import Options
from proxy.simulator.script import read_script

from .environment import ensure
from .seen import Table

SCRIPT = Path(__file__).with_name("script.yaml")
WINDOW = 131_072  # Claude Code's first prompt alone has some 33,000 of the simulator's tokens


def pytest_collection_modifyitems(items):
    """Allow time to load a program from a cold disk."""
    for item in items:
        item.add_marker(pytest.mark.timeout(240))


@pytest.fixture(scope="session")
def environment():
    """The installed clients."""
    return ensure()


@pytest.fixture(scope="session")
def table():
    """The results table; the page has the rows of the clients that ran."""
    table = Table()
    yield table
    table.write()


@pytest.fixture
def scripted():
    """Start an engine that replies by script.yaml; each engine counts its own failures."""

    @asynccontextmanager
    async def started(**options):
        fields = {"max_model_len": WINDOW, "script": read_script(SCRIPT), **options}
        async with simulating("127.0.0.1:0", Options(**fields)) as url:
            yield url

    return started
