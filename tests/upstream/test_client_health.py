"""Health checks of endpoints."""

import asyncio
from contextlib import closing

import pytest
from aiohttp import web

from proxy.errors import EngineError

QUICK = {"health_interval_s": 0.02, "base_ejection_s": 0.02, "max_ejection_s": 0.1}


async def until(condition):
    async with asyncio.timeout(50):
        while not condition():
            await asyncio.sleep(0.01)


async def test_failing_checks_eject_an_engine_and_passing_ones_restore_it(engine, upstream_to, registry, caplog):
    """Without any call; metrics and log show it."""
    caplog.set_level("INFO")
    upstream = upstream_to(engine.url, engines=QUICK, kind="vllm")
    (endpoint,) = upstream.endpoints
    engine.fixed_responses, engine.unknown_status = {}, 503  # as vLLM does when its engine core is dead

    async def dead(request, body):
        return web.Response(status=503)

    engine.respond = dead
    await until(lambda: endpoint.health.is_ejected)
    assert registry.get_sample_value("tokentape_engine_healthy", {"engine": "e0"}) == 0.0
    assert "Engine e0 ejected: Engine e0 returned status 503" in caplog.text

    engine.fixed_responses = {"/health": {"status": "ok"}}
    await until(lambda: not endpoint.health.is_ejected)
    assert registry.get_sample_value("tokentape_engine_healthy", {"engine": "e0"}) == 1.0
    assert registry.get_sample_value("tokentape_ejections_total", {"engine": "e0"}) >= 1.0
    assert "e0 recovered" in caplog.text


async def test_after_a_failed_check_the_next_one_follows_soon(engine, upstream_to):
    """An idle engine is ejected long before eject_after checks at the regular interval."""
    engine.fixed_responses = {}
    upstream = upstream_to(engine.url, engines={"health_interval_s": 1, "eject_after": 200, "base_ejection_s": 0.01})
    (endpoint,) = upstream.endpoints
    async with asyncio.timeout(150):  # checks 1 s apart, 0.8 s at the least, would take longer
        await until(lambda: endpoint.health.is_ejected)


@pytest.mark.parametrize(("status", "expected"), [(200, True), (404, True), (401, True), (500, False), (503, False)])
async def test_an_engine_without_a_health_route_is_healthy_unless_it_returns_5xx(engine, upstream_to, status, expected):
    """The route may not exist, or require a key."""

    async def respond(request, body):
        return web.json_response({}, status=status)

    engine.fixed_responses, engine.respond = {}, respond
    upstream = upstream_to(engine.url, kind="plain")
    assert expected is await upstream.health_checker.check(upstream.endpoints[0])


async def test_a_health_check_that_times_out_is_a_fault(engine, upstream_to, monkeypatch):
    monkeypatch.setattr("proxy.upstream.client._CHECK_TIMEOUT_S", 0.05)
    engine.fixed_responses = {}
    upstream = upstream_to(engine.url, kind="plain")
    (endpoint,) = upstream.endpoints
    await upstream.ensure_detected(endpoint)
    engine.hangs()
    assert not await upstream.health_checker.check(endpoint)

    assert (endpoint.faults, endpoint.health.faults) == (1, 1)
    assert "did not respond to GET /health" in endpoint.last_fault


async def test_faults_of_calls_eject_and_a_response_restores_at_once(engine, upstream_to):
    """Even within the ejection time."""
    upstream = upstream_to(engine.url, engines={"base_ejection_s": 600, "max_ejection_s": 600, "eject_after": 2})
    (endpoint,) = upstream.endpoints
    await upstream.ensure_detected(endpoint)

    async def breaking(request, body):
        request.transport.close()
        raise ConnectionResetError

    async def call():
        with closing(await upstream.send(endpoint, "POST", "/x", headers=(), body=b"{}")) as response:
            return [read async for read in response.iter_bytes()]

    engine.respond = breaking
    for expected in (False, True):
        with pytest.raises(EngineError):
            await call()
        assert endpoint.health.is_ejected == expected

    async def respond(request, body):
        return web.json_response({})

    engine.respond = respond
    await call()

    assert (endpoint.health.is_ejected, endpoint.health.faults) == (False, 0)


async def test_closing_the_upstream_ends_the_checks(upstream_to):
    before = asyncio.all_tasks()
    upstream = upstream_to("http://127.0.0.1:9", "http://127.0.0.1:10")
    await upstream.close()

    assert asyncio.all_tasks() - before == set()
