"""The clock: wall time, monotonic time and chance, as one argument.

Holds the `Clock` protocol's one real implementation; tests bring their own. Nothing else in the project reads the time.
"""

import os
import time
from typing import Protocol

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


class Clock(Protocol):
    """Where time and chance come from."""

    def now(self) -> float:
        """Unix seconds."""
        ...

    def now_ms(self) -> int:
        """Unix milliseconds."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go back; only differences mean anything."""
        ...

    def entropy(self, count: int) -> bytes:
        """Random bytes that nobody can guess."""
        ...


class SystemClock:
    """The machine's own."""

    def now(self) -> float:
        """Unix seconds."""
        return time.time()  # noqa: TID251 - here and nowhere else

    def now_ms(self) -> int:
        """Unix milliseconds."""
        return int(time.time() * 1000)  # noqa: TID251 - here and nowhere else

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return time.monotonic()

    def entropy(self, count: int) -> bytes:
        """From the operating system."""
        return os.urandom(count)


def new_id(clock: Clock) -> str:
    """A ULID: 48 bits of unix milliseconds, then 80 random bits; 26 characters that sort by time."""
    number = clock.now_ms() << 80 | int.from_bytes(clock.entropy(10), "big")
    return "".join(_CROCKFORD[number >> shift & 31] for shift in range(125, -5, -5))
