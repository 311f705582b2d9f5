"""Authentication of the control API."""

import re

import pytest

from proxy.api.control import CONTROL_ROUTES

OPEN = {"/health", "/healthz", "/ready", "/readyz"}
ROUTES = [(route.method.upper(), re.sub(r"\{\w+\}", "r1", route.path)) for route in CONTROL_ROUTES]


@pytest.fixture
def sections():
    return {"agents": {"api_keys": ["agent-key"]}, "control": {"api_keys": ["control-key"]}}


async def test_every_route_requires_a_control_key(proxy):
    """Without a key it is 401, with an agent's key 403. Health and readiness are open, since load balancers have no
    keys.
    """
    for method, path in ROUTES:
        target = path if path != "/events" else "/events?unknown=1"  # otherwise the stream has no end
        without_key = await proxy.call(method, target)
        agent = await proxy.call(method, target, headers={"Authorization": "Bearer agent-key"})
        control = await proxy.call(method, target, headers={"Authorization": "Bearer control-key"})

        if path in OPEN:
            assert (without_key.status, agent.status, control.status) == (200, 200, 200), path
        else:
            assert (without_key.status, agent.status) == (401, 403), (method, path)
            assert control.status not in (401, 403), (method, path)


async def test_a_minted_key_is_403_on_the_control_api(proxy):
    """This includes its own rollout."""
    opened = await proxy.post("/rollouts", {"rollout_id": "r1"}, headers={"X-Api-Key": "control-key"})
    response = await proxy.get("/rollouts/r1", headers={"Authorization": f"Bearer {opened.json['api_key']}"})

    assert response.status == 403


async def test_a_control_key_is_401_on_the_model_api(proxy):
    headers = {"Authorization": "Bearer control-key"}

    assert (await proxy.post("/v1/chat/completions", {"messages": []}, headers=headers)).status == 401
