"""The choice among endpoints."""

import pytest

from proxy.config import EndpointSettings, EnginesSettings
from proxy.errors import NoEngine
from proxy.upstream import choose, own, ranked
from proxy.upstream.endpoint import make_endpoint

NAMES = [f"r{n}" for n in range(200)]


def fleet(size):
    return [make_endpoint(EndpointSettings(url=f"http://127.0.0.1:{n}"), EnginesSettings()) for n in range(1, size + 1)]


def eject(endpoint):
    while not endpoint.health.is_ejected:
        endpoint.health.failed(now=0)


def test_a_rollout_stays_with_its_endpoint():
    """The choice depends on the rollout alone, uses every endpoint, and losing one moves only its own rollouts."""
    endpoints = fleet(3)
    chosen = {name: choose(endpoints, name) for name in NAMES}

    assert set(endpoints) == set(chosen.values())
    left = endpoints[:2]
    assert all(choose(left, name) is endpoint for name, endpoint in chosen.items() if endpoint in left)


def test_an_ejected_endpoint_is_passed_over_and_only_its_rollouts_move():
    """It comes last, the order of the others stays, and its rollouts come back with it."""
    endpoints = fleet(3)
    before = {name: ranked(endpoints, name) for name in NAMES}
    out = endpoints[1]
    eject(out)

    for name, order in before.items():
        assert [*(one for one in order if one is not out), out] == ranked(endpoints, name)
        assert order[0] is own(endpoints, name)
    out.health.answered()
    assert before == {name: ranked(endpoints, name) for name in NAMES}


def test_where_all_are_ejected_each_rollout_is_tried_at_its_own():
    """Nobody is turned away for what might be over."""
    endpoints = fleet(3)
    before = {name: ranked(endpoints, name) for name in NAMES}
    for endpoint in endpoints:
        eject(endpoint)

    assert before == {name: ranked(endpoints, name) for name in NAMES}


def test_no_endpoint_is_an_error_that_says_what_to_do():
    """Nobody is sent to nowhere."""
    with pytest.raises(NoEngine, match="engines.endpoints"):
        choose([], "r1")
