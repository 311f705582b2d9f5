"""Requests to engines, and the names of their faults."""

import asyncio
from contextlib import closing, suppress

import pytest
from aiohttp import web
from tests.support.fakes import fake_engine

from proxy.errors import EngineDisconnected, EngineError, EngineUnreachable
from proxy.upstream import client


async def test_concurrent_calls_detect_an_engine_once(upstream_to):
    async with fake_engine() as engine:
        upstream = upstream_to(engine.url)
        await asyncio.gather(*(upstream.ensure_detected(upstream.endpoints[0]) for _ in range(50)))

    assert 6 == engine.probes


async def test_an_engine_is_detected_again_after_it_disconnected(upstream_to):
    """Another engine may listen on the address by then."""
    async with fake_engine() as engine:
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

        assert ("sglang", "0.5.23") == (endpoint.kind, endpoint.version)


async def test_connection_faults_raise_and_are_counted(upstream_to):
    """A refused connection raises EngineUnreachable, a connection closed before the response EngineDisconnected."""
    async with fake_engine() as engine:

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

    assert (1, True) == (connected.faults, refused.health.is_ejected)
    assert "e1 is unreachable" in refused.last_fault


async def test_a_5_mb_body_is_sent_with_its_content_length(upstream_to):
    """A prompt of 200k tokens has a few megabytes."""
    body = b'{"prompt":"' + b"x" * 5_000_000 + b'"}'
    async with fake_engine() as engine:
        upstream = upstream_to(engine.url)
        with closing(await upstream.send(upstream.endpoints[0], "POST", "/x", headers=(), body=body)) as response:
            await anext(response.iter_bytes())

    assert 5_000_000 == len(engine.requests[0]["prompt"])
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
        assert (200, b'{"from": "available"}') == await send([dead, first, last])
        assert (503, b'{"from": "unavailable"}') == await send([dead, first])
        assert (503, b'{"from": "unavailable"}') == await send([first, dead, first, last])
        with pytest.raises(EngineUnreachable):
            await send([first, dead])
    assert [0, 0, 0] == [endpoint.queue.in_flight for endpoint in upstream.endpoints]


async def test_calls_without_a_rollout_are_queued(upstream_to, registry):
    """With max_in_flight 1, the second call waits for the first; the metrics show it."""
    release = asyncio.Event()

    async def respond(request, body):
        await release.wait()
        return web.json_response({})

    async with fake_engine() as engine:
        engine.respond = respond
        upstream = upstream_to(engine.url, max_in_flight=1)
        (endpoint,) = upstream.endpoints

        async def send():
            async with upstream.send_to_any([endpoint], "POST", "/x", headers=(), body=b"{}") as response:
                return [read async for read in response.iter_bytes()]

        calls = [asyncio.create_task(send()) for _ in range(2)]
        await engine.reached.wait()
        assert (1, 1, 1) == (len(engine.requests), endpoint.queue.in_flight, endpoint.queue.waiting)
        assert 1.0 == registry.get_sample_value("tokentape_queued_calls", {"engine": "e0"})
        release.set()
        await asyncio.gather(*calls)

    assert (2, 0) == (len(engine.requests), endpoint.queue.in_flight)
    assert 0.0 == registry.get_sample_value("tokentape_queued_calls", {"engine": "e0"})
    assert 1.0 == registry.get_sample_value("tokentape_queue_duration_seconds_count")


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
        assert 500 == await waiting
        assert (1, 0, False) == (first.queue.in_flight, first.queue.waiting, hanging.done())
        hanging.cancel()
        await asyncio.wait([hanging])

    assert [1, 1] == [len(hung.requests), len(other.requests)]


async def test_the_size_of_an_auxiliary_response_is_limited(upstream_to, monkeypatch):
    """A list of models or the text of tokens cannot fill the memory."""
    monkeypatch.setattr("proxy.upstream.client.MAX_RESPONSE_BYTES", 1000)
    async with fake_engine() as engine:

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

    assert [1000, "The engine returned more than 1000 bytes"] == found


async def test_an_auxiliary_response_with_very_many_values_is_not_parsed(upstream_to):
    """Six MB of lists would take 290 MB."""
    async with fake_engine() as engine:

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


async def test_faults_of_auxiliary_requests_do_not_count_towards_ejection(upstream_to):
    """A gateway may not have the route, and return 503 or close the connection, but still serve calls."""

    async def respond(request, body):
        if request.path == "/gone":
            request.transport.close()
        return web.json_response({}, status=503)

    async with fake_engine() as engine:
        engine.respond = respond
        upstream = upstream_to(engine.url)
        (endpoint,) = upstream.endpoints
        await upstream.ensure_detected(endpoint)
        for path in ("/detokenize", "/gone") * 4:
            sending = upstream.send(endpoint, "POST", path, headers=(), body=b"{}", is_auxiliary=True)
            with suppress(EngineError), closing(await sending) as response:
                await client.body_of(response)

        assert (0, False, True) == (endpoint.faults, endpoint.health.is_ejected, endpoint.is_detected)


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

    assert [[one], [two], [one], [two], [one, two]] == [list(endpoints) for endpoints in found]
    assert [[one], [two], [one, two]] == [list(endpoints) for endpoints in again]


async def test_one_endpoint_without_configured_models_serves_any_model(upstream_to):
    """Its engine is not asked for models."""
    async with fake_engine() as engine:
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
        assert [two] == list(await upstream.endpoints_for("b"))
        del second.fixed_responses["/v1/models"]
        second.hangs()

        async with asyncio.timeout(50):
            assert [one] == list(await upstream.endpoints_for("a"))
