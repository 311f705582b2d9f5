"""The meeting of an engine."""

import asyncio

from aiohttp import web
from fakes import fake_engine


async def test_an_engine_is_asked_what_it_is(upstream_to):
    """Its kind and version; one that is away stays unknown."""
    async with fake_engine() as engine:
        upstream = upstream_to(engine.url, "http://127.0.0.1:9")
        await upstream.detect_all()
        there, away = upstream.endpoints

        assert ("vllm", "0.32.0") == (there.kind, there.version)
        assert ("auto", None) == (away.kind, away.version)
        assert [True, False] == [await upstream.health_checker.check(endpoint) for endpoint in upstream.endpoints]
        assert await upstream.ensure_detected(there) is None
        assert "e1 is unreachable" in (await upstream.ensure_detected(away)).message


async def test_an_engine_that_breaks_off_one_question_is_left_with_none(upstream_to):
    """Else the others would outlive the proxy's other parts, and leave their sockets to nobody."""
    asked, left = [], []

    async def breaking(request):
        asked.append(request.path)
        try:
            while "/version" not in asked:
                await asyncio.sleep(0)
            if request.path == "/version":
                request.transport.abort()
            await asyncio.Event().wait()
        finally:
            left.append(request.path)

    app = web.Application()
    app.router.add_get("/{path:.*}", breaking)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    upstream = upstream_to(f"http://127.0.0.1:{runner.addresses[0][1]}")
    (endpoint,) = upstream.endpoints
    fault = await upstream.ensure_detected(endpoint)
    async with asyncio.timeout(50):
        while len(left) < len(asked):
            await asyncio.sleep(0)
    await runner.cleanup()

    assert "is unreachable" in fault.message
    assert "/version" in asked


async def test_an_engine_that_is_still_loading_is_asked_again(upstream_to):
    """503 to everything says nothing of what it will be."""

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


async def test_what_calls_found_out_is_forgotten_when_it_is_met_again(upstream_to):
    """It may have been started with another model."""
    async with fake_engine() as engine:
        upstream = upstream_to(engine.url)
        (endpoint,) = upstream.endpoints
        await upstream.ensure_detected(endpoint)
        endpoint.window, endpoint.forces_usage, endpoint.merges_systems.value = 9, True, True
        endpoint.is_detected = False
        await upstream.ensure_detected(endpoint)

        assert (None, False, None) == (endpoint.window, endpoint.forces_usage, endpoint.merges_systems.value)


async def test_what_is_configured_wins(upstream_to, caplog):
    """Whatever the server looks like; that it looks otherwise is logged."""
    async with fake_engine() as engine:
        upstream = upstream_to(engine.url, kind="plain")
        await upstream.detect_all()

        assert "plain" == upstream.endpoints[0].kind
        assert "is configured as plain but was detected as vllm" in caplog.text


async def test_a_vllm_that_shows_its_sampling_defaults_is_asked_for_them(upstream_to):
    """Where that route is disabled, or the engine breaks off there, it is known all the same."""
    path = "/v1/chat/completions/render"
    rendered = {"token_ids": [1], "sampling_params": {"temperature": 0.6, "top_p": 0.95, "max_tokens": 1}}
    async with fake_engine() as showing, fake_engine() as silent:
        showing.fixed_responses[path] = rendered
        upstream = upstream_to(showing.url, silent.url)
        await upstream.detect_all()

        assert ["vllm", "vllm"] == [endpoint.kind for endpoint in upstream.endpoints]
        assert [{"temperature": 0.6, "top_p": 0.95}, {}] == [one.sampling_defaults for one in upstream.endpoints]


async def test_an_engine_that_does_not_show_its_sampling_defaults_in_time_is_known(upstream_to, monkeypatch):
    """They are unknown then, and calls go on."""
    monkeypatch.setattr("proxy.upstream.detection._DEFAULTS_TIMEOUT_S", 0.01)
    async with fake_engine() as engine:
        answer, never = engine.handle, asyncio.Event()

        async def silent(request):
            if request.path.endswith("/render"):
                await never.wait()
            return await answer(request)

        engine.handle = silent
        upstream = upstream_to(engine.url)
        (endpoint,) = upstream.endpoints

        assert await upstream.ensure_detected(endpoint) is None
        assert ("vllm", True, {}) == (endpoint.kind, endpoint.is_detected, endpoint.sampling_defaults)
