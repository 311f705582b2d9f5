"""The engines of scorers, from the settings."""

import pytest
from prometheus_client import CollectorRegistry
from tests.support.fakes import settings_for

from proxy.server.app import scoring_engines
from proxy.telemetry.metrics import make_metrics
from proxy.upstream import Upstream


@pytest.fixture
async def upstream(engine):
    opened = Upstream(settings_for(engine.url).engines, make_metrics(CollectorRegistry()))
    yield opened
    await opened.close()


async def test_a_scorer_has_its_own_endpoints_and_the_common_limits(engine, upstream):
    """The policy has those of calls, and nothing routes calls to the others."""
    scorer = {"endpoints": [{"url": "http://127.0.0.1:9", "kind": "vllm"}], "model": "big", "version": "2"}
    settings = settings_for(
        engine.url,
        engines={"max_attempts": 3},
        rescore={"scorers": {"teacher": scorer}, "timeout_s": 7, "max_in_flight": 5},
    )
    engines = scoring_engines(settings, upstream, make_metrics(CollectorRegistry()))
    teacher = engines["teacher"]
    try:
        assert ["policy", "teacher"] == list(engines)
        assert engines["policy"].is_policy
        assert engines["policy"].upstream is upstream
        assert (7, 5, 3) == (teacher.limits.timeout_s, teacher.limits.at_once, teacher.limits.max_attempts)
        assert ("big", "2", False) == (teacher.model, teacher.version, teacher.is_policy)
        assert ["http://127.0.0.1:9"] == [endpoint.settings.url for endpoint in teacher.upstream.endpoints]
    finally:
        await teacher.upstream.close()
