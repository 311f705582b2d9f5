"""The watch over endpoints: each is checked now and then, and its faults are counted.

Holds one task for each endpoint that is followed, and tells of what changes (log, metrics). When an endpoint is ejected is
`health`'s to say; how it is asked is given.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random
from typing import Final

from proxy.errors import EngineFault
from proxy.telemetry.logs import LOG
from proxy.telemetry.metrics import Metrics
from proxy.upstream.endpoint import Endpoint

_CHECK_WITHIN_S: Final = 2
_JITTER: Final = 0.2  # of the time between two checks: processes that started together must not ask together


class HealthChecker:
    """Follows endpoints, inside the event loop. `status_of` gives the status of an endpoint's `GET /health`."""

    def __init__(
        self, health_interval_s: float, metrics: Metrics, status_of: Callable[[Endpoint], Awaitable[int]]
    ) -> None:
        self._health_interval_s = health_interval_s
        self._metrics = metrics
        self._status_of = status_of
        self._dice = Random()  # noqa: S311 - no secret; its own: nobody else's random numbers depend on when we check
        self._ejected: dict[Endpoint, asyncio.Event] = {}
        self._tasks: dict[Endpoint, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"<Watch over {len(self._tasks)} endpoints>"

    def follow(self, endpoint: Endpoint) -> None:
        """Check an endpoint from now on. One that is followed may have another name by now."""
        self._metrics.engine_healthy.labels(endpoint.settings.label).set(not endpoint.health.is_ejected)
        self._metrics.begin_engine(endpoint.settings.label)
        if endpoint not in self._tasks:
            self._ejected[endpoint] = asyncio.Event()
            self._tasks[endpoint] = asyncio.get_running_loop().create_task(self._keep_checking(endpoint))

    def leave(self, endpoint: Endpoint) -> None:
        """Check it no more: it was removed."""
        del self._ejected[endpoint]
        self._tasks.pop(endpoint).cancel()

    async def close(self) -> None:
        """Check nothing any more."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def check(self, endpoint: Endpoint) -> bool:
        """Whether it answers `GET /health`, and not with a failure of its own: who has no such route is there, too."""
        try:
            async with asyncio.timeout(_CHECK_WITHIN_S):
                status = await self._status_of(endpoint)
        except EngineFault:
            return False  # counted where it was named
        except TimeoutError:
            self.failed(
                endpoint, f"the engine {endpoint.settings.label} did not answer GET /health in {_CHECK_WITHIN_S} s"
            )
            return False
        if status >= 500:
            self.failed(endpoint, f"the engine {endpoint.settings.label} answered GET /health with {status}")
            return False
        was_ejected = endpoint.health.is_ejected
        endpoint.health.passed(_now())
        self._note(endpoint, was_ejected=was_ejected)
        return True

    def failed(self, endpoint: Endpoint, why: str) -> None:
        """A call or a check of it failed."""
        was_ejected = endpoint.health.is_ejected
        endpoint.faults += 1
        endpoint.last_fault = why
        endpoint.health.failed(_now())
        self._note(endpoint, was_ejected=was_ejected)

    def answered(self, endpoint: Endpoint) -> None:
        """It answered a call, to the end."""
        if endpoint.health.faults or endpoint.health.ejections:
            was_ejected = endpoint.health.is_ejected
            endpoint.health.answered()
            self._note(endpoint, was_ejected=was_ejected)

    def _note(self, endpoint: Endpoint, *, was_ejected: bool) -> None:
        is_ejected, label = endpoint.health.is_ejected, endpoint.settings.label
        if is_ejected == was_ejected or endpoint not in self._ejected:
            return
        self._metrics.engine_healthy.labels(label).set(not is_ejected)
        if is_ejected:
            self._metrics.ejections.labels(label).inc()
            self._ejected[endpoint].set()
            endpoint.turns.turn_away()
            LOG.warning("%s is passed over: %s", label, endpoint.last_fault)
        else:
            LOG.info("%s is back", label)

    async def _keep_checking(self, endpoint: Endpoint) -> None:
        pause_s = self._health_interval_s
        while True:
            await self._rest(endpoint, pause_s)
            is_well = await self.check(endpoint)
            # After a bad one soon again: an endpoint that is away is to be passed over before many calls have tried it.
            pause_s = (
                self._health_interval_s if is_well else min(self._health_interval_s, endpoint.health.base_ejection_s)
            )

    async def _rest(self, endpoint: Endpoint, pause_s: float) -> None:
        """Until the next check is due: at the end of an ejection, which may begin meanwhile."""
        ejected = self._ejected[endpoint]
        ejected.clear()
        if not endpoint.health.is_ejected:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s * self._dice.uniform(1 - _JITTER, 1 + _JITTER)):
                    await ejected.wait()
        if endpoint.health.ejected_until is not None:
            await asyncio.sleep(max(endpoint.health.ejected_until - _now(), 0))


def ejected_for(endpoint: Endpoint) -> float | None:
    """For how many seconds it is still passed over, before it is checked; None if it is not."""
    until = endpoint.health.ejected_until
    return None if until is None else max(until - _now(), 0)


def _now() -> float:
    return asyncio.get_running_loop().time()
