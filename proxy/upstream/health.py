"""Periodic health checks of the endpoints, and the count of their failures."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random
from typing import Final

from proxy.errors import EngineError
from proxy.telemetry.logs import LOG
from proxy.telemetry.metrics import Metrics
from proxy.upstream.endpoint import Endpoint

_CHECK_TIMEOUT_S: Final = 5  # SGLang 0.5.23 samples a token for GET /health, and takes a second or more (run)
_JITTER: Final = 0.2  # fraction of the interval, so that processes that started together do not check at the same time


class HealthChecker:
    """Checks endpoints in the event loop. `get_status` returns the status of an endpoint's `GET /health`."""

    def __init__(
        self, health_interval_s: float, metrics: Metrics, get_status: Callable[[Endpoint], Awaitable[int]]
    ) -> None:
        self._health_interval_s = health_interval_s
        self._metrics = metrics
        self._get_status = get_status
        self._random = Random()  # noqa: S311 - no secret; a separate generator, so that checks do not change other random numbers
        self._ejected: dict[Endpoint, asyncio.Event] = {}
        self._tasks: dict[Endpoint, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"<HealthChecker of {len(self._tasks)} endpoints>"

    def start(self, endpoint: Endpoint) -> None:
        """Start to check an endpoint. If it is checked already, only its name may have changed."""
        self._metrics.engine_healthy.labels(endpoint.label).set(not endpoint.health.is_ejected)
        self._metrics.begin_engine(endpoint.label)
        if endpoint not in self._tasks:
            self._ejected[endpoint] = asyncio.Event()
            self._tasks[endpoint] = asyncio.get_running_loop().create_task(self._run(endpoint))

    def stop(self, endpoint: Endpoint) -> None:
        """Stop checking an endpoint, which was removed."""
        del self._ejected[endpoint]
        self._tasks.pop(endpoint).cancel()

    async def close(self) -> None:
        """Stop all checks."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def check(self, endpoint: Endpoint) -> bool:
        """Return whether `GET /health` returns a status below 500. Engines without the route are healthy too."""
        try:
            async with asyncio.timeout(_CHECK_TIMEOUT_S):
                status = await self._get_status(endpoint)
        except EngineError:
            return False  # `Upstream.translated` has counted it
        except TimeoutError:
            self.failed(endpoint, f"Engine {endpoint.label} did not respond to GET /health within {_CHECK_TIMEOUT_S} s")
            return False
        if status >= 500:
            self.failed(endpoint, f"Engine {endpoint.label} returned status {status} for GET /health")
            return False
        was_ejected = endpoint.health.is_ejected
        endpoint.health.passed(_now())
        self._report_change(endpoint, was_ejected=was_ejected)
        return True

    def failed(self, endpoint: Endpoint, why: str) -> None:
        """Count a failed call or health check of an endpoint."""
        was_ejected = endpoint.health.is_ejected
        endpoint.faults += 1
        endpoint.last_fault = why
        endpoint.health.failed(_now())
        self._report_change(endpoint, was_ejected=was_ejected)

    def answered(self, endpoint: Endpoint) -> None:
        """Reset the failures of an endpoint that answered a call completely."""
        was_ejected = endpoint.health.is_ejected
        endpoint.health.answered()
        self._report_change(endpoint, was_ejected=was_ejected)

    def _report_change(self, endpoint: Endpoint, *, was_ejected: bool) -> None:
        is_ejected, label = endpoint.health.is_ejected, endpoint.label
        if is_ejected == was_ejected or endpoint not in self._ejected:
            return
        self._metrics.engine_healthy.labels(label).set(not is_ejected)
        if is_ejected:
            self._metrics.ejections.labels(label).inc()
            self._ejected[endpoint].set()
            endpoint.queue.evict_waiters()
            LOG.warning("Engine %s ejected: %s", label, endpoint.last_fault)
        else:
            endpoint.lose()
            LOG.info("Engine %s recovered", label)

    async def _run(self, endpoint: Endpoint) -> None:
        pause_s = self._health_interval_s
        while True:
            await self._wait_until_due(endpoint, pause_s)
            is_healthy = await self.check(endpoint)
            # Check a failing endpoint sooner, so that it is ejected before many calls have tried it.
            pause_s = (
                self._health_interval_s if is_healthy else min(self._health_interval_s, endpoint.health.base_ejection_s)
            )

    async def _wait_until_due(self, endpoint: Endpoint, pause_s: float) -> None:
        """Wait until the next check: the interval, or the end of an ejection, which may begin while waiting."""
        ejected = self._ejected[endpoint]
        ejected.clear()
        if not endpoint.health.is_ejected:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s * self._random.uniform(1 - _JITTER, 1 + _JITTER)):
                    await ejected.wait()
        if endpoint.health.ejected_until is not None:
            await asyncio.sleep(max(endpoint.health.ejected_until - _now(), 0))


def ejected_for(endpoint: Endpoint) -> float | None:
    """Return the remaining seconds of an ejection; None if the endpoint is not ejected."""
    until = endpoint.health.ejected_until
    return None if until is None else max(until - _now(), 0)


def _now() -> float:
    return asyncio.get_running_loop().time()
