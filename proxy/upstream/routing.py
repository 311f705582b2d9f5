"""The order in which a call tries the endpoints, and when it fails over to the next one."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from proxy.errors import (
    EngineDisconnected,
    EngineError,
    EngineEventTooLong,
    EngineResponseTooLarge,
    EngineTimeout,
    EngineUnreachable,
    NotFound,
)
from proxy.upstream.endpoint import Endpoint

NONE_CONFIGURED: Final = "No engine is configured; set engines.endpoints or start with --engine URL."


def ranked(endpoints: Sequence[Endpoint], rollout_id: str) -> list[Endpoint]:
    """Return the endpoints in the order in which a rollout tries them.

    Rendezvous hashing: the first one stays the same while the endpoints do, so that its KV cache is reused. When an
    endpoint is removed, only its rollouts move, and they return with it. Ejected endpoints come last; if all are
    ejected, they are tried.

    Raises:
        EngineUnreachable: No endpoint is configured.
    """
    return sorted(_by_name(endpoints, rollout_id), key=lambda endpoint: endpoint.health.is_ejected)


def least_loaded(endpoints: Sequence[Endpoint], name: str) -> list[Endpoint]:
    """Return the endpoints in the order in which a call without a rollout tries them: by load, then by the hash of `name`.

    The load is the number of calls in flight and queued, divided by `max_in_flight`. An endpoint without a limit counts
    with the highest limit of the others.

    Raises:
        EngineUnreachable: No endpoint is configured.
    """
    greatest = max(endpoint.settings.max_in_flight or 1 for endpoint in endpoints) if endpoints else 1

    def load(endpoint: Endpoint) -> tuple[bool, float]:
        calls = endpoint.queue.in_flight + endpoint.queue.waiting
        return endpoint.health.is_ejected, calls / (endpoint.settings.max_in_flight or greatest)

    return sorted(_by_name(endpoints, name), key=load)


def serving(endpoints: Sequence[Endpoint], model: str) -> Sequence[Endpoint]:
    """Return the endpoints that list a model, and those whose models are unknown.

    If none lists it, return those without configured models: SGLang and llama.cpp answer calls of any model, vLLM responds
    with 404.

    Raises:
        NotFound: Every endpoint has configured models, and this is none of them.
    """
    if any(endpoint.lists(model) for endpoint in endpoints):
        return [endpoint for endpoint in endpoints if endpoint.lists(model) or endpoint.has_unknown_models]
    found = [endpoint for endpoint in endpoints if not endpoint.settings.models]
    if endpoints and not found:
        raise NotFound(f"The model {model!r} does not exist.", param="model")
    return found


def choose(endpoints: Sequence[Endpoint], rollout_id: str) -> Endpoint:
    """Return the first endpoint that a rollout tries now.

    Raises:
        EngineUnreachable: No endpoint is configured.
    """
    return ranked(endpoints, rollout_id)[0]


def preferred(endpoints: Sequence[Endpoint], rollout_id: str) -> Endpoint:
    """Return the endpoint of a rollout when none is ejected.

    Raises:
        EngineUnreachable: No endpoint is configured.
    """
    return _by_name(endpoints, rollout_id)[0]


def _by_name(endpoints: Sequence[Endpoint], rollout_id: str) -> list[Endpoint]:
    if not endpoints:
        raise EngineUnreachable(NONE_CONFIGURED, public=NONE_CONFIGURED)
    if len(endpoints) == 1:
        return list(endpoints)
    name = rollout_id.encode()

    def weight(endpoint: Endpoint) -> bytes:
        return blake2b(name, key=endpoint.settings.url.encode()[:64]).digest()

    return sorted(endpoints, key=weight, reverse=True)


# Statuses of a gateway, or of an engine that is loading or draining: another endpoint may answer.
UNAVAILABLE_STATUSES: Final = frozenset({502, 503, 504})


REDIRECTS: Final = frozenset({300, 301, 302, 303, 305, 307, 308})  # 304 answers a conditional request


class Failover:
    """The endpoints of one call, in routing order: at most `max_attempts` of them."""

    __slots__ = ("_left",)

    def __init__(self, endpoints: Sequence[Endpoint], max_attempts: int) -> None:
        self._left = list(endpoints[:max_attempts])

    def __repr__(self) -> str:
        return f"<Failover {[endpoint.label for endpoint in self._left]}>"

    @property
    def has_next(self) -> bool:
        """Whether another endpoint is left."""
        return bool(self._left)

    def next(self) -> Endpoint:
        """Return the next endpoint. Raises IndexError if none is left."""
        return self._left.pop(0)

    def check_status(self, endpoint: Endpoint, status: int) -> None:
        """Raise EngineDisconnected for a redirect, and, if an endpoint is left, for a response that it may answer better."""
        if status in REDIRECTS:
            raise EngineDisconnected(
                f"Engine {endpoint.label} responded with a redirect (status {status}), which is not followed; set the URL of "
                "the endpoint to its target",
                public="The engine's response is invalid: a redirect",
            )
        if status in UNAVAILABLE_STATUSES and self._left:
            raise EngineDisconnected(f"Engine {endpoint.label} returned status {status}")

    def can_retry(self, fault: EngineError) -> bool:
        """Return whether the call can be retried at the next endpoint after this error.

        Not after a timeout: the engine may still be processing the call, and two engines would. Not after a response that was
        too large, which another engine would send again.
        """
        return bool(self._left) and not isinstance(fault, EngineTimeout | EngineResponseTooLarge | EngineEventTooLong)
