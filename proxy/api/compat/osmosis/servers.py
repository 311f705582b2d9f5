"""Requests to the configured rollout servers, which are an allow-list."""

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, Final

import aiohttp
import orjson

from proxy.config.sections import OsmosisSettings, RolloutServerSettings
from proxy.errors import UnprocessableRequest

_CONNECT_S: Final = 10
_QUOTED: Final = 500  # characters of a server's refusal that are kept


class ServerFault(Exception):
    """A rollout server failed. `category` is the protocol's error category."""

    def __init__(self, category: str, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.category = category
        self.message = message
        self.status = status


class RolloutServers:
    """The rollout servers that the configuration names. Made inside the event loop; `close` when done."""

    def __init__(self, settings: OsmosisSettings) -> None:
        self._settings = settings
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=settings.timeout_s, sock_connect=_CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<RolloutServers {', '.join(self._settings.servers) or 'none'}; {len(self._tasks)} asked>"

    @property
    def server_url(self) -> str | None:
        """Our base URL as they reach it, if it is configured."""
        return self._settings.server_url

    def named(self, name: str) -> RolloutServerSettings:
        """The server of this name. Raises UnprocessableRequest, which names the known."""
        server = self._settings.servers.get(name)
        if server is None:
            known = ", ".join(sorted(self._settings.servers)) or "none"
            raise UnprocessableRequest(
                f"Unknown rollout server {name!r}; configured in osmosis.servers: {known}.",
                param="server",
            )
        return server

    async def ask(self, name: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a server a request, and wait for its answer. Raises ServerFault."""
        server = self.named(name)
        headers = {"Content-Type": "application/json"}
        if server.api_key is not None:
            headers["Authorization"] = f"Bearer {server.api_key.get_secret_value()}"
        asking = self._session.post(
            server.url + path, data=orjson.dumps(body), headers=headers, allow_redirects=False
        )  # no redirects: they could lead past the allow-list
        try:
            async with asking as answer:
                text = await answer.read()
        except TimeoutError:
            raise ServerFault("timeout", f"Rollout server {name} timed out.") from None
        except (aiohttp.ClientError, OSError) as error:
            raise ServerFault("network_error", f"Rollout server {name} is unreachable: {error}") from error
        if not 200 <= answer.status < 300:
            told = text[:_QUOTED].decode("utf-8", "replace")
            raise ServerFault(
                _category(answer.status),
                f"Rollout server {name} returned status {answer.status}: {told}",
                answer.status,
            )
        return _read(name, text)

    def hold(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """A task that waits for a server: it does not vanish, and `close` ends it."""
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


def _read(name: str, text: bytes) -> dict[str, Any]:
    try:
        told = orjson.loads(text)
    except orjson.JSONDecodeError:
        told = None
    if not isinstance(told, dict):
        raise ServerFault("internal_error", f"Rollout server {name} did not return a JSON object.")
    return told


def _category(status: int) -> str:
    """The protocol's word for a status that is not one of success."""
    if status == 429:
        return "rate_limited"
    return "internal_error" if status >= 500 else "validation_error"
