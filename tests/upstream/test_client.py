"""Requests to engines, and the names of their faults."""

import asyncio
from contextlib import closing, suppress
from functools import partial

import pytest
from aiohttp import web
from tests.support.fakes import fake_engine, listening

from proxy.errors import EngineDisconnected, EngineError, EngineUnreachable
from proxy.upstream import client


async def test_concurrent_calls_detect_an_engine_once(engine, upstream_to):
    upstream = upstream_to(engine.url)
    await asyncio.gather(*(upstream.ensure_detected(upstream.endpoints[0]) for _ in range(50)))

    assert engine.probes == 6


async def test_an_engine_is_detected_again_after_it_disconnected(engine, upstream_to):
    """Another engine may listen on the address by then."""
    upstream = upstream_to(engine.url)
    (endpoint,) = upstream.endpoints
    await upstream.ensure_detected(endpoint)

    async def respond(request, body):
        request.transport.close()
        raise ConnectionResetError

    engine.respond = respond
    with pytest.raises(EngineDisconnected):
        await upstream.send(endpoint, "POST", "/x", headers=(), body=b"{}")
    engine.fixed_responses = {"/server_info": {"version": "0.5.23"}, "/model_info": {"weight_version": "1"}}
    await upstream.ensure_detected(endpoint)

    assert (endpoint.kind, endpoint.version) == ("sglang", "0.5.23")


async def test_connection_faults_raise_and_are_counted(engine, upstream_to):
    """A refused connection raises EngineUnreachable, a connection closed before the response EngineDisconnected."""

    async def respond(request, body):
        request.transport.close()
        raise ConnectionResetError

    engine.respond = respond
    upstream = upstream_to(engine.url, "http://127.0.0.1:9")
    connected, refused = upstream.endpoints
    with pytest.raises(EngineDisconnected, match="e0 disconnected"):
        await upstream.send(connected, "POST", "/x", headers=(), body=b"{}")
    with pytest.raises(EngineUnreachable, match="e1 is unreachable"):
        await upstream.send(refused, "POST", "/x", headers=(), body=b"{}")

    assert (connected.faults, refused.health.is_ejected) == (1, True)
    assert "e1 is unreachable" in refused.last_fault


async def test_a_5_mb_body_is_sent_with_its_content_length(engine, upstream_to):
    """A prompt of 200k tokens has a few megabytes."""
    body = b'{"prompt":"' + b"x" * 5_000_000 + b'"}'
    upstream = upstream_to(engine.url)
    with closing(await upstream.send(upstream.endpoints[0], "POST", "/x", headers=(), body=body)) as response:
        await anext(response.iter_bytes())

    assert len(engine.requests[0]["prompt"]) == 5_000_000
    assert str(len(body)) == engine.headers[0]["content-length"]


async def test_a_refused_connection_or_503_is_retried_at_the_next_endpoint(upstream_to):
    """Up to engines.max_attempts; the response of the last endpoint is returned."""

    async def unavailable(request, body):
        return web.json_response({"from": "unavailable"}, status=503)

    async def available(request, body):
        return web.json_response({"from": "available"})

    async with fake_engine() as first_engine, fake_engine() as second_engine:
        first_engine.respond, second_engine.respond = unavailable, available
        upstream = upstream_to(
            "http://127.0.0.1:9", first_engine.url, second_engine.url, engines={"max_attempts": 3, "eject_after": 99}
        )

        async def send(endpoints):
            async with upstream.send_to_any(endpoints, "POST", "/x", headers=(), body=b"{}") as response:
                return response.status, b"".join([read async for read in response.iter_bytes()])

        dead, first, last = upstream.endpoints
        assert await send([dead, first, last]) == (200, b'{"from": "available"}')
        assert await send([dead, first]) == (503, b'{"from": "unavailable"}')
        assert await send([first, dead, first, last]) == (503, b'{"from": "unavailable"}')
        with pytest.raises(EngineUnreachable):
            await send([first, dead])
    assert [endpoint.queue.in_flight for endpoint in upstream.endpoints] == [0, 0, 0]


