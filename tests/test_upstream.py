"""The engines' endpoints: the choice among them, and the naming of their faults."""

import pytest
from fakes import fake_engine
from prometheus_client import CollectorRegistry

from proxy.config import EnginesSettings
from proxy.errors import EngineBroke, NoEngine
from proxy.metrics import make_metrics
from proxy.upstream import Upstream, choose


@pytest.fixture
async def upstream_to():
    made = []

    def make(*urls):
        settings = EnginesSettings(endpoints=[{"url": url, "name": f"e{n}"} for n, url in enumerate(urls)])
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


async def test_the_version_is_asked_of_the_engine(upstream_to):
    """vLLM tells it at /version; an engine that is away has none."""
    async with fake_engine() as engine:
        upstream = upstream_to(engine.url, "http://127.0.0.1:9")
        await upstream.learn()

        assert ["0.32.0", None] == [endpoint.version for endpoint in upstream.endpoints]
        assert [True, False] == [await upstream.is_healthy(endpoint) for endpoint in upstream.endpoints]


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
