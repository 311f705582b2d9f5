"""Shutdown by signals: the first one stops the process gracefully, also during its start; a second one kills it."""

import asyncio
import gc
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
# Net allocations (Python: 700), and collections of the first generation until one of the second. Reference counts free the
# bodies and responses of calls, also of those that fail: only errors of connections leave cycles, without the request. A
# collection mostly visits the objects of calls in flight, 250 each, and blocks the event loop: 0.1 s for 100,000.
_GC_THRESHOLDS: Final = (20_000, 5)


class ShutdownSignal:
    """The request to stop this process. Call `wait` once everything has been started."""

    def __init__(self) -> None:
        self.is_requested = False
        self._requested = asyncio.Event()
        self._starting = asyncio.current_task()

    def request(self) -> None:
        """Request the stop, and cancel a start in progress; repeated requests do nothing."""
        if not self.is_requested and self._starting is not None:
            self._starting.cancel()
        self.is_requested = True
        self._requested.set()

    async def wait(self) -> None:
        """Return when a stop is requested; everything has been started."""
        self._starting = None
        _collect_rarely()
        await self._requested.wait()


@contextmanager
def stopping() -> Iterator[ShutdownSignal]:
    """Yield a `ShutdownSignal` for the current task; a cancellation by it is a normal end."""
    stop = ShutdownSignal()
    try:
        yield stop
    except asyncio.CancelledError:
        if not stop.is_requested:
            raise


@contextmanager
def stopped_by_signals() -> Iterator[ShutdownSignal]:
    """Stop at SIGTERM or SIGINT; a second one kills the process at once.

    The default action of the kernel does that: Python's handler of a second SIGINT would wait for the cleanup.
    """
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        for name in _SIGNALS:
            loop.remove_signal_handler(name)
            signal.signal(name, signal.SIG_DFL)
        stop.request()

    with stopping() as stop:
        for name in _SIGNALS:
            loop.add_signal_handler(name, on_signal)
        yield stop


def _collect_rarely() -> None:
    """Run garbage collection less often than Python does, and exclude the objects made so far."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
