"""The configured rollout servers."""

import asyncio

import pytest
from rollout_servers import rollout_server

from proxy.api.compat.osmosis.servers import RolloutServers, ServerFault
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
async def test_a_server_gets_its_own_key(servers, runner, name, key):
    """Or none, if it wants none."""
    runner.response_body = {"rollout_id": "r1"}

    assert {"rollout_id": "r1"} == await servers.post(name, "/rollout", {"a": 1})
    assert (key, {"a": 1}) == (runner.headers[0].get("authorization"), runner.requests[0])


@pytest.mark.parametrize(
    ("status", "told", "category"),
    [
        (429, {}, "rate_limited"),
        (503, {}, "internal_error"),
        (404, {}, "validation_error"),
        (200, [], "internal_error"),
    ],
)
async def test_a_servers_fault_has_a_category_and_its_status(servers, runner, status, told, category):
    """An answer that is no object has no status to tell: it was one of success."""
    runner.status, runner.response_body = status, told
    with pytest.raises(ServerFault) as fault:
        await servers.post("one", "/rollout", {})

    assert (category, None if status == 200 else status) == (fault.value.category, fault.value.status)


async def test_an_answer_that_nobody_can_read_is_a_fault(servers, runner):
    """A page of a balancer's, say."""
    runner.raw = b"<html>"
    with pytest.raises(ServerFault, match="did not return a JSON object") as fault:
        await servers.post("one", "/rollout", {})

    assert "internal_error" == fault.value.category


async def test_a_server_of_another_name_is_refused(servers):
    """The refusal names the known ones; with none there is nothing to name."""
    with pytest.raises(UnprocessableRequest, match="osmosis.servers: one, two"):
        servers.named("http://elsewhere")
    nobody = RolloutServers(OsmosisSettings())
    with pytest.raises(UnprocessableRequest, match="osmosis.servers: none"):
        nobody.named("one")
    await nobody.close()

    assert ("<RolloutServers one, two; 0 requests>", "<RolloutServers none; 0 requests>") == (
        repr(servers),
        repr(nobody),
    )


async def test_closing_ends_what_waits(servers):
    """A rollout of ten minutes holds no stop up."""
    never = asyncio.Event()

    async def wait():
        await never.wait()

    task = servers.start(wait())
    await asyncio.sleep(0)
    await servers.close()

    assert task.cancelled()
