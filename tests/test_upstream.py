"""The engines' endpoints: the choice among them, and the naming of their faults."""

import asyncio

import pytest
from aiohttp import web
from fakes import fake_engine
from prometheus_client import CollectorRegistry

from proxy.config import EnginesSettings
from proxy.errors import EngineBroke, NoEngine
from proxy.metrics import make_metrics
from proxy.upstream import Upstream, choose


@pytest.fixture
async def upstream_to():
    made = []

    def make(*urls, **said):
        endpoints = [{"url": url, "name": f"e{n}", **said} for n, url in enumerate(urls)]
        settings = EnginesSettings(endpoints=endpoints)
        made.append(Upstream(settings, make_metrics(CollectorRegistry())))
        return made[-1]

    yield make
    for upstream in made:
        await upstream.close()


async def test_a_rollout_stays_with_its_endpoint(upstream_to):
    """The choice depends on the rollout alone, uses every endpoint, and losing one moves only its own rollouts."""
    endpoints = upstream_to("http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3").endpoints
    chosen = {f"r{n}": choose(endpoints, f"r{n}") for n in range(200)}

    assert len(endpoints) == len({endpoint.settings.label for endpoint in chosen.values()})
    left = endpoints[:2]
    assert all(choose(left, name) is endpoint for name, endpoint in chosen.items() if endpoint in left)


def test_no_endpoint_is_an_error_that_says_what_to_do():
    """Nobody is sent to nowhere."""
    with pytest.raises(NoEngine, match="engines.endpoints"):
        choose([], "r1")


async def test_an_engine_is_asked_what_it_is(upstream_to):
    """Its kind and version; one that is away stays unknown."""
    async with fake_engine() as engine:
        upstream = upstream_to(engine.url, "http://127.0.0.1:9")
        await upstream.learn()
        there, away = upstream.endpoints

        assert ("vllm", "0.32.0") == (there.kind, there.version)
        assert ("auto", None) == (away.kind, away.version)
        assert [True, False] == [await upstream.is_healthy(endpoint) for endpoint in upstream.endpoints]
        assert await upstream.know(there) is None
        assert "e1 cannot be reached" in (await upstream.know(away)).message


async def test_an_engine_that_breaks_off_one_question_is_left_with_none(upstream_to):
    """Else the others would outlive the proxy's other parts, and leave their sockets to nobody."""

    async def breaking(request):
        if request.path == "/version":
            request.transport.abort()
        await asyncio.Event().wait()

    app = web.Application()
    app.router.add_get("/{path:.*}", breaking)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    upstream = upstream_to(f"http://127.0.0.1:{runner.addresses[0][1]}")
    (endpoint,) = upstream.endpoints
    fault = await upstream.know(endpoint)
    in_flight = endpoint.in_flight
    await runner.cleanup()

    assert "cannot be reached" in fault.message
    assert 0 == in_flight


async def test_however_many_calls_wait_an_engine_is_asked_once(upstream_to):
    """A thousand calls at start are no thousand questions."""
    async with fake_engine() as engine:
        upstream = upstream_to(engine.url)
        await asyncio.gather(*(upstream.know(upstream.endpoints[0]) for _ in range(50)))

    assert 6 == engine.questions


async def test_an_engine_that_comes_back_is_asked_again(upstream_to):
    """It may be another one by now, behind the same address."""
    async with fake_engine() as engine:
        upstream = upstream_to(engine.url)
        (endpoint,) = upstream.endpoints
        await upstream.know(endpoint)

        async def answering(request, body):
            request.transport.close()
            raise ConnectionResetError

        engine.answering = answering
        with pytest.raises(EngineBroke):
            async with upstream.send(endpoint, "POST", "/x", headers=(), body=b"{}"):
                pass
        engine.facts = {"/server_info": {"version": "0.5.23"}, "/model_info": {"weight_version": "1"}}
        await upstream.know(endpoint)

        assert ("sglang", "0.5.23") == (endpoint.kind, endpoint.version)


async def test_an_engine_that_is_still_loading_is_asked_again(upstream_to):
    """503 to everything says nothing of what it will be."""

    async def loading(request, body):
        return web.json_response({"error": "loading"}, status=503)

    async with fake_engine() as engine:
        engine.facts, engine.answering = {}, loading
        engine.unknown_status = 503
        upstream = upstream_to(engine.url)
        (endpoint,) = upstream.endpoints
        await upstream.know(endpoint)
        assert ("plain", False) == (endpoint.kind, endpoint.is_known)

        engine.facts = {"/version": {"version": "0.32.0"}}
        await upstream.know(endpoint)
        assert ("vllm", True) == (endpoint.kind, endpoint.is_known)


async def test_what_is_configured_wins(upstream_to, caplog):
    """Whatever the server looks like; that it looks otherwise is logged."""
    async with fake_engine() as engine:
        upstream = upstream_to(engine.url, kind="plain")
        await upstream.learn()

        assert "plain" == upstream.endpoints[0].kind
        assert "is configured as plain and looks like vllm" in caplog.text


async def test_faults_are_named_and_counted(upstream_to):
    """A refused connection is NoEngine, one that breaks before it answers EngineBroke."""
    async with fake_engine() as engine:

        async def answering(request, body):
            request.transport.close()
            raise ConnectionResetError

        engine.answering = answering
        upstream = upstream_to(engine.url, "http://127.0.0.1:9")
        alive, away = upstream.endpoints
        with pytest.raises(EngineBroke, match="e0 broke off"):
            async with upstream.send(alive, "POST", "/x", headers=(), body=b"{}"):
                pass
        with pytest.raises(NoEngine, match="e1 cannot be reached"):
            async with upstream.send(away, "POST", "/x", headers=(), body=b"{}"):
                pass

    assert (1, 0, 0) == (alive.faults, alive.in_flight, away.in_flight)
    assert "e1 cannot be reached" in away.last_fault


async def test_a_large_body_is_sent_whole(upstream_to):
    """A 200k-token prompt is a few megabytes; it is neither cut nor chunked."""
    body = b'{"prompt":"' + b"x" * 5_000_000 + b'"}'
    async with fake_engine() as engine:
        upstream = upstream_to(engine.url)
        async with upstream.send(upstream.endpoints[0], "POST", "/x", headers=(), body=body) as answer:
            await anext(answer.reads())

    assert 5_000_000 == len(engine.asked[0]["prompt"])
    assert str(len(body)) == engine.headers[0]["content-length"]
