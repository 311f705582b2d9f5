"""The control API for commands: of a running proxy, or of one that runs on a store meanwhile. Requests are `tokentape`'s."""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode

import aiohttp
import orjson

from proxy.cli.render import prompts_of, recorded_texts
from proxy.config.sections import ListenTlsSettings
from proxy.config.settings import Settings
from proxy.upstream.http_client import failure_text
from tokentape.control_api import ControlApi, path_of
from tokentape.transport import Request, Transport, error_from_response

CONNECT_TIMEOUT_S: Final = 10
MAX_TEXTS: Final = 2000  # token texts per request


class Refused(OSError):
    """A response of the proxy with status 300 or more; `reason` is the message in its body."""

    def __init__(self, url: str, status: int, body: bytes) -> None:
        self.status = status
        self.reason = error_from_response(status, {}, body).message
        super().__init__(f"{url} returned {status}: {self.reason}")


@dataclass(frozen=True, slots=True)
class ControlAddress:
    """The control API of a running proxy, or settings to open a store with."""

    url: str | None
    settings: Settings | None
    api_key: str | None


@asynccontextmanager
async def connected(address: ControlAddress) -> AsyncIterator["Control"]:
    """Yield the control API. With settings, run a proxy on their store meanwhile."""
    url, api_key = address.url, address.api_key
    async with AsyncExitStack() as stack:
        if address.settings is not None:
            from proxy.server.listener import running  # noqa: PLC0415 - it takes a second

            plain = address.settings.model_copy(
                update={"listen_tls": ListenTlsSettings()}
            )  # only this process calls it
            url = (await stack.enter_async_context(running(plain))).control_url
            api_key = next((key.get_secret_value() for key in plain.control.api_keys), None)
        yield Control(await stack.enter_async_context(new_session(api_key)), str(url))


def new_session(api_key: str | None) -> aiohttp.ClientSession:
    """Return an HTTP session that sends the key. Exports and scoring may take minutes: only connecting has a timeout."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
    return aiohttp.ClientSession(headers=headers, timeout=timeout)


class Control(ControlApi):
    """The client's methods over a session of aiohttp. A request is sent once; a failure is an OSError or a ClientError."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session = session
        self._transport = _Transport(session, url.rstrip("/"))
        super().__init__(url.rstrip("/"), self._transport, attempts=1)

    def response(self, path: str) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Yield the response to a GET request. Raises OSError if it fails (`Refused` if the proxy returns an error)."""
        return self._transport.response(Request("GET", path))

    def rows(self, path: str) -> AsyncGenerator[Any, None]:
        """Yield the rows of an export."""
        return self._rows(path)

    async def list_items(self, noun: str, limit: int, **filters: Any) -> dict[str, Any]:
        """Return {noun: up to `limit` rollouts or groups that match the filters, cursor: of the next page or None}."""
        found: list[dict[str, Any]] = []
        cursor: str | None = None
        while True:
            page = await self.send("GET", f"/{noun}", limit=min(limit - len(found), 1000), cursor=cursor, **filters)
            found += page[noun]
            cursor = page["cursor"]
            if cursor is None or len(found) >= limit:
                return {noun: found, "cursor": cursor}

    async def texts(self, steps: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], list[str | None]]:
        """Return the texts of completion tokens that the recorded responses lack, by step ID and position of the choice."""
        found: dict[tuple[str, int], list[str | None]] = {}
        for step in steps:
            prompts = prompts_of(step)
            for position, choice in enumerate(step["choices"]):
                if recorded_texts(step, position) is not None:
                    continue
                texts: list[str | None] = []
                # Offsets count from the start of the prompt.
                offset = len(prompts[choice["prompt"]]) if choice["prompt"] < len(prompts) else 0
                while len(texts) < len(choice["ids"]):
                    route = path_of("rollouts", step["rollout_id"], "steps", step["step_id"], "texts")
                    query = {"choice": choice["index"], "start": offset + len(texts), "limit": MAX_TEXTS}
                    try:
                        page = await self.send("GET", route, **query)
                    except Refused:
                        return found  # an older proxy, or the rollout was deleted; the caller shows ids
                    texts += page["texts"] or [None] * len(choice["ids"])
                found[step["step_id"], position] = texts
        return found


class _Transport(Transport):
    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def parts(self, request: Request) -> AsyncGenerator[bytes, None]:
        async with self.response(request) as response:
            async for part in response.content.iter_any():
                yield part

    @asynccontextmanager
    async def response(self, request: Request) -> AsyncIterator[aiohttp.ClientResponse]:
        url = f"{self._url}{request.path}{'?' if request.query else ''}{urlencode(request.query)}"
        data = None if request.body is None else orjson.dumps(request.body)
        headers = {**request.headers, **({} if data is None else {"Content-Type": "application/json"})}
        try:
            async with self._session.request(request.method, url, data=data, headers=headers) as response:
                if response.status >= 300:
                    raise Refused(url, response.status, await response.read())
                yield response
        except (aiohttp.ClientError, TimeoutError) as error:
            raise OSError(f"request to {url} failed: {failure_text(error)}") from error
