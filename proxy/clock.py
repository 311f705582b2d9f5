"""Wall time, monotonic time and random bytes behind one protocol, so that tests can replace them.

No other module reads the time.
"""

import os
import time
from typing import Protocol

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PAIRS = [first + second for first in _CROCKFORD for second in _CROCKFORD]


class Clock(Protocol):
    """A source of time and random bytes."""

    def now(self) -> float:
        """Return the Unix time in seconds."""
        ...

    def now_ms(self) -> int:
        """Return the Unix time in milliseconds."""
        ...

    def monotonic(self) -> float:
        """Return seconds that never decrease. Only differences are meaningful."""
        ...

    def entropy(self, count: int, /) -> bytes:
        """Return `count` cryptographically secure random bytes."""
        ...


class SystemClock:
    """The clock of the operating system."""

    # Built-in functions, without a Python frame: every call reads the time a dozen times.
    now = staticmethod(time.time)  # noqa: TID251 - here and nowhere else
    monotonic = staticmethod(time.monotonic)
    entropy = staticmethod(os.urandom)

    def now_ms(self) -> int:
        """Return the Unix time in milliseconds."""
        return int(time.time() * 1000)  # noqa: TID251 - here and nowhere else


def new_id(clock: Clock) -> str:
    """Return a ULID: 48 bits of Unix milliseconds and 80 random bits, as 26 characters that sort by time."""
    number = clock.now_ms() << 80 | int.from_bytes(clock.entropy(10), "big")
    text = ""
    for shift in range(120, -10, -10):
        text += _PAIRS[number >> shift & 1023]
    return text
