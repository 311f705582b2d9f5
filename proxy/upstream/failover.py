"""Failover: the endpoints of one call, and when the next one is tried."""

from collections.abc import Sequence
from typing import Final

from proxy.errors import EngineDisconnected, EngineError, EngineTimeout
from proxy.upstream.endpoint import Endpoint

# Statuses of a gateway, or of an engine that is loading or draining: another endpoint may answer.
UNAVAILABLE_STATUSES: Final = frozenset({502, 503, 504})


class Failover:
    """The endpoints of one call, in routing order: at most `max_attempts` of them."""

    __slots__ = ("_left",)

    def __init__(self, endpoints: Sequence[Endpoint], max_attempts: int) -> None:
        self._left = list(endpoints[:max_attempts])

    def __repr__(self) -> str:
        return f"<Failover {[endpoint.settings.label for endpoint in self._left]}>"

    @property
    def has_next(self) -> bool:
        """Whether another endpoint is left."""
        return bool(self._left)

    def next(self) -> Endpoint:
        """Return the next endpoint. Raises IndexError if none is left."""
        return self._left.pop(0)

    def check_status(self, endpoint: Endpoint, status: int) -> None:
        """Raise EngineDisconnected for a response that another endpoint may answer better, if one is left."""
        if status in UNAVAILABLE_STATUSES and self._left:
            raise EngineDisconnected(f"Engine {endpoint.settings.label} returned status {status}")

    def can_retry(self, fault: EngineError) -> bool:
        """Return whether the call can be retried at the next endpoint after this error.

        Not after a timeout: the engine may still be processing the call, and two engines would.
        """
        return bool(self._left) and not isinstance(fault, EngineTimeout)
