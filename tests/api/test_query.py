"""Who may use the control API."""

import re

import pytest

from proxy.api.control import CONTROL_ROUTES

OPEN = {"/health", "/ready"}
ROUTES = [(route.method, re.sub(r"\{\w+:\[\^/\]\+\}", "r1", route.path)) for route in CONTROL_ROUTES]


@pytest.fixture
def sections():
    return {"agents": {"api_keys": ["agent-key"]}, "control": {"api_keys": ["control-key"]}}


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_every_route_needs_a_control_key(proxy, method, path):
    """None: 401. An agent's: 403. Health and readiness are open: load balancers have no keys."""
    asked = path if path != "/events" else "/events?unknown=1"  # else it would never end
    bare = await proxy.call(method, asked)
    agent = await proxy.call(method, asked, headers={"Authorization": "Bearer agent-key"})
    control = await proxy.call(method, asked, headers={"Authorization": "Bearer control-key"})

    if path in OPEN:
        assert (200, 200, 200) == (bare.status, agent.status, control.status)
    else:
        assert (401, 403) == (bare.status, agent.status)
        assert control.status not in (401, 403)


async def test_a_minted_key_opens_nothing_of_the_control_api(proxy):
    """Not even its own rollout's."""
    opened = await proxy.post("/rollouts", {"rollout_id": "r1"}, headers={"X-Api-Key": "control-key"})
    response = await proxy.get("/rollouts/r1", headers={"Authorization": f"Bearer {opened.json['api_key']}"})

    assert 403 == response.status


async def test_a_control_key_calls_no_models(proxy):
    """The APIs have keys of their own."""
    headers = {"Authorization": "Bearer control-key"}

    assert 401 == (await proxy.post("/v1/chat/completions", {"messages": []}, headers=headers)).status
