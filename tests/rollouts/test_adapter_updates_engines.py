"""Requests that load and unload LoRA adapters."""

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry
from tests.support.adapters_of_engines import LoraRoutes
from tests.support.fakes import settings_for

from proxy.errors import EngineError
from proxy.rollouts.adapter_updates import load_adapter, unload_adapter
from proxy.telemetry.metrics import make_metrics
from proxy.upstream.client import Upstream


@pytest.fixture
async def upstream(engine):
    """The endpoints: only the fake engine."""
    upstream = Upstream(settings_for(engine.url).engines, make_metrics(CollectorRegistry()))
    yield upstream
    await upstream.close()


async def test_an_adapter_is_loaded_in_place_of_the_one_with_its_name(engine, upstream):
    routes = LoraRoutes(engine)
    (endpoint,) = upstream.endpoints
    for path in ("/1", "/2"):
        await load_adapter(upstream, endpoint, "policy", path)

    assert routes.adapters == {"policy": "/2"}
    assert engine.requests[-1] == {"lora_name": "policy", "lora_path": "/2", "load_inplace": True}


async def test_an_engine_that_cannot_load_in_place_unloads_the_adapter_first(engine, upstream):
    routes = LoraRoutes(engine)
    routes.loads_in_place = False
    for path in ("/1", "/2"):
        await load_adapter(upstream, upstream.endpoints[0], "policy", path)

    assert routes.changes == [("policy", "/1"), ("policy", None), ("policy", "/2")]


async def test_unloading_an_adapter_that_is_not_loaded_is_no_error(engine, upstream):
    routes = LoraRoutes(engine)
    routes.adapters = {"policy": "/1"}
    for _ in range(2):
        await unload_adapter(upstream, upstream.endpoints[0], "policy")

    assert routes.adapters == {}


async def test_the_models_of_an_endpoint_are_listed_again_after_a_change(engine, upstream):
    LoraRoutes(engine)
    (endpoint,) = upstream.endpoints
    assert await upstream.served_models(endpoint, "policy") is None
    await load_adapter(upstream, endpoint, "policy", "/1")
    assert await upstream.served_models(endpoint, "policy") == {"policy", "/1"}


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ({"detail": "Not Found"}, "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        ({"error": {"message": "No adapter found"}}, "returned 404: No adapter found"),
        ([1], "returned 404: [1]"),
        ("text", "returned 404: text"),
    ],
)
async def test_an_error_has_the_message_of_the_engine(engine, upstream, response, message):
    """Without LoRA, vLLM has no such route."""

    async def respond(request, body):
        return (
            web.Response(text=response, status=404) if response == "text" else web.json_response(response, status=404)
        )

    engine.respond = respond
    with pytest.raises(EngineError, match="Engine fake did not load the adapter") as caught:
        await load_adapter(upstream, upstream.endpoints[0], "policy", "/1")

    assert message in caught.value.message


async def test_an_error_of_unloading_is_raised(engine, upstream):
    with pytest.raises(EngineError, match="did not unload the adapter: /v1/unload_lora_adapter returned 500"):
        await unload_adapter(upstream, upstream.endpoints[0], "policy")
