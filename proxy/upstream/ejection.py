"""When an endpoint is passed over: after some faults in a row, for a time that doubles.

Holds the counting, pure: times are given. It must not ask an engine anything, nor know what a fault was.
"""

from dataclasses import dataclass

_MOST_DOUBLINGS = 30


@dataclass(slots=True)
class EjectionState:
    """How one endpoint stands. `faults` are those in a row; `ejections` those since it last answered a call well."""

    eject_after: int
    base_ejection_s: float
    max_ejection_s: float
    faults: int = 0
    ejections: int = 0
    ejected_until: float | None = None

    @property
    def is_ejected(self) -> bool:
        """Whether it is passed over: until a check finds it well, once its time is over, or it answers a call."""
        return self.ejected_until is not None

    def failed(self, now: float) -> None:
        """A call or a check failed. Faults of calls that were on their way when it was ejected prolong nothing."""
        self.faults += 1
        if self.faults < self.eject_after or (self.ejected_until is not None and now < self.ejected_until):
            return
        self.ejected_until = now + min(
            self.base_ejection_s * 2 ** min(self.ejections, _MOST_DOUBLINGS), self.max_ejection_s
        )
        self.ejections += 1

    def answered(self) -> None:
        """A call was answered: nothing is held against it any more."""
        self.faults, self.ejections, self.ejected_until = 0, 0, None

    def passed(self, now: float) -> None:
        """A check was good: it may be called again once its time is over, and one fault ejects it for longer.

        An engine whose calls fail and whose checks are good is so tried less and less often.
        """
        if self.ejected_until is None or now >= self.ejected_until:
            self.ejected_until = None
            self.faults = min(self.faults, self.eject_after - 1)
