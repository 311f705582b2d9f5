"""Requests to the configured rollout servers."""

import asyncio
import gzip

import pytest
from tests.support.rollout_servers import rollout_server

from proxy.api.compat.osmosis.dispatch import RolloutServers, ServerFault
from proxy.config.sections import OsmosisSettings
from proxy.errors import UnprocessableRequest


@pytest.fixture
async def runner():
    async with rollout_server() as runner:
        yield runner


@pytest.fixture
async def servers(runner):
    named = {"one": {"url": runner.url, "api_key": "secret"}, "two": {"url": runner.url}}
    servers = RolloutServers(OsmosisSettings.model_validate({"servers": named}))
    yield servers
    await servers.close()


@pytest.mark.parametrize(("name", "key"), [("one", "Bearer secret"), ("two", None)])
async def test_a_request_has_the_key_of_its_server_if_one_is_configured(servers, runner, name, key):
    runner.response_body = {"rollout_id": "r1"}

    assert {"rollout_id": "r1"} == await servers.post(name, "/rollout", {"a": 1})
    assert (key, {"a": 1}) == (runner.headers[0].get("authorization"), runner.requests[0])


@pytest.mark.parametrize(
    ("status", "response_body", "category"),
    [
        (429, {}, "rate_limited"),
        (503, {}, "internal_error"),
        (404, {}, "validation_error"),
        (200, [], "internal_error"),
    ],
)
async def test_an_error_response_has_an_error_category_and_its_status(servers, runner, status, response_body, category):
    """A response with status 200 that is not an object has no status."""
    runner.status, runner.response_body = status, response_body
    with pytest.raises(ServerFault) as fault:
        await servers.post("one", "/rollout", {})

    assert (category, None if status == 200 else status) == (fault.value.category, fault.value.status)


async def test_a_response_that_is_not_json_is_an_internal_error(servers, runner):
    """A load balancer may return HTML."""
    runner.raw = b"<html>"
    with pytest.raises(ServerFault, match="did not return a JSON object") as fault:
        await servers.post("one", "/rollout", {})

    assert "internal_error" == fault.value.category


async def test_an_unknown_server_name_is_rejected_with_the_configured_names(servers):
    with pytest.raises(UnprocessableRequest, match="osmosis.servers: one, two"):
        servers.named("http://elsewhere")
    without_servers = RolloutServers(OsmosisSettings())
    with pytest.raises(UnprocessableRequest, match="osmosis.servers: none"):
        without_servers.named("one")
    await without_servers.close()

    assert ("<RolloutServers one, two; 0 requests>", "<RolloutServers none; 0 requests>") == (
        repr(servers),
        repr(without_servers),
    )


async def test_close_cancels_waiting_dispatches(servers):
    never = asyncio.Event()

    async def wait():
        await never.wait()

    task = servers.start(wait())
    await asyncio.sleep(0)
    await servers.close()

    assert task.cancelled()


@pytest.mark.parametrize("raw", [b" " * (2**23 + 1), b"[" + b"{}," * 500_000 + b"1]"])
async def test_a_response_is_limited_in_bytes_and_values(servers, runner, raw):
    """It is no JSON object if it has too many values."""
    runner.raw = raw
    with pytest.raises(ServerFault, match="more than 8388608 bytes|not return a JSON object") as fault:
        await servers.post("one", "/rollout", {})

    assert "internal_error" == fault.value.category


async def test_no_compressed_response_is_requested_or_decompressed(servers, runner):
    runner.raw = gzip.compress(b"{}")
    with pytest.raises(ServerFault, match="not return a JSON object"):
        await servers.post("one", "/rollout", {})

    assert "identity" == runner.headers[0]["accept-encoding"]
