"""The ejection of an endpoint after consecutive failures, for a duration that doubles each time."""

from dataclasses import dataclass

_MAX_DOUBLINGS = 30


@dataclass(slots=True)
class EjectionState:
    """The failures and the ejection of one endpoint.

    `faults` are consecutive; `ejections` counts those since the last answered call. Times are those of the event loop.
    """

    eject_after: int
    base_ejection_s: float
    max_ejection_s: float
    faults: int = 0
    ejections: int = 0
    ejected_until: float | None = None

    @property
    def is_ejected(self) -> bool:
        """Whether the endpoint is ejected: until a health check after the end of the ejection passes, or a call is answered."""
        return self.ejected_until is not None

    def failed(self, now: float) -> None:
        """Count a failed call or health check.

        Failures of calls that were in flight at the ejection do not prolong it.
        """
        self.faults += 1
        if self.faults < self.eject_after or (self.ejected_until is not None and now < self.ejected_until):
            return
        self.ejected_until = now + min(
            self.base_ejection_s * 2 ** min(self.ejections, _MAX_DOUBLINGS), self.max_ejection_s
        )
        self.ejections += 1

    def answered(self) -> None:
        """Reset the state: a call was answered."""
        self.faults, self.ejections, self.ejected_until = 0, 0, None

    def passed(self, now: float) -> None:
        """End an ejection whose duration is over: a health check passed.

        One more failure then ejects the endpoint for longer.

        An engine whose calls fail while its health checks pass is thereby tried less and less often.
        """
        if self.ejected_until is None or now >= self.ejected_until:
            self.ejected_until = None
            self.faults = min(self.faults, self.eject_after - 1)
