"""Detection of engines."""

import asyncio
from contextlib import closing
from functools import partial

import pytest
from aiohttp import web
from tests.support.fakes import fake_engine


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


@pytest.mark.parametrize("status", [404, 500, 502])
async def test_a_server_is_plain_only_if_it_lists_its_models(upstream_to, status):
    """A gateway responds so while its engine loads: it is detected again, later each time, and calls pass meanwhile."""
    async with fake_engine() as engine:
        engine.fixed_responses, engine.unknown_status = {}, status
        engine.respond = partial(respond_with, status)
        upstream = upstream_to(engine.url)
        (endpoint,) = upstream.endpoints
        for _ in range(5):
            assert await upstream.ensure_detected(endpoint) is None
        assert ("plain", False, 2) == (endpoint.kind, endpoint.is_detected, endpoint.detections)

        engine.fixed_responses = {"/version": {"version": "0.32.0"}}
        endpoint.detect_at = 0
        await upstream.ensure_detected(endpoint)
        assert ("vllm", True, 0) == (endpoint.kind, endpoint.is_detected, endpoint.detections)


async def respond_with(status, request, body):
    return web.json_response({}, status=status)


async def test_a_passed_health_check_detects_an_engine_that_is_not_known(upstream_to):
    """And an engine that recovers from an ejection is detected again."""
    async with fake_engine() as engine:
        engine.fixed_responses, engine.respond = {}, partial(respond_with, 502)
        upstream = upstream_to(engine.url)
        (endpoint,) = upstream.endpoints
        await upstream.ensure_detected(endpoint)
        engine.fixed_responses = {"/health": {}, "/version": {"version": "0.32.0"}}
        assert await upstream.health_checker.check(endpoint)
        await upstream.ensure_detected(endpoint)
        assert ("vllm", True) == (endpoint.kind, endpoint.is_detected)

        for _ in range(3):
            upstream.health_checker.failed(endpoint, "it died")
        upstream.health_checker.answered(endpoint)
        assert not endpoint.is_detected


async def test_an_engine_keeps_its_type_while_a_gateway_returns_errors_for_it(upstream_to):
    """A gateway responds with 502 while a known engine restarts behind it."""
    async with fake_engine() as engine:
        upstream = upstream_to(engine.url)
        (endpoint,) = upstream.endpoints
        await upstream.ensure_detected(endpoint)
        engine.fixed_responses, engine.unknown_status = {}, 502
        engine.respond = partial(respond_with, 502)
        endpoint.lose()
        await upstream.ensure_detected(endpoint)

        assert ("vllm", "0.32.0", False) == (endpoint.kind, endpoint.version, endpoint.is_detected)


@pytest.mark.parametrize("sign", ["server", "models", "ids"])
async def test_an_engine_is_detected_again_if_its_responses_change(upstream_to, sign):
    """Another server header, other models, or a step without ids; at most once a minute, and what is known is kept."""
    async with fake_engine() as engine:
        upstream = upstream_to(engine.url)
        (endpoint,) = upstream.endpoints
        await upstream.ensure_detected(endpoint)
        endpoint.windows.put("m", 9)

        async def change():
            if sign == "server":
                endpoint.server = "another"
                with closing(await upstream.send(endpoint, "GET", "/health", headers=(), body=None)):
                    pass
            elif sign == "models":
                endpoint.models.names = frozenset({"before"})
                await upstream.list_models(endpoint)
            else:
                upstream.note_ids(endpoint, returned=False)

        await change()
        assert endpoint.is_detected
        endpoint.detect_at = 0
        engine.fixed_responses["/version"] = {"version": "0.33.0"}
        await change()
        assert endpoint.detection is not None
        await upstream.ensure_detected(endpoint)
        assert ("0.33.0", 0) == (endpoint.version, len(endpoint.windows))

        endpoint.windows.put("m", 9)
        endpoint.detect_at = 0
        await change()
        await upstream.ensure_detected(endpoint)
        assert (True, 1) == (endpoint.is_detected, len(endpoint.windows))


async def test_an_engine_without_token_ids_is_logged_and_counted(upstream_to, registry, caplog):
    """As its type shows, and as its last step shows."""
    async with fake_engine() as engine:
        engine.fixed_responses = {"/v1/models": {"data": []}}
        upstream = upstream_to(engine.url)
        (endpoint,) = upstream.endpoints
        await upstream.ensure_detected(endpoint)
        assert 0 == registry.get_sample_value("tokentape_engine_token_ids", {"engine": "e0"})
        assert "returns no token ids" in caplog.text

        upstream.note_ids(endpoint, returned=True)
        assert 1 == registry.get_sample_value("tokentape_engine_token_ids", {"engine": "e0"})


async def test_detecting_an_engine_again_resets_its_cached_properties(upstream_to):
    """It may have been restarted with another model."""
    async with fake_engine() as engine:
        upstream = upstream_to(engine.url)
        (endpoint,) = upstream.endpoints
        await upstream.ensure_detected(endpoint)
        endpoint.windows.put("m", 9)
        endpoint.forces_usage.show("r1", what=True)
        endpoint.lose()
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
    monkeypatch.setattr("proxy.upstream.detection._REQUEST_TIMEOUT_S", 0.01)
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


@pytest.mark.parametrize(
    ("version", "status", "size"),
    [("0.5.23", 400, 4096), ("0.5.23", 200, None), ("0.5.23", 404, None), ("0.5.22", 400, None)],
)
async def test_the_size_of_sglangs_vocabulary_is_read_from_its_error(upstream_to, version, status, size):
    """It is reported nowhere else. An older server is not asked."""
    error = {"error": {"message": "logit_bias must has keys in [0, 4095], got 2147483647."}}

    async def respond(request, body):
        return web.json_response(error if status == 400 else {}, status=status)

    async with fake_engine() as engine:
        engine.fixed_responses = {"/model_info": {"weight_version": "1"}, "/server_info": {"version": version}}
        engine.respond = respond
        upstream = upstream_to(engine.url)
        await upstream.detect_all()
        (endpoint,) = upstream.endpoints

        assert ("sglang", size) == (endpoint.kind, endpoint.traits.vocabulary_size)
        assert (version == "0.5.23") == any("sampling_params" in body for body in engine.requests)
