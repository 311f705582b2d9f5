"""The sending of requests to engines, and the naming of their faults."""

import asyncio
from contextlib import suppress

import pytest
from aiohttp import web
from fakes import fake_engine

from proxy.errors import EngineDisconnected, EngineError, EngineUnreachable


async def test_however_many_calls_wait_an_engine_is_asked_once(upstream_to):
    """A thousand calls at start are no thousand questions."""
    async with fake_engine() as engine:
        upstream = upstream_to(engine.url)
        await asyncio.gather(*(upstream.ensure_detected(upstream.endpoints[0]) for _ in range(50)))

    assert 6 == engine.probes


async def test_an_engine_that_comes_back_is_asked_again(upstream_to):
    """It may be another one by now, behind the same address."""
    async with fake_engine() as engine:
        upstream = upstream_to(engine.url)
        (endpoint,) = upstream.endpoints
        await upstream.ensure_detected(endpoint)

        async def respond(request, body):
            request.transport.close()
            raise ConnectionResetError

        engine.respond = respond
        with pytest.raises(EngineDisconnected):
            async with upstream.send(endpoint, "POST", "/x", headers=(), body=b"{}"):
                pass
        engine.fixed_responses = {"/server_info": {"version": "0.5.23"}, "/model_info": {"weight_version": "1"}}
        await upstream.ensure_detected(endpoint)

        assert ("sglang", "0.5.23") == (endpoint.kind, endpoint.version)


async def test_faults_are_named_and_counted(upstream_to):
    """A refused connection is EngineUnreachable, one that breaks before it answers EngineDisconnected."""
    async with fake_engine() as engine:

        async def respond(request, body):
            request.transport.close()
            raise ConnectionResetError

        engine.respond = respond
        upstream = upstream_to(engine.url, "http://127.0.0.1:9")
        alive, away = upstream.endpoints
        with pytest.raises(EngineDisconnected, match="e0 disconnected"):
            async with upstream.send(alive, "POST", "/x", headers=(), body=b"{}"):
                pass
        with pytest.raises(EngineUnreachable, match="e1 is unreachable"):
            async with upstream.send(away, "POST", "/x", headers=(), body=b"{}"):
                pass

    assert (1, True) == (alive.faults, away.health.is_ejected)
    assert "e1 is unreachable" in away.last_fault


async def test_a_large_body_is_sent_whole(upstream_to):
    """A 200k-token prompt is a few megabytes; it is neither cut nor chunked."""
    body = b'{"prompt":"' + b"x" * 5_000_000 + b'"}'
    async with fake_engine() as engine:
        upstream = upstream_to(engine.url)
        async with upstream.send(upstream.endpoints[0], "POST", "/x", headers=(), body=body) as answer:
            await anext(answer.iter_bytes())

    assert 5_000_000 == len(engine.requests[0]["prompt"])
    assert str(len(body)) == engine.headers[0]["content-length"]


async def test_what_one_endpoint_cannot_answer_the_next_one_does(upstream_to):
    """A refused connection and a 503 go on to the next endpoint, up to engines.max_attempts; the last one's is the answer."""

    async def away(request, body):
        return web.json_response({"from": "away"}, status=503)

    async def there(request, body):
        return web.json_response({"from": "there"})

    async with fake_engine() as one, fake_engine() as other:
        one.respond, other.respond = away, there
        upstream = upstream_to("http://127.0.0.1:9", one.url, other.url, engines={"max_attempts": 3, "eject_after": 99})

        async def ask(endpoints):
            async with upstream.send_to_any(endpoints, "POST", "/x", headers=(), body=b"{}") as answer:
                return answer.status, b"".join([read async for read in answer.iter_bytes()])

        dead, first, last = upstream.endpoints
        assert (200, b'{"from": "there"}') == await ask([dead, first, last])
        assert (503, b'{"from": "away"}') == await ask([dead, first])
        assert (503, b'{"from": "away"}') == await ask([first, dead, first, last])
        with pytest.raises(EngineUnreachable):
            await ask([first, dead])
    assert [0, 0, 0] == [endpoint.queue.in_flight for endpoint in upstream.endpoints]