async def test_calls_without_a_rollout_are_queued(engine, upstream_to, registry):
    """With max_in_flight 1, the second call waits for the first; the metrics show it."""
    release = asyncio.Event()

    async def respond(request, body):
        await release.wait()
        return web.json_response({})

    engine.respond = respond
    upstream = upstream_to(engine.url, max_in_flight=1)
    (endpoint,) = upstream.endpoints

    async def send():
        async with upstream.send_to_any([endpoint], "POST", "/x", headers=(), body=b"{}") as response:
            return [read async for read in response.iter_bytes()]

    calls = [asyncio.create_task(send()) for _ in range(2)]
    await engine.reached.wait()
    assert (len(engine.requests), endpoint.queue.in_flight, endpoint.queue.waiting) == (1, 1, 1)
    assert registry.get_sample_value("tokentape_queued_calls", {"engine": "e0"}) == 1.0
    release.set()
    await asyncio.gather(*calls)

    assert (len(engine.requests), endpoint.queue.in_flight) == (2, 0)
    assert registry.get_sample_value("tokentape_queued_calls", {"engine": "e0"}) == 0.0
    assert registry.get_sample_value("tokentape_queue_duration_seconds_count") == 1.0


@pytest.mark.parametrize("reason", ["ejected", "removed"])
async def test_a_call_in_the_queue_of_a_removed_or_ejected_endpoint_is_sent_to_the_next_one(upstream_to, reason):
    """Calls that hang at the endpoint are not waited for."""
    async with fake_engine() as hung, fake_engine() as other:
        hung.hangs()
        upstream = upstream_to(hung.url, other.url, max_in_flight=1)
        first, second = upstream.endpoints

        async def send(*endpoints):
            async with upstream.send_to_any(endpoints, "POST", "/x", headers=(), body=b"{}") as response:
                return response.status

        hanging = asyncio.create_task(send(first))
        await hung.reached.wait()
        waiting = asyncio.create_task(send(first, second))
        while not first.queue.waiting:
            await asyncio.sleep(0)
        if reason == "removed":
            upstream.replace([second.settings])
        while reason == "ejected" and not first.health.is_ejected:
            upstream.health_checker.failed(first, "failed by the test")
        assert await waiting == 500
        assert (first.queue.in_flight, first.queue.waiting, hanging.done()) == (1, 0, False)
        hanging.cancel()
        await asyncio.wait([hanging])

    assert [len(hung.requests), len(other.requests)] == [1, 1]


async def test_the_size_of_an_auxiliary_response_is_limited(engine, upstream_to, monkeypatch):
    """A list of models or the text of tokens cannot fill the memory."""
    monkeypatch.setattr("proxy.upstream.client.MAX_RESPONSE_BYTES", 1000)

    async def respond(request, body):
        return web.Response(body=b"x" * len(body["prompt"]))

    engine.respond = respond
    upstream = upstream_to(engine.url)
    (endpoint,) = upstream.endpoints
    found = []
    for size in (1000, 1001):
        body = b'{"prompt":"' + b"x" * size + b'"}'
        with closing(await upstream.send(endpoint, "POST", "/x", headers=(), body=body)) as response:
            try:
                found.append(len(await client.body_of(response)))
            except EngineDisconnected as error:
                found.append(error.message)

    assert found == [1000, "The engine returned more than 1000 bytes"]


async def test_an_auxiliary_response_with_very_many_values_is_not_parsed(engine, upstream_to):
    """Six MB of lists would take 290 MB."""

    async def respond(request, body):
        return web.Response(body=b"[" + b"[]," * 2_000_000 + b"1]")

    engine.respond = respond
    upstream = upstream_to(engine.url)
    with pytest.raises(EngineDisconnected, match="too many values"):
        await upstream.post_json(upstream.endpoints[0], "/x", b"{}")


@pytest.mark.parametrize("status", [600, 999])
async def test_an_invalid_status_code_is_a_fault(upstream_to, status):
    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 %d Odd\r\nContent-Length: 0\r\n\r\n" % status)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        upstream = upstream_to(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(EngineDisconnected, match=f"invalid status {status}"):
            await upstream.send(upstream.endpoints[0], "GET", "/x", headers=(), body=None)


