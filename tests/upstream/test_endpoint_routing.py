"""Routing: the choice among endpoints."""

import pytest

from proxy.config.engines import EndpointSettings, EnginesSettings
from proxy.errors import EngineUnreachable, NotFound
from proxy.upstream.endpoint import choose, least_loaded, make_endpoint, preferred, ranked, serving

NAMES = [f"r{n}" for n in range(200)]


def make_endpoints(size, *limits):
    limits = limits or [None] * size
    settings = [
        EndpointSettings(url=f"http://127.0.0.1:{n}", max_in_flight=limit) for n, limit in enumerate(limits, start=1)
    ]
    return [make_endpoint(endpoint_settings, EnginesSettings()) for endpoint_settings in settings]


def eject(endpoint):
    while not endpoint.health.is_ejected:
        endpoint.health.failed(now=0)


def test_the_endpoint_of_a_rollout_depends_on_its_id_alone():
    """Every endpoint is used, and removing one moves only its own rollouts."""
    endpoints = make_endpoints(3)
    chosen = {name: choose(endpoints, name) for name in NAMES}

    assert set(chosen.values()) == set(endpoints)
    remaining = endpoints[:2]
    assert all(choose(remaining, name) is endpoint for name, endpoint in chosen.items() if endpoint in remaining)


def test_an_ejected_endpoint_is_ranked_last_and_only_its_rollouts_move():
    """The order of the others does not change, and its rollouts return with it."""
    endpoints = make_endpoints(3)
    before = {name: ranked(endpoints, name) for name in NAMES}
    ejected = endpoints[1]
    eject(ejected)

    for name, order in before.items():
        assert [*(endpoint for endpoint in order if endpoint is not ejected), ejected] == ranked(endpoints, name)
        assert order[0] is preferred(endpoints, name)
    ejected.health.answered()
    assert before == {name: ranked(endpoints, name) for name in NAMES}


def test_if_all_endpoints_are_ejected_the_ranking_is_unchanged():
    endpoints = make_endpoints(3)
    before = {name: ranked(endpoints, name) for name in NAMES}
    for endpoint in endpoints:
        eject(endpoint)

    assert before == {name: ranked(endpoints, name) for name in NAMES}


@pytest.mark.parametrize(
    ("limits", "expected"),
    [((None, None, None), (30, 30, 30)), ((8, 16, 32), (13, 26, 51)), ((10, 20, None), (18, 36, 36))],
)
def test_calls_without_a_rollout_go_to_the_least_loaded_endpoint(limits, expected):
    """In proportion to max_in_flight."""
    endpoints = make_endpoints(3, *limits)
    for n in range(90):
        least_loaded(endpoints, f"r{n}")[0].queue.in_flight += 1

    assert all(abs(endpoint.queue.in_flight - share) <= 1 for endpoint, share in zip(endpoints, expected, strict=True))


def test_queued_calls_count_as_load_and_an_ejected_endpoint_is_last():
    endpoints = make_endpoints(3)
    first, second, third = endpoints
    first.queue.in_flight, second.queue.waiting = 2, 1
    assert least_loaded(endpoints, "r1") == [third, second, first]
    eject(third)

    assert least_loaded(endpoints, "r1") == [second, first, third]


def test_without_endpoints_the_error_names_the_setting():
    for order in (choose, ranked, least_loaded, preferred):
        with pytest.raises(EngineUnreachable, match="engines.endpoints"):
            order([], "r1")


def endpoints_of(*models):
    """Return an endpoint for each entry: configured models (a list), those that the engine lists (a set), or None."""
    endpoints = make_endpoints(len(models))
    for endpoint, names in zip(endpoints, models, strict=True):
        if isinstance(names, list):
            endpoint.change(endpoint.settings.model_copy(update={"models": names}))
        elif names is not None:
            endpoint.models.names = frozenset(names)
    return endpoints


@pytest.mark.parametrize(
    ("models", "chosen"),
    [
        ((["a"], ["b"]), [0]),
        ((["a*"], ["b*"], ["*"]), [0, 2]),
        (({"a"}, {"b"}), [0]),
        (({"a", "b"}, ["b"], ["a"]), [0, 2]),
        (({"b"}, {"c"}), [0, 1]),  # vLLM responds with 404, other engines answer
        ((None, {"a"}), [0, 1]),
        ((None, ["b"]), [0]),
        ((["b", "c"], None, {"c"}), [1, 2]),
    ],
)
def test_a_model_is_served_by_the_endpoints_that_list_it(models, chosen):
    """Endpoints with unknown models serve it, too; if there are none, endpoints without configured models do."""
    endpoints = endpoints_of(*models)

    assert [endpoints[number] for number in chosen] == list(serving(endpoints, "a"))


def test_a_model_that_no_configured_endpoint_serves_is_not_found():
    with pytest.raises(NotFound, match="'a' does not exist"):
        serving(endpoints_of(["b"], ["c-*"]), "a")
