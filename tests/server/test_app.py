"""The composition root, and error responses of the whole application."""

import logging
import sys

import aiohttp
import pytest
from prometheus_client import CollectorRegistry
from tests.support.fakes import fake_engine, proxying, settings_for

from proxy.server.app import scoring_engines
from proxy.telemetry.metrics import make_metrics
from proxy.upstream.client import Upstream


async def test_an_unexpected_exception_is_500_and_logged(store, caplog, monkeypatch):
    """The response does not contain its text."""
    monkeypatch.setattr(logging.getLogger("tokentape"), "propagate", True)

    def broken(*args, **named):
        raise ZeroDivisionError("oops")

    async with fake_engine() as engine, proxying(engine.url, store) as served, aiohttp.ClientSession() as http:
        monkeypatch.setattr("proxy.api.model.call.prepare", broken)
        async with http.post(served.url + "/v1/chat/completions", json={"messages": []}) as response:
            payload = await response.json()

    assert (response.status, payload["error"]["code"]) == (500, "internal_error")
    assert "oops" not in payload["error"]["message"]
    assert "oops" in caplog.text


async def test_processes_with_one_store_mint_the_same_keys(store):
    async with fake_engine() as engine, proxying(engine.url, store) as here, proxying(engine.url, store) as there:
        async with (
            aiohttp.ClientSession() as http,
            http.post(here.url + "/rollouts", json={"rollout_id": "r1"}) as opened,
        ):
            first = (await opened.json())["api_key"]
        async with (
            aiohttp.ClientSession() as http,
            http.post(there.url + "/rollouts", json={"rollout_id": "r1"}) as reopened,
        ):
            second = (await reopened.json())["api_key"]

    assert first == second


async def test_a_start_with_traces_and_without_their_packages_is_refused(store, monkeypatch):
    """The message names what to install, and how to do without."""
    monkeypatch.setitem(sys.modules, "proxy.telemetry.tracing", None)
    async with fake_engine() as engine:
        with pytest.raises(ValueError, match=r"tokentape\[otel\].*OTEL_TRACES_EXPORTER=none"):
            async with proxying(engine.url, store, tracing={"endpoint": "http://127.0.0.1:4318"}):
                pass


@pytest.fixture
async def upstream(engine):
    opened = Upstream(settings_for(engine.url).engines, make_metrics(CollectorRegistry()))
    yield opened
    await opened.close()


async def test_a_scorer_has_its_own_endpoints_and_the_common_limits(engine, upstream):
    """The policy scores on the endpoints of calls; no call is routed to the endpoints of other scorers."""
    scorer = {"endpoints": [{"url": "http://127.0.0.1:9", "kind": "vllm"}], "model": "big", "version": "2"}
    settings = settings_for(
        engine.url,
        engines={"max_attempts": 3},
        rescore={"scorers": {"teacher": scorer}, "timeout_s": 7, "max_in_flight": 5},
    )
    engines = scoring_engines(settings, upstream, make_metrics(CollectorRegistry()))
    teacher = engines["teacher"]
    try:
        assert list(engines) == ["policy", "teacher"]
        assert engines["policy"].is_policy
        assert engines["policy"].upstream is upstream
        assert (teacher.limits.timeout_s, teacher.limits.at_once, teacher.limits.max_attempts) == (7, 5, 3)
        assert (teacher.model, teacher.version, teacher.is_policy) == ("big", "2", False)
        assert [endpoint.settings.url for endpoint in teacher.upstream.endpoints] == ["http://127.0.0.1:9"]
    finally:
        await teacher.upstream.close()
