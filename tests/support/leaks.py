"""What a test leaves open: sockets, files, pipes and event loops that nothing refers to."""

import gc
import os
import sys
from pathlib import Path

from aiohttp import web_app

_DESCRIPTORS = Path("/proc/self/fd")


def open_files() -> frozenset[str]:
    """Return what is open in this process. A socket or pipe has another name each time; empty without /proc."""
    if not _DESCRIPTORS.exists():
        return frozenset()
    found = set()
    for descriptor in os.listdir(_DESCRIPTORS):  # noqa: PTH208 - Path takes ten times as long, after each test
        try:
            found.add(f"{descriptor} {os.readlink(f'{_DESCRIPTORS}/{descriptor}')}")  # noqa: PTH115
        except OSError:  # the descriptor of the listing itself
            continue
    return frozenset(found)


def collect() -> list[str]:
    """Collect garbage; return the warnings that it raised, for example about unclosed sockets."""
    found: list[str] = []
    web_app._cached_build_middleware.cache_clear()  # it keeps the last 1,024 applications
    earlier = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: found.append(f"{unraisable.exc_value} (in {unraisable.object!r})")
    try:
        gc.collect()
    finally:
        sys.unraisablehook = earlier
    return found


class Leaks:
    """Finds what tests leave open, each at its end.

    A collection after each test would take a third of the time of all tests. So there is one only after a test since which
    more is open, and one after each file, for what is not open to the system: clients that were never connected.
    """

    def __init__(self) -> None:
        self._known = open_files()

    def after_test(self, *, is_last_of_file: bool) -> list[str]:
        """Return what the test that has just ended leaked. What is still in use belongs to a fixture of a wider scope."""
        now = open_files()
        found = []
        if is_last_of_file or not now <= self._known:
            found = collect()
            now = open_files()
        self._known = now
        return found
