"""Upstreams with their metrics, closed after the test."""

import asyncio
from contextlib import suppress

import pytest
from prometheus_client import CollectorRegistry

from proxy.config.engines import EnginesSettings
from proxy.telemetry.metrics import make_metrics
from proxy.upstream.client import Upstream
from proxy.upstream.http_client import HttpClient


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
async def upstream_to(registry):
    """Return a factory of upstreams to URLs; the endpoints are named e0, e1, ... `engines` are settings for all of them."""
    made = []

    def make(*urls, engines=None, **settings):
        endpoints = [{"url": url, "name": f"e{n}", **settings} for n, url in enumerate(urls)]
        engines_settings = EnginesSettings(endpoints=endpoints, **engines or {})
        made.append(Upstream(engines_settings, make_metrics(registry)))
        return made[-1]

    yield make
    for upstream in made:
        await upstream.close()


@pytest.fixture
async def make_client():
    """Return a factory of HTTP clients, with the settings that a test changes."""
    made = []

    def make(**settings):
        plain = {"tls": True, "max_connections": 0, "keepalive_s": 3, "connect_timeout_s": 10, "read_timeout_s": None}
        made.append(HttpClient(**plain | settings))
        return made[-1]

    yield make
    for client in made:
        await client.close()


@pytest.fixture
async def client(make_client):
    return make_client()


@pytest.fixture
async def engine_at():
    """Return a factory of the URL of a server that runs `serve(reader, writer)` for each connection, and then closes it."""
    running, servers = set(), []

    async def start(serve, **options):
        async def run(reader, writer):
            running.add(task := asyncio.current_task())
            try:
                with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                    await serve(reader, writer)
            finally:
                running.discard(task)
                writer.close()

        servers.append(server := await asyncio.start_server(run, "127.0.0.1", 0, **options))
        scheme = "https" if options else "http"
        return f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}/x"

    yield start
    for server in servers:
        server.close()
    for task in list(running):
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
