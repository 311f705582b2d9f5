"""The stand-in: what listens while a process that starts has no store yet.

Holds the application that says so, and the waiting for the store. It makes no part of the real application: that is made
whole once the store is there, and a store that is there and cannot be used still ends the start, with its reason.
"""

import asyncio

from aiohttp import web

from proxy.api.failures import answer_failures
from proxy.config.sections import StoreSettings
from proxy.errors import StoreFault
from proxy.rollouts.store_health import PROBE
from proxy.server.app import store_options
from proxy.telemetry.logs import LOG
from storage import open_store
from storage.errors import StoreUnreachable
from storage.store import Store

_PAUSE_S = 0.5


class StandbyApp:
    """An application for the time without a store: alive, not ready, and every call is refused. `away` says why."""

    def __init__(self, away: str) -> None:
        self.away = away

    def __repr__(self) -> str:
        return f"<StandIn {self.away}>"

    def make_app(self) -> web.Application:
        """The application, for one port."""
        app = web.Application(middlewares=[answer_failures])
        app.router.add_get("/health", self._show_health)
        app.router.add_get("/ready", self._show_ready)
        app.router.add_route("*", r"/{path:[\s\S]*}", self._refuse)
        return app

    async def until_there(self, settings: StoreSettings, store: Store | None) -> None:
        """Return once the store takes a write. Raises StorageError for one that is there and cannot be used."""
        LOG.error("the store is away, and calls are refused until it is there: %s", self.away)
        while True:
            await asyncio.sleep(_PAUSE_S)
            try:
                await _takes_a_write(settings, store)
            except StoreUnreachable as error:
                self.away = str(error)
            else:
                LOG.info("the store is there")
                return

    async def _show_health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _show_ready(self, _request: web.Request) -> web.Response:
        told = {"status": "not ready", "store": self.away, "engines": {}}
        return web.json_response(told, status=503, headers={"Retry-After": "1"})

    async def _refuse(self, _request: web.Request) -> web.StreamResponse:
        raise StoreFault(f"the store has not been there since this process started: {self.away}")


async def _takes_a_write(settings: StoreSettings, store: Store | None) -> None:
    opened = store or await open_store(settings.url, store_options(settings))
    try:
        await opened.set_once(PROBE, b"1")
    finally:
        if store is None:
            await opened.close()
