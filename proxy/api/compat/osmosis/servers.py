"""Requests to the configured rollout servers, which are an allow-list."""

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, Final

import aiohttp
import orjson

from proxy.config.sections import OsmosisSettings, RolloutServerSettings
from proxy.errors import UnprocessableRequest
from proxy.protocols.json_weight import most_weight
from proxy.upstream.concurrency import LARGE_BYTES, off_loop

_CONNECT_TIMEOUT_S: Final = 10
_MAX_QUOTED: Final = 500  # characters of an error response
_MAX_BYTES: Final = 2**23  # of a response, as of a body of the control API
_MAX_WEIGHT: Final = 2**27  # of memory for a parsed response


class ServerFault(Exception):
    """A rollout server failed. `category` is the protocol's error category."""

    def __init__(self, category: str, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.category = category
        self.message = message
        self.status = status


class RolloutServers:
    """The configured rollout servers. Create it in the event loop, and close it at shutdown."""

    def __init__(self, settings: OsmosisSettings) -> None:
        self._settings = settings
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=settings.timeout_s, sock_connect=_CONNECT_TIMEOUT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<RolloutServers {', '.join(self._settings.servers) or 'none'}; {len(self._tasks)} requests>"

    @property
    def server_url(self) -> str | None:
        """The base URL at which the servers reach TokenTape, if it is configured."""
        return self._settings.server_url

    def named(self, name: str) -> RolloutServerSettings:
        """Return the server with this name. Raises UnprocessableRequest, which lists the configured ones."""
        server = self._settings.servers.get(name)
        if server is None:
            known = ", ".join(sorted(self._settings.servers)) or "none"
            raise UnprocessableRequest(
                f"Unknown rollout server {name!r}; configured in osmosis.servers: {known}.",
                param="server",
            )
        return server

    async def post(self, name: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request to a server and return the JSON object of its response. Raises ServerFault."""
        server = self.named(name)
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if server.api_key is not None:
            headers["Authorization"] = f"Bearer {server.api_key.get_secret_value()}"
        request = self._session.post(
            server.url + path, data=orjson.dumps(body), headers=headers, allow_redirects=False
        )  # no redirects: they could lead past the allow-list
        try:
            async with request as response:
                text = await _received(name, response)
        except TimeoutError:
            raise ServerFault("timeout", f"Rollout server {name} timed out.") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerFault("network_error", f"Rollout server {name} is unreachable: {error}") from error
        if not 200 <= response.status < 300:
            quoted = text[:_MAX_QUOTED].decode("utf-8", "replace")
            raise ServerFault(
                _category(response.status),
                f"Rollout server {name} returned status {response.status}: {quoted}",
                response.status,
            )
        return await off_loop(len(text), LARGE_BYTES, _read, name, text)

    def start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Start a task that waits for a server. It is referenced until it is done, and `close` cancels it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Cancel all requests and close the session."""
        for task in self._tasks:
            task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self._session.close()


async def _received(name: str, response: aiohttp.ClientResponse) -> bytes:
    """Return the body. Raises ServerFault if it is too large."""
    received = bytearray()
    async for read in response.content.iter_any():
        received += read
        if len(received) > _MAX_BYTES:
            raise ServerFault("internal_error", f"Rollout server {name} returned more than {_MAX_BYTES} bytes.")
    return bytes(received)


def _read(name: str, text: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(text) if most_weight(text) <= _MAX_WEIGHT else None
    except orjson.JSONDecodeError:
        body = None
    if not isinstance(body, dict):
        raise ServerFault("internal_error", f"Rollout server {name} did not return a JSON object.")
    return body


def _category(status: int) -> str:
    """Return the protocol's error category of a status."""
    if status == 429:
        return "rate_limited"
    return "internal_error" if status >= 500 else "validation_error"
