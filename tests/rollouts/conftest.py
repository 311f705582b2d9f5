"""A proxy in front of the simulator, or of an engine that drifts, for tests of rollouts over HTTP."""

import pytest
from tests.support.drifting_engine import Drifting, DriftingEngine
from tests.support.fakes import proxying
from tests.support.session import engine_options, proxy, sections  # noqa: F401


@pytest.fixture
def drifting(engine):
    """An engine that omits a sampled token from the second prompt."""
    return DriftingEngine(engine)


@pytest.fixture
async def rollout(drifting, store, http):
    """A rollout of a proxy in front of that engine."""
    async with proxying(drifting.url, store) as served:
        yield Drifting(http, served.url)
