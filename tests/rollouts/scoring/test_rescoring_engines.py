"""The engines of a scorer: failover, deadlines, and what they cannot score."""

import asyncio

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry
from tests.support.fakes import fake_engine
from tests.support.rescored import BELOW, Teacher
from tests.support.scoring import score

from proxy.config.engines import EndpointSettings, EnginesSettings
from proxy.errors import EngineError, EngineTimeout, EngineUnreachable, UnprocessableRequest
from proxy.rollouts.scoring.requests import OtherVocabulary, TooLong
from proxy.rollouts.scoring.rescoring import ScoringEngines, ScoringLimits
from proxy.telemetry.metrics import make_metrics
from proxy.upstream.client import Upstream

IDS = list(range(100, 130))
POSITIONS = [5, 6, 29]


@pytest.fixture
async def two():
    """Two fake engines, and a scorer of both."""
    async with fake_engine() as first, fake_engine() as second:
        for engine in (first, second):
            engine.respond = Teacher()
        endpoints = [EndpointSettings(url=engine.url, kind="vllm", max_in_flight=2) for engine in (first, second)]
        upstream = Upstream(EnginesSettings(endpoints=endpoints), make_metrics(CollectorRegistry()))
        yield first, second, ScoringEngines(upstream, ScoringLimits(timeout_s=50))
        await upstream.close()


async def test_the_positions_are_scored_by_one_of_the_engines(two):
    *_, engines = two
    endpoint, found = await engines.score(await engines.find_model(), IDS, POSITIONS, 0)

    assert [score(IDS)[at] - BELOW for at in POSITIONS] == pytest.approx(found.logprobs)
    assert endpoint in engines.upstream.endpoints


@pytest.mark.parametrize("fault", ["status", "hangs", "no scores", "closes"])
async def test_a_failed_request_is_retried_at_the_next_engine(two, fault):
    """Also one that does not respond in time: scoring changes nothing. Agents' calls are not ejected by it."""
    *faulty, engines = two
    model = await engines.find_model()
    engines.limits = ScoringLimits(timeout_s=2)
    first = engines.upstream.endpoints.index((await engines.score(model, IDS, POSITIONS, 0))[0])
    broken = faulty[first].respond

    async def respond(request, body):
        if request.path != "/v1/completions":
            return await broken(request, body)
        if fault == "closes":
            request.transport.close()
        if fault in ("hangs", "closes"):
            await asyncio.Event().wait()
        return web.json_response({"choices": []}, status=500 if fault == "status" else 200)

    faulty[first].respond = respond
    endpoint, _ = await engines.score(model, IDS, POSITIONS, 0)

    assert endpoint is engines.upstream.endpoints[1 - first]
    assert engines.upstream.endpoints[first].health.faults == 0


async def test_an_error_names_the_last_engine(two):
    """A hanging engine is a timeout with the setting's name."""
    first, second, engines = two
    model = await engines.find_model()
    first.respond.failing = second.respond.failing = 500
    with pytest.raises(EngineError, match=r"Engine .* did not score 30 tokens: the engine returned status 500"):
        await engines.score(model, IDS, POSITIONS, 0)
    engines.limits = ScoringLimits(timeout_s=0.2)
    first.hangs(lists_models=False), second.hangs(lists_models=False)
    with pytest.raises(EngineTimeout, match=r"within 0.2 s \(rescore.timeout_s\)"):
        await engines.score(model, IDS, POSITIONS, 0)
    with pytest.raises(EngineTimeout, match="did not list its models"):
        await engines.find_model()


async def test_engines_that_cannot_score_are_named_before_anything_is_scored(two):
    """A reachable engine decides: another type, another model. Unreachable ones are unreachable."""
    *_, engines = two
    engines.model = "other"
    with pytest.raises(UnprocessableRequest, match="does not serve model 'other'; it serves big"):
        await engines.find_model()
    plain = [EndpointSettings(url="http://127.0.0.1:9", kind="plain")]
    engines.upstream.replace(plain)
    with pytest.raises(UnprocessableRequest, match="engine kind 'plain' cannot score"):
        await engines.find_model()
    engines.upstream.replace([plain[0].model_copy(update={"kind": "vllm"})])
    with pytest.raises(EngineUnreachable, match="unreachable"):
        await engines.find_model()


async def test_what_no_engine_can_score_is_not_retried(two):
    """A sequence that is too long, and an id beyond the vocabulary."""
    first, second, engines = two
    model = await engines.find_model()
    first.respond.window = second.respond.window = 20
    engines._known.clear()
    with pytest.raises(TooLong):
        await engines.score(model, IDS, POSITIONS, 0)

    async def out_of_vocabulary(request, body):
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "big"}]})
        return web.json_response({"error": {"message": "Token id 7 is out of vocabulary"}}, status=400)

    first.respond = second.respond = out_of_vocabulary
    engines._known.clear()
    with pytest.raises(OtherVocabulary):
        await engines.score(model, IDS, POSITIONS, 0)


async def test_requests_wait_in_the_queue_of_their_endpoint(two):
    """At most `max_in_flight` of them are at an engine at the same time."""
    first, second, engines = two
    await asyncio.gather(*(engines.score("big", IDS, POSITIONS, 0) for _ in range(12)))

    assert max(first.respond.most_at_once, second.respond.most_at_once) <= 2
    assert len(first.respond.scored) + len(second.respond.scored) == 12
    assert "ScoringEngines" in repr(engines)


@pytest.mark.parametrize(("configured", "most"), [(None, 1), (6, 2)])
async def test_an_engine_with_adapters_gets_one_request_at_a_time_by_default(two, configured, most):
    """A vLLM with LoRA adapters on a CPU stops otherwise. The endpoint has `max_in_flight: 2`."""
    first, _, engines = two
    engines.upstream.replace([engines.upstream.endpoints[0].settings])
    first.respond.adapters = [{"id": "policy", "parent": "big"}]
    engines.limits = ScoringLimits(timeout_s=50, configured=configured)
    await engines.find_model()
    first.respond.together = asyncio.Barrier(most)
    await asyncio.gather(*(engines.score("big", IDS, POSITIONS, 0) for _ in range(8)))

    assert most == first.respond.most_at_once


async def test_a_model_that_no_endpoint_serves_is_an_error(two):
    """A rollout of a model that was removed since."""
    *_, engines = two
    endpoints = [endpoint.settings.model_copy(update={"models": ["new-*"]}) for endpoint in engines.upstream.endpoints]
    engines.upstream.replace(endpoints)
    policy = ScoringEngines(engines.upstream, ScoringLimits(), is_policy=True)
    with pytest.raises(UnprocessableRequest, match="No engine scores 'old'"):
        await policy.score("old", IDS, POSITIONS, 0)
