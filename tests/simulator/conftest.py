"""A simulated engine on a real socket."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.support.simulated import Caller

from proxy.simulator.options import Options
from proxy.simulator.server import make_engine


@pytest.fixture
def tools() -> list[dict[str, Any]]:
    """A list of one tool."""
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer"}},
        "required": ["city", "days"],
    }
    function = {"name": "get_weather", "description": "The weather to come.", "parameters": parameters}
    return [{"type": "function", "function": function}]


@pytest.fixture
def start(aiohttp_client) -> Callable[[Options], Awaitable[Caller]]:
    """Return a function that starts an engine with options."""

    async def started(options: Options) -> Caller:
        return Caller(await aiohttp_client(make_engine(options)))

    return started


@pytest.fixture
async def engine(start) -> Caller:
    """An engine with default options."""
    return await start(Options())


@pytest.fixture
async def sglang(start) -> Caller:
    """An engine with SGLang's API."""
    return await start(Options(shape="sglang"))
