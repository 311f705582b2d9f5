"""Upstreams with their metrics, closed when the test is over."""

import pytest
from prometheus_client import CollectorRegistry

from proxy.config.sections import EnginesSettings
from proxy.telemetry.metrics import make_metrics
from proxy.upstream import Upstream


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
async def upstream_to(registry):
    """An upstream to these URLs, named e0, e1, …; `engines` are settings of all, the rest of each endpoint."""
    made = []

    def make(*urls, engines=None, **said):
        endpoints = [{"url": url, "name": f"e{n}", **said} for n, url in enumerate(urls)]
        settings = EnginesSettings(endpoints=endpoints, **engines or {})
        made.append(Upstream(settings, make_metrics(registry)))
        return made[-1]

    yield make
    for upstream in made:
        await upstream.close()
