"""Detection of engines."""

import asyncio

from aiohttp import web
from fakes import fake_engine


async def test_an_engines_type_and_version_are_detected(upstream_to):
    """Those of an unreachable engine are unknown."""
    async with fake_engine() as engine:
        upstream = upstream_to(engine.url, "http://127.0.0.1:9")
        await upstream.detect_all()
        reachable, unreachable = upstream.endpoints

        assert ("vllm", "0.32.0") == (reachable.kind, reachable.version)
        assert ("auto", None) == (unreachable.kind, unreachable.version)
        assert [True, False] == [await upstream.health_checker.check(endpoint) for endpoint in upstream.endpoints]
        assert await upstream.ensure_detected(reachable) is None
        assert "e1 is unreachable" in (await upstream.ensure_detected(unreachable)).message


async def test_a_failed_probe_cancels_the_other_probes(upstream_to):
    """Otherwise they would outlive the upstream and leak their sockets."""
    requested, cancelled = [], []

    async def breaking(request):
        requested.append(request.path)
        try:
            while "/version" not in requested:
                await asyncio.sleep(0)
            if request.path == "/version":
                request.transport.abort()
            await asyncio.Event().wait()
        finally:
            cancelled.append(request.path)

    app = web.Application()
    app.router.add_get("/{path:.*}", breaking)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    upstream = upstream_to(f"http://127.0.0.1:{runner.addresses[0][1]}")
    (endpoint,) = upstream.endpoints
    fault = await upstream.ensure_detected(endpoint)
    async with asyncio.timeout(50):
        while len(cancelled) < len(requested):
            await asyncio.sleep(0)
    await runner.cleanup()

    assert "is unreachable" in fault.message
    assert "/version" in requested


async def test_an_engine_that_returns_503_to_every_probe_is_detected_again(upstream_to):
    """It is still loading its model."""

    async def loading(request, body):
        return web.json_response({"error": "loading"}, status=503)

    async with fake_engine() as engine:
        engine.fixed_responses, engine.respond = {}, loading
        engine.unknown_status = 503
        upstream = upstream_to(engine.url)
        (endpoint,) = upstream.endpoints
        await upstream.ensure_detected(endpoint)
        assert ("plain", False) == (endpoint.kind, endpoint.is_detected)

        engine.fixed_responses = {"/version": {"version": "0.32.0"}}
        await upstream.ensure_detected(endpoint)
        assert ("vllm", True) == (endpoint.kind, endpoint.is_detected)


async def test_detecting_an_engine_again_resets_its_cached_properties(upstream_to):
    """It may have been restarted with another model."""
    async with fake_engine() as engine:
        upstream = upstream_to(engine.url)
        (endpoint,) = upstream.endpoints
        await upstream.ensure_detected(endpoint)
        endpoint.windows.put("m", 9)
        endpoint.forces_usage.show("r1", what=True)
        endpoint.is_detected = False
        await upstream.ensure_detected(endpoint)

        assert (0, None) == (len(endpoint.windows), endpoint.forces_usage.for_rollout("r1"))


async def test_the_configured_engine_type_overrides_the_detected_one(upstream_to, caplog):
    """The difference is logged."""
    async with fake_engine() as engine:
        upstream = upstream_to(engine.url, kind="plain")
        await upstream.detect_all()

        assert "plain" == upstream.endpoints[0].kind
        assert "is configured as plain but was detected as vllm" in caplog.text


async def test_vllms_sampling_defaults_are_requested(upstream_to):
    """The engine is detected even if that route is disabled or fails."""
    path = "/v1/chat/completions/render"
    rendered = {"token_ids": [1], "sampling_params": {"temperature": 0.6, "top_p": 0.95, "max_tokens": 1}}
    async with fake_engine() as showing, fake_engine() as silent:
        showing.fixed_responses[path] = rendered
        upstream = upstream_to(showing.url, silent.url)
        await upstream.detect_all()

        assert ["vllm", "vllm"] == [endpoint.kind for endpoint in upstream.endpoints]
        assert [{"temperature": 0.6, "top_p": 0.95}, {}] == [
            endpoint.sampling_defaults for endpoint in upstream.endpoints
        ]


async def test_a_timeout_of_the_sampling_defaults_request_does_not_fail_detection(upstream_to, monkeypatch):
    monkeypatch.setattr("proxy.upstream.detection._DEFAULTS_TIMEOUT_S", 0.01)
    async with fake_engine() as engine:
        response, never = engine.handle, asyncio.Event()

        async def silent(request):
            if request.path.endswith("/render"):
                await never.wait()
            return await response(request)

        engine.handle = silent
        upstream = upstream_to(engine.url)
        (endpoint,) = upstream.endpoints

        assert await upstream.ensure_detected(endpoint) is None
        assert ("vllm", True, {}) == (endpoint.kind, endpoint.is_detected, endpoint.sampling_defaults)
