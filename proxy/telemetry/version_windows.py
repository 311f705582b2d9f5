"""Windows of policy versions as values of a label; only the newest exist.

A window is ten versions, for example `120-129`. Each policy has the ten newest windows; rewards of older versions count as
`older`, rewards of versions that are not numbers as `unknown`. Windows are ordered by their versions, so that all workers end
the same windows: the sum of a series over workers would fall if only some of them ended it. If a new epoch begins, or a version
below all windows is announced, another run began: the windows of the earlier run end, and its rewards count as `older`.
"""

from collections.abc import Callable, Iterable, Mapping
from threading import Lock
from typing import Final

from proxy.trajectory.facts import number_of

WIDTH: Final = 10
KEPT: Final = 10
UNKNOWN: Final = "unknown"
OLDER: Final = "older"


class VersionWindows:
    """The windows of each policy in this process. `begin` starts their series at 0, `end` removes them.

    Hold `lock` from the choice of a window until its series is changed. `announced` returns the announced epoch and version of
    policies.
    """

    def __init__(self, begin: Callable[[str, str], None], end: Callable[[str, str], None]) -> None:
        self.lock = Lock()
        self.announced: Callable[[], Mapping[str, tuple[int, str | None]]] = dict
        self._begin = begin
        self._end = end
        self._live: dict[str, set[int]] = {}
        self._epochs: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"<VersionWindows {self._live}>"

    def of(self, policy: str, version: str | None, epoch: int | None = None) -> str:
        """Return the window of a version of an epoch, by default of the present one.

        Starts its series and the series of the next window, so that they begin at 0.
        """
        number = number_of(version)
        if number is None:
            return UNKNOWN
        self.settle()
        if epoch is not None:
            self._reach(policy, epoch)
            if epoch < self._epochs[policy]:
                return OLDER
        window = number // WIDTH
        self._start(policy, {window, window + 1})
        return label_of(window) if window in self._live[policy] else OLDER

    def adopt(self, policy: str, label: str) -> None:
        """Start the window of a process that this one replaces."""
        window = window_of(label)
        if window is not None:
            self._start(policy, {window})

    def has(self, policy: str, label: str) -> bool:
        """Return whether a label has series."""
        window = window_of(label)
        return window is None or window in self._live.get(policy, ())

    def settle(self) -> None:
        """End the windows of an earlier run."""
        for policy, (epoch, version) in self.announced().items():
            self._reach(policy, epoch)
            number, live = number_of(version), self._live.get(policy)
            if live and number is not None and number // WIDTH < min(live):
                self._stop(policy, list(live))

    def _reach(self, policy: str, epoch: int) -> None:
        """End the windows of epochs before this one; if it is the first known, keep the windows of the worker before."""
        if epoch > self._epochs.setdefault(policy, epoch):
            self._epochs[policy] = epoch
            self._stop(policy, list(self._live.get(policy, ())))

    def _start(self, policy: str, windows: set[int]) -> None:
        """Start the windows that are now among the newest, and end the windows that no longer are."""
        live = self._live.setdefault(policy, set())
        kept = set(sorted(live | windows)[-KEPT:])
        self._stop(policy, live - kept)
        for window in sorted(kept - live):
            live.add(window)
            self._begin(policy, label_of(window))

    def _stop(self, policy: str, windows: Iterable[int]) -> None:
        for window in windows:
            self._live[policy].discard(window)
            self._end(policy, label_of(window))


def label_of(window: int) -> str:
    """Return the label of a window."""
    return f"{window * WIDTH}-{window * WIDTH + WIDTH - 1}"


def window_of(label: str) -> int | None:
    """Return the window with this label; None for other labels."""
    number = number_of(label.partition("-")[0])
    return None if number is None else number // WIDTH


def newest(labels: Iterable[str]) -> set[str]:
    """Return the labels of the newest windows, and all labels that are not windows."""
    windows = {label: window_of(label) for label in labels}
    numbers = sorted({window for window in windows.values() if window is not None})[-KEPT:]
    return {label for label, window in windows.items() if window is None or window in numbers}
