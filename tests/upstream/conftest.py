"""Upstreams with their metrics, closed after the test."""

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
    """Return a factory of upstreams to URLs; the endpoints are named e0, e1, ... `engines` are settings for all of them."""
    made = []

    def make(*urls, engines=None, **settings):
        endpoints = [{"url": url, "name": f"e{n}", **settings} for n, url in enumerate(urls)]
        engines_settings = EnginesSettings(endpoints=endpoints, **engines or {})
        made.append(Upstream(engines_settings, make_metrics(registry)))
        return made[-1]

    yield make
    for upstream in made:
        await upstream.close()
