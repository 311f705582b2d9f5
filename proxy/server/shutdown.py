"""The wish that this process stops: heard at any time, from its start on.

Holds what a first wish does (it ends what is being started, or the waiting) and what a second one does (it ends the process
at once). What stops, and in which order, is the business of whoever waits.
"""

import asyncio
import gc
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_COLLECT_EVERY: Final = (
    10_000  # containers more than were freed (Python: 700); of a call's, reference counts free nearly all
)


class ShutdownSignal:
    """Whether this process was told to stop. `wait` once everything has been started."""

    def __init__(self) -> None:
        self.is_told = False
        self._told = asyncio.Event()
        self._starting = asyncio.current_task()

    def tell(self) -> None:
        """Stop. What is still being started is cancelled; told again, nothing more happens."""
        if not self.is_told and self._starting is not None:
            self._starting.cancel()
        self.is_told = True
        self._told.set()

    async def wait(self) -> None:
        """Everything has been started: return when told to stop."""
        self._starting = None
        _collect_seldom()
        await self._told.wait()


@contextmanager
def stopping() -> Iterator[ShutdownSignal]:
    """A `ShutdownSignal` for the task that is running: being cancelled by it is an end like any other."""
    stop = ShutdownSignal()
    try:
        yield stop
    except asyncio.CancelledError:
        if not stop.is_told:
            raise


@contextmanager
def stopped_by_signals() -> Iterator[ShutdownSignal]:
    """Stop at SIGTERM or SIGINT; a second one ends the process at once.

    By the kernel's hand, and not by an exception: Python's own answer to a second SIGINT would wait for the cleaning up.
    """
    loop = asyncio.get_running_loop()

    def tell() -> None:
        for name in _SIGNALS:
            loop.remove_signal_handler(name)
            signal.signal(name, signal.SIG_DFL)
        stop.tell()

    with stopping() as stop:
        for name in _SIGNALS:
            loop.add_signal_handler(name, tell)
        yield stop


def _collect_seldom() -> None:
    """Look for garbage less often than Python does: what was made up to now stays, and is looked through no more."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_EVERY)