async def test_faults_of_auxiliary_requests_do_not_count_towards_ejection(engine, upstream_to):
    """A gateway may not have the route, and return 503 or close the connection, but still serve calls."""

    async def respond(request, body):
        if request.path == "/gone":
            request.transport.close()
        return web.json_response({}, status=503)

    engine.respond = respond
    upstream = upstream_to(engine.url)
    (endpoint,) = upstream.endpoints
    await upstream.ensure_detected(endpoint)
    for path in ("/detokenize", "/gone") * 4:
        sending = upstream.send(endpoint, "POST", path, headers=(), body=b"{}", is_auxiliary=True)
        with suppress(EngineError), closing(await sending) as response:
            await client.body_of(response)

    assert (endpoint.faults, endpoint.health.is_ejected, endpoint.is_detected) == (0, False, True)


def listing(engine, *names):
    engine.fixed_responses["/v1/models"] = {"data": [{"id": name} for name in names]}


async def test_the_models_of_engines_are_requested_once_for_each_name(upstream_to):
    """A model that an engine loads later is found within a minute; calls of listed models do not wait for other engines."""
    async with fake_engine() as first, fake_engine() as second:
        listing(first, "a")
        listing(second, "b")
        upstream = upstream_to(first.url, second.url)
        one, two = upstream.endpoints
        found = [await upstream.endpoints_for(name) for name in ("a", "b", "a", "b", "c")]
        first.fixed_responses["/v1/models"] = second.fixed_responses["/v1/models"] = None  # 404
        again = [await upstream.endpoints_for(name) for name in ("a", "b", "c")]

    assert [list(endpoints) for endpoints in found] == [[one], [two], [one], [two], [one, two]]
    assert [list(endpoints) for endpoints in again] == [[one], [two], [one, two]]


async def test_one_endpoint_without_configured_models_serves_any_model(engine, upstream_to):
    """Its engine is not asked for models."""
    upstream = upstream_to(engine.url)

    assert upstream.endpoints == await upstream.endpoints_for("x")
    assert not engine.reached.is_set()


async def test_a_call_waits_for_no_engine_that_lists_other_models(upstream_to, monkeypatch):
    monkeypatch.setattr(client, "_DETECTION_TIMEOUT_S", 1000)
    async with fake_engine() as first, fake_engine() as second:
        listing(first, "a")
        listing(second, "b")
        upstream = upstream_to(first.url, second.url)
        one, two = upstream.endpoints
        assert list(await upstream.endpoints_for("b")) == [two]
        del second.fixed_responses["/v1/models"]
        second.hangs()

        async with asyncio.timeout(50):
            assert list(await upstream.endpoints_for("a")) == [one]


async def test_an_engines_type_and_version_are_detected(engine, upstream_to):
    """The type and version of an unreachable engine are unknown."""
    upstream = upstream_to(engine.url, "http://127.0.0.1:9")
    await upstream.detect_all()
    reachable, unreachable = upstream.endpoints

    assert (reachable.kind, reachable.version) == ("vllm", "0.32.0")
    assert (unreachable.kind, unreachable.version) == ("auto", None)
    assert [await upstream.health_checker.check(endpoint) for endpoint in upstream.endpoints] == [True, False]
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


async def test_an_engine_that_returns_503_to_every_probe_is_detected_again(engine, upstream_to):
    """It is still loading its model."""

    async def loading(request, body):
        return web.json_response({"error": "loading"}, status=503)

    engine.fixed_responses, engine.respond = {}, loading
    engine.unknown_status = 503
    upstream = upstream_to(engine.url)
    (endpoint,) = upstream.endpoints
    await upstream.ensure_detected(endpoint)
    assert (endpoint.kind, endpoint.is_detected) == ("plain", False)

    engine.fixed_responses = {"/version": {"version": "0.32.0"}}
    await upstream.ensure_detected(endpoint)
    assert (endpoint.kind, endpoint.is_detected) == ("vllm", True)