async def test_calls_of_no_rollout_have_their_turn_too(upstream_to, registry):
    """With max_in_flight 1 the second waits for the first, seen in the metrics."""
    go_on = asyncio.Event()

    async def respond(request, body):
        await go_on.wait()
        return web.json_response({})

    async with fake_engine() as engine:
        engine.respond = respond
        upstream = upstream_to(engine.url, max_in_flight=1)
        (endpoint,) = upstream.endpoints

        async def ask():
            async with upstream.send_to_any([endpoint], "POST", "/x", headers=(), body=b"{}") as answer:
                return [read async for read in answer.iter_bytes()]

        asking = [asyncio.create_task(ask()) for _ in range(2)]
        await engine.reached.wait()
        assert (1, 1, 1) == (len(engine.requests), endpoint.queue.in_flight, endpoint.queue.waiting)
        assert 1.0 == registry.get_sample_value("tokentape_queued_calls", {"engine": "e0"})
        go_on.set()
        await asyncio.gather(*asking)

    assert (2, 0) == (len(engine.requests), endpoint.queue.in_flight)
    assert 0.0 == registry.get_sample_value("tokentape_queued_calls", {"engine": "e0"})
    assert 1.0 == registry.get_sample_value("tokentape_queue_duration_seconds_count")


@pytest.mark.parametrize("what", ["dies", "goes"])
async def test_a_call_that_waits_for_an_endpoint_that_is_no_more_is_sent_to_the_next(upstream_to, what):
    """It does not wait for calls that hang there; those end there."""
    async with fake_engine() as hung, fake_engine() as other:
        hung.hangs()
        upstream = upstream_to(hung.url, other.url, max_in_flight=1)
        first, second = upstream.endpoints

        async def ask(*endpoints):
            async with upstream.send_to_any(endpoints, "POST", "/x", headers=(), body=b"{}") as answer:
                return answer.status

        hanging = asyncio.create_task(ask(first))
        await hung.reached.wait()
        waiting = asyncio.create_task(ask(first, second))
        while not first.queue.waiting:
            await asyncio.sleep(0)
        if what == "goes":
            upstream.replace([second.settings])
        while what == "dies" and not first.health.is_ejected:
            upstream.health_checker.failed(first, "the test says so")
        assert 500 == await waiting
        assert (1, 0, False) == (first.queue.in_flight, first.queue.waiting, hanging.done())
        hanging.cancel()
        await asyncio.wait([hanging])

    assert [1, 1] == [len(hung.requests), len(other.requests)]


async def test_an_answer_beside_a_call_is_bounded(upstream_to, monkeypatch):
    """A list of models, or the text of tokens, cannot fill the memory."""
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
            async with upstream.send(endpoint, "POST", "/x", headers=(), body=body) as answer:
                try:
                    found.append(len(await answer.read()))
                except EngineDisconnected as error:
                    found.append(error.message)

    assert [1000, "The engine returned more than 1000 bytes"] == found


@pytest.mark.parametrize("status", [600, 999])
async def test_a_status_that_is_none_is_a_fault(upstream_to, status):
    """No client could make anything of it."""

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 %d Odd\r\nContent-Length: 0\r\n\r\n" % status)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        upstream = upstream_to(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(EngineDisconnected, match=f"invalid status {status}"):
            async with upstream.send(upstream.endpoints[0], "GET", "/x", headers=(), body=None):
                pass


async def test_a_question_beside_a_call_does_not_count_towards_ejection(upstream_to):
    """A gateway may have no route for it and answer 503, or close the connection, while it answers every call."""

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
            with suppress(EngineError):
                async with upstream.send(endpoint, "POST", path, headers=(), body=b"{}", is_auxiliary=True) as answer:
                    await answer.read()

        assert (0, False, True) == (endpoint.faults, endpoint.health.is_ejected, endpoint.is_detected)
