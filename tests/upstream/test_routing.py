"""The choice among endpoints."""

import pytest

from proxy.config.sections import EndpointSettings, EnginesSettings
from proxy.errors import EngineUnreachable
from proxy.upstream import choose, least_loaded, preferred, ranked
from proxy.upstream.endpoint import make_endpoint

NAMES = [f"r{n}" for n in range(200)]


def fleet(size, *limits):
    limits = limits or [None] * size
    settings = [
        EndpointSettings(url=f"http://127.0.0.1:{n}", max_in_flight=limit) for n, limit in enumerate(limits, start=1)
    ]
    return [make_endpoint(one, EnginesSettings()) for one in settings]


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
        assert order[0] is preferred(endpoints, name)
    out.health.answered()
    assert before == {name: ranked(endpoints, name) for name in NAMES}


def test_where_all_are_ejected_each_rollout_is_tried_at_its_own():
    """Nobody is turned away for what might be over."""
    endpoints = fleet(3)
    before = {name: ranked(endpoints, name) for name in NAMES}
    for endpoint in endpoints:
        eject(endpoint)

    assert before == {name: ranked(endpoints, name) for name in NAMES}


@pytest.mark.parametrize(
    ("limits", "expected"),
    [((None, None, None), (30, 30, 30)), ((8, 16, 32), (13, 26, 51)), ((10, 20, None), (18, 36, 36))],
)
def test_the_least_loaded_gets_the_next_call_of_no_rollout(limits, expected):
    """Each gets its share, by how many it may have at once."""
    endpoints = fleet(3, *limits)
    for n in range(90):
        least_loaded(endpoints, f"r{n}")[0].queue.in_flight += 1

    assert all(abs(one.queue.in_flight - share) <= 1 for one, share in zip(endpoints, expected, strict=True))


def test_calls_that_wait_are_load_and_an_ejected_endpoint_is_the_last():
    """However idle it is."""
    endpoints = fleet(3)
    first, second, third = endpoints
    first.queue.in_flight, second.queue.waiting = 2, 1
    assert [third, second, first] == least_loaded(endpoints, "r1")
    eject(third)

    assert [second, first, third] == least_loaded(endpoints, "r1")


def test_no_endpoint_is_an_error_that_says_what_to_do():
    """Nobody is sent to nowhere."""
    for order in (choose, ranked, least_loaded, preferred):
        with pytest.raises(EngineUnreachable, match="engines.endpoints"):
            order([], "r1")