@pytest.mark.parametrize("status", [404, 500, 502])
async def test_a_server_is_plain_only_if_it_lists_its_models(engine, upstream_to, status):
    """A gateway responds so while its engine loads: it is detected again, later each time, and calls pass meanwhile."""
    engine.fixed_responses, engine.unknown_status = {}, status
    engine.respond = partial(respond_with, status)
    upstream = upstream_to(engine.url)
    (endpoint,) = upstream.endpoints
    for _ in range(5):
        assert await upstream.ensure_detected(endpoint) is None
    assert (endpoint.kind, endpoint.is_detected, endpoint.detections) == ("plain", False, 2)

    engine.fixed_responses = {"/version": {"version": "0.32.0"}}
    endpoint.detect_at = 0
    await upstream.ensure_detected(endpoint)
    assert (endpoint.kind, endpoint.is_detected, endpoint.detections) == ("vllm", True, 0)


async def respond_with(status, request, body):
    return web.json_response({}, status=status)


async def test_a_passed_health_check_detects_an_engine_that_is_not_known(engine, upstream_to):
    """And an engine that recovers from an ejection is detected again."""
    engine.fixed_responses, engine.respond = {}, partial(respond_with, 502)
    upstream = upstream_to(engine.url)
    (endpoint,) = upstream.endpoints
    await upstream.ensure_detected(endpoint)
    engine.fixed_responses = {"/health": {}, "/version": {"version": "0.32.0"}}
    assert await upstream.health_checker.check(endpoint)
    await upstream.ensure_detected(endpoint)
    assert (endpoint.kind, endpoint.is_detected) == ("vllm", True)

    for _ in range(3):
        upstream.health_checker.failed(endpoint, "it died")
    upstream.health_checker.answered(endpoint)
    assert not endpoint.is_detected


async def test_an_engine_keeps_its_type_while_a_gateway_returns_errors_for_it(engine, upstream_to):
    """A gateway responds with 502 while a known engine restarts behind it."""
    upstream = upstream_to(engine.url)
    (endpoint,) = upstream.endpoints
    await upstream.ensure_detected(endpoint)
    engine.fixed_responses, engine.unknown_status = {}, 502
    engine.respond = partial(respond_with, 502)
    endpoint.lose()
    await upstream.ensure_detected(endpoint)

    assert (endpoint.kind, endpoint.version, endpoint.is_detected) == ("vllm", "0.32.0", False)


@pytest.mark.parametrize("sign", ["server", "models", "ids"])
async def test_an_engine_is_detected_again_if_its_responses_change(engine, upstream_to, sign):
    """Another server header, other models, or a step without ids; at most once a minute, and what is known is kept."""
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
    assert (endpoint.version, len(endpoint.windows)) == ("0.33.0", 0)

    endpoint.windows.put("m", 9)
    endpoint.detect_at = 0
    await change()
    await upstream.ensure_detected(endpoint)
    assert (endpoint.is_detected, len(endpoint.windows)) == (True, 1)


async def test_an_engine_without_token_ids_is_logged_and_counted(engine, upstream_to, registry, caplog):
    """As its type shows, and as its last step shows."""
    engine.fixed_responses = {"/v1/models": {"data": []}}
    upstream = upstream_to(engine.url)
    (endpoint,) = upstream.endpoints
    await upstream.ensure_detected(endpoint)
    assert registry.get_sample_value("tokentape_engine_token_ids", {"engine": "e0"}) == 0
    assert "returns no token ids" in caplog.text

    upstream.note_ids(endpoint, returned=True)
    assert registry.get_sample_value("tokentape_engine_token_ids", {"engine": "e0"}) == 1


async def test_detecting_an_engine_again_resets_its_cached_properties(engine, upstream_to):
    """It may have been restarted with another model."""
    upstream = upstream_to(engine.url)
    (endpoint,) = upstream.endpoints
    await upstream.ensure_detected(endpoint)
    endpoint.windows.put("m", 9)
    endpoint.forces_usage.show("r1", what=True)
    endpoint.lose()
    await upstream.ensure_detected(endpoint)

    assert (len(endpoint.windows), endpoint.forces_usage.for_rollout("r1")) == (0, None)


async def test_the_configured_engine_type_overrides_the_detected_one(engine, upstream_to, caplog):
    """The difference is logged."""
    upstream = upstream_to(engine.url, kind="plain")
    await upstream.detect_all()

    assert upstream.endpoints[0].kind == "plain"
    assert "is configured as plain but was detected as vllm" in caplog.text


