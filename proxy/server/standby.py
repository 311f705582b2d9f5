"""The standby application, which listens while a starting process has no store yet.

The application itself is made once the store is reachable; a store that is reachable and unusable ends the start with an error.
"""

import asyncio

from aiohttp import web

from proxy.api.failures import answer_failures
from proxy.config.sections import StoreSettings
from proxy.errors import StoreUnavailable
from proxy.rollouts.store_health import PROBE
from proxy.server.app import store_options
from proxy.telemetry.logs import LOG
from storage import open_store
from storage.errors import StoreUnreachable
from storage.store import Store

_INTERVAL_S = 0.5


class StandbyApp:
    """An application for the time without a store: alive, not ready; every call is refused with `reason`."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __repr__(self) -> str:
        return f"<StandbyApp {self.reason}>"

    def make_app(self) -> web.Application:
        """Return the application for one port."""
        app = web.Application(middlewares=[answer_failures])
        for suffix in ("", "z"):
            app.router.add_get(f"/health{suffix}", self._show_health)
            app.router.add_get(f"/ready{suffix}", self._show_ready)
        app.router.add_route("*", r"/{path:[\s\S]*}", self._refuse)
        return app

    async def wait_for_store(self, settings: StoreSettings, store: Store | None) -> None:
        """Return once a write to the store succeeds. Raises StorageError if it is reachable and unusable."""
        LOG.error("Store unreachable; calls are rejected until it is reachable: %s", self.reason)
        while True:
            await asyncio.sleep(_INTERVAL_S)
            try:
                await _try_write(settings, store)
            except StoreUnreachable as error:
                self.reason = str(error)
            else:
                LOG.info("Store reachable")
                return

    async def _show_health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _show_ready(self, _request: web.Request) -> web.Response:
        body = {"status": "not ready", "store": self.reason, "engines": {}}
        return web.json_response(body, status=503, headers={"Retry-After": "1"})

    async def _refuse(self, _request: web.Request) -> web.StreamResponse:
        raise StoreUnavailable(f"The store has been unreachable since this process started: {self.reason}")


async def _try_write(settings: StoreSettings, store: Store | None) -> None:
    opened = store or await open_store(settings.url, store_options(settings))
    try:
        await opened.set_once(PROBE, b"1")
    finally:
        if store is None:
            await opened.close()
