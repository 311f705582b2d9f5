"""The choice among endpoints: which one a call is tried at, and which ones after it.

Holds pure functions of endpoints and of the name of a rollout. It must not send anything.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from proxy.errors import NoEngine
from proxy.upstream.endpoint import Endpoint

NONE_CONFIGURED: Final = "no engine is configured; set engines.endpoints or start with --engine URL"


def ranked(endpoints: Sequence[Endpoint], rollout_id: str) -> list[Endpoint]:
    """The endpoints in the order in which a rollout is tried at them. Raises NoEngine if there is none.

    The first is always the same one while the endpoints are the same, so that its KV cache is reused. Rendezvous hashing:
    when an endpoint goes, only its rollouts move, and they come back with it. Those that are ejected come last: where all
    are, they are tried anyway.
    """
    return sorted(_by_name(endpoints, rollout_id), key=lambda endpoint: endpoint.health.is_ejected)


def least_loaded(endpoints: Sequence[Endpoint], name: str) -> list[Endpoint]:
    """The endpoints in the order in which a call is tried that has no rollout of its own, so that no cache is lost.

    Calls in flight and waiting for each that may be in flight; an endpoint without a limit counts as one with the greatest
    of the others. Among equals its name decides. Raises NoEngine if there is none.
    """
    greatest = max(endpoint.settings.max_in_flight or 1 for endpoint in endpoints) if endpoints else 1

    def load(endpoint: Endpoint) -> tuple[bool, float]:
        calls = endpoint.turns.in_flight + endpoint.turns.waiting
        return endpoint.health.is_ejected, calls / (endpoint.settings.max_in_flight or greatest)

    return sorted(_by_name(endpoints, name), key=load)


def choose(endpoints: Sequence[Endpoint], rollout_id: str) -> Endpoint:
    """The endpoint for a rollout now: the first at which it is tried. Raises NoEngine if there is none."""
    return ranked(endpoints, rollout_id)[0]


def own(endpoints: Sequence[Endpoint], rollout_id: str) -> Endpoint:
    """The endpoint for a rollout when all are well. Raises NoEngine if there is none."""
    return _by_name(endpoints, rollout_id)[0]


def _by_name(endpoints: Sequence[Endpoint], rollout_id: str) -> list[Endpoint]:
    if not endpoints:
        raise NoEngine(NONE_CONFIGURED, public=NONE_CONFIGURED)
    if len(endpoints) == 1:
        return list(endpoints)
    name = rollout_id.encode()

    def weight(endpoint: Endpoint) -> bytes:
        return blake2b(name, key=endpoint.settings.url.encode()[:64]).digest()

    return sorted(endpoints, key=weight, reverse=True)