async def test_vllms_sampling_defaults_are_requested(upstream_to):
    """The engine is detected even if that route is disabled or fails."""
    path = "/v1/chat/completions/render"
    rendered = {"token_ids": [1], "sampling_params": {"temperature": 0.6, "top_p": 0.95, "max_tokens": 1}}
    async with fake_engine() as showing, fake_engine() as silent:
        showing.fixed_responses[path] = rendered
        upstream = upstream_to(showing.url, silent.url)
        await upstream.detect_all()

        assert [endpoint.kind for endpoint in upstream.endpoints] == ["vllm", "vllm"]
        assert [endpoint.sampling_defaults for endpoint in upstream.endpoints] == [
            {"temperature": 0.6, "top_p": 0.95},
            {},
        ]


async def test_a_timeout_of_the_sampling_defaults_request_does_not_fail_detection(engine, upstream_to, monkeypatch):
    monkeypatch.setattr("proxy.upstream.client._REQUEST_TIMEOUT_S", 0.01)
    response, never = engine.handle, asyncio.Event()

    async def silent(request):
        if request.path.endswith("/render"):
            await never.wait()
        return await response(request)

    engine.handle = silent
    upstream = upstream_to(engine.url)
    (endpoint,) = upstream.endpoints

    assert await upstream.ensure_detected(endpoint) is None
    assert (endpoint.kind, endpoint.is_detected, endpoint.sampling_defaults) == ("vllm", True, {})


@pytest.mark.parametrize(
    ("version", "status", "size"),
    [("0.5.23", 400, 4096), ("0.5.23", 200, None), ("0.5.23", 404, None), ("0.5.22", 400, None)],
)
async def test_the_size_of_sglangs_vocabulary_is_read_from_its_error(engine, upstream_to, version, status, size):
    """It is reported nowhere else. An older server is not asked."""
    error = {"error": {"message": "logit_bias must has keys in [0, 4095], got 2147483647."}}

    async def respond(request, body):
        return web.json_response(error if status == 400 else {}, status=status)

    engine.fixed_responses = {"/model_info": {"weight_version": "1"}, "/server_info": {"version": version}}
    engine.respond = respond
    upstream = upstream_to(engine.url)
    await upstream.detect_all()
    (endpoint,) = upstream.endpoints

    assert (endpoint.kind, endpoint.traits.vocabulary_size) == ("sglang", size)
    assert (version == "0.5.23") == any("sampling_params" in body for body in engine.requests)


async def test_a_detection_that_an_engine_does_not_answer_ends(upstream_to, monkeypatch):
    """Otherwise no later call would detect the engine, once it responds again."""
    monkeypatch.setattr(client, "_PROBES_TIMEOUT_S", 0.1)
    hanging = asyncio.Event()

    async def handle(request):
        await hanging.wait()
        return web.json_response({"version": "0.32.0"} if request.path == "/version" else {})

    async with listening(handle) as url:
        upstream = upstream_to(url)
        (endpoint,) = upstream.endpoints
        fault = await upstream.ensure_detected(endpoint)
        monkeypatch.setattr(client, "_PROBES_TIMEOUT_S", 60)
        hanging.set()
        await upstream.ensure_detected(endpoint)

        assert "did not respond to probes" in fault.message
        assert endpoint.kind == "vllm"


async def test_traits_that_an_engine_does_not_show_in_time_are_known_later(upstream_to, monkeypatch):
    """No call waits for them. vLLM shows at /openapi.json which calls it aborts by an id, and whether it parses ids."""
    monkeypatch.setattr(client, "_REQUEST_TIMEOUT_S", 0.1)
    is_slow = asyncio.Event()

    async def handle(request):
        if request.path == "/openapi.json":
            await is_slow.wait()
            return web.json_response({"paths": {"/v1/chat/completions/derender": {}}})
        return web.json_response({"version": "0.32.0"} if request.path == "/version" else {})

    async with listening(handle) as url:
        upstream = upstream_to(url)
        (endpoint,) = upstream.endpoints
        assert await upstream.ensure_detected(endpoint) is None
        before = endpoint.is_detected, endpoint.known().parses_ids
        is_slow.set()
        async with asyncio.timeout(20):
            while not endpoint.known().parses_ids:
                await asyncio.sleep(0.01)

    assert before == (True, False)
