"""Access to the engine that is certified: requests with limits of time and size, and a temporary proxy in front of it."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import aiohttp
import orjson

from proxy.cli.check import error_text
from proxy.cli.control import CONNECT_TIMEOUT_S
from proxy.config.engines import EndpointSettings
from proxy.config.sections import AgentsSettings, StoreSettings
from proxy.config.settings import Settings
from proxy.errors import failure_text
from proxy.server.listener import running

MAX_BYTES: Final = 16 * 2**20  # of a response; the longest reply of a shape has 100 tokens
CALL_TIMEOUT_S: Final = 30.0
_KEPT: Final = frozenset({"record", "continuation", "dialects"})  # of the user's settings, besides the engine's


class Unanswered(OSError):
    """A request got no complete response. `is_slow`: it took too long."""

    def __init__(self, message: str, *, is_slow: bool = False) -> None:
        super().__init__(message)
        self.is_slow = is_slow


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete response."""

    status: int
    content_type: str
    body: bytes

    def json(self) -> Any:
        """Return the body as JSON, None if it is none."""
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return None

    @property
    def message(self) -> str:
        """The message of an error response, or the start of its body."""
        body = self.json()
        return error_text(self.body.decode("utf-8", "replace") if body is None else body)[:200]


@dataclass(frozen=True, slots=True)
class Client:
    """Requests to one server. `deadline` ends the whole run, in the event loop's time."""

    _session: aiohttp.ClientSession = field(repr=False)
    root: str
    name: str
    deadline: float

    @property
    def is_over(self) -> bool:
        """Whether the time of the run is over."""
        return asyncio.get_running_loop().time() >= self.deadline

    async def get(self, path: str) -> Answer:
        """Return the response to a GET request. Raises Unanswered."""
        return await self._send("GET", path, None)

    async def post(self, path: str, body: Any, *, events: int | None = None) -> Answer:
        """Return the response to a POST request; with `events`, disconnect after so many of a stream. Raises Unanswered."""
        return await self._send("POST", path, body, events)

    async def score(self, method: str, path: str, body: Any) -> tuple[int, bytes]:
        """Send a scoring request (`proxy.rollouts.scoring.requests.Send`). Raises Unanswered."""
        answer = await self._send(method, path, body)
        return answer.status, answer.body

    @asynccontextmanager
    async def stream(self, path: str, body: Any) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
        """Yield the status of a response, and its lines while it is received. Raises Unanswered."""
        async with self._open("POST", path, body) as response:
            yield response.status, aiter(response.content)

    async def _send(self, method: str, path: str, body: Any, events: int | None = None) -> Answer:
        received, seen = bytearray(), 0
        async with self._open(method, path, body) as response:
            async for chunk in response.content.iter_any():
                received += chunk
                if len(received) > MAX_BYTES:
                    raise Unanswered(f"{self.name} sends more than {MAX_BYTES >> 20} MiB for {path}")
                seen += chunk.count(b"\n\n")
                if events is not None and seen >= events:
                    response.close()
                    break
            return Answer(response.status, response.content_type, bytes(received))

    @asynccontextmanager
    async def _open(self, method: str, path: str, body: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        left = min(CALL_TIMEOUT_S, self.deadline - asyncio.get_running_loop().time())
        timeout = aiohttp.ClientTimeout(total=max(left, 0.01), sock_connect=CONNECT_TIMEOUT_S)
        try:
            async with self._session.request(
                method, self.root + path, json=body, timeout=timeout, allow_redirects=False
            ) as response:
                yield response
        except TimeoutError as error:
            raise Unanswered(f"{self.name} did not answer {path} within {left:.0f} s", is_slow=True) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(error, Unanswered):
                raise
            raise Unanswered(f"{self.name} did not answer {path}: {failure_text(error)}") from error


@dataclass(frozen=True, slots=True)
class Access:
    """The engine alone, and the same engine through TokenTape. `restoring` is the engine without the limit of the run."""

    engine: Client
    proxy: Client
    restoring: Client


def certified_settings(settings: Settings, url: str, api_key: str | None, folder: Path) -> Settings:
    """Return the settings of a proxy of this engine: with a store in this folder, and nothing that acts elsewhere."""
    defaults = {name: field.get_default(call_default_factory=True) for name, field in Settings.model_fields.items()}
    known = {endpoint.url: endpoint for endpoint in settings.engines.endpoints}
    endpoint = EndpointSettings.model_validate({"url": url, **({"api_key": api_key} if api_key else {})})
    if endpoint.url in known:
        kept = {"api_key": endpoint.api_key} if api_key else {}
        endpoint = known[endpoint.url].model_copy(update={"tokenizer": None, **kept})
    limits = {"max_response_bytes": MAX_BYTES, "max_event_bytes": MAX_BYTES, "read_timeout_s": CALL_TIMEOUT_S}
    engines = settings.engines.model_copy(update={"endpoints": [endpoint], **limits})
    changed = {
        "listen": "127.0.0.1:0",
        "engines": engines,
        "agents": AgentsSettings(max_resumes=0),  # what the engine itself does with an abort is what is tested
        "store": StoreSettings(url=f"embedded:{folder / 'store'}"),
        "drain_timeout_s": 0,
        **{name: getattr(settings, name) for name in _KEPT},
    }
    return settings.model_copy(update={**defaults, **changed})


@asynccontextmanager
async def access_to(settings: Settings, url: str, api_key: str | None, limit_s: float) -> AsyncIterator[Access]:
    """Start a proxy of the engine, and remove it and its store at the end. Raises OSError, ValueError or StorageError."""
    with TemporaryDirectory(prefix="tokentape-certify-") as folder:
        used = certified_settings(settings, url, api_key, Path(folder))
        (endpoint,) = used.engines.endpoints
        deadline = asyncio.get_running_loop().time() + limit_s
        key = endpoint.api_key.get_secret_value() if endpoint.api_key else None
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        trusted: Any = ssl.create_default_context(cafile=used.engines.ca_file) if used.engines.ca_file else True
        connector = aiohttp.TCPConnector(ssl=trusted)
        async with aiohttp.ClientSession(headers=headers, connector=connector) as direct:
            engine = Client(direct, endpoint.url, f"the engine at {endpoint.url}", deadline)
            await engine.get("/v1/models")  # before anything is started
            async with running(used) as served, aiohttp.ClientSession() as session:
                restoring = Client(direct, endpoint.url, engine.name, inf)
                yield Access(engine, Client(session, served.url, "TokenTape", deadline), restoring)
