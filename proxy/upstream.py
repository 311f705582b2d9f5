"""The engines' endpoints: which one a call goes to, and the sending of it.

Holds the endpoints, the choice among them (pure) and one aiohttp session. aiohttp's exceptions stop here: past this file
only ours are seen. Nothing here understands a body.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from io import BytesIO

import aiohttp
import orjson
from yarl import URL

from proxy.config import EndpointSettings, EnginesSettings
from proxy.engines import ENGINES, Engine, Traits
from proxy.engines.recognition import QUESTIONS, Seen, recognise
from proxy.errors import EngineBroke, EngineFault, EngineSilent, NoEngine
from proxy.headers import upstream as upstream_headers
from proxy.logs import LOG
from proxy.metrics import Metrics
from proxy.trajectory.step import EngineFacts

# uvicorn, under vLLM and SGLang, closes idle connections after 5 s; letting go first spares us the race in which a
# request is written to a connection that the engine has just closed.
_KEEPALIVE_S = 3
_READ_BUFFER_BYTES = 2**18
_KNOW_WITHIN_S = 5  # a call waits so long to learn what its engine is


@dataclass(slots=True)
class Endpoint:
    """One engine: its settings, and what is known of it now.

    `traits` are None until the server has been met; `is_known` is false again once it broke off, since it may come back
    as another.
    """

    settings: EndpointSettings
    traits: Traits | None = None
    is_known: bool = False
    in_flight: int = 0
    faults: int = 0
    last_fault: str | None = None
    api_key: str | None = field(default=None, repr=False)
    asking: "asyncio.Task[None] | None" = field(default=None, repr=False)

    @property
    def engine(self) -> Engine:
        """Its kind: as configured, or as found out; text only while nobody knows."""
        return ENGINES[self.kind] if self.kind != "auto" else ENGINES["plain"]

    @property
    def kind(self) -> str:
        """The name of its kind; `auto` while nobody knows."""
        if self.settings.kind != "auto" or self.traits is None:
            return self.settings.kind
        return self.traits.kind

    @property
    def version(self) -> str | None:
        """Its version, if configured or found out."""
        return self.settings.version or (self.traits.version if self.traits else None)

    @property
    def known(self) -> Traits:
        """What is known of the server: found out, or configured, which wins."""
        return Traits(self.engine.kind, self.version, self.traits.has_parser if self.traits else None)

    @property
    def facts(self) -> EngineFacts:
        """What a step says of the engine."""
        return EngineFacts(self.settings.label, self.kind, self.version, self.settings.url)


@dataclass(slots=True)
class Answer:
    """The engine's answer: its status and headers, and its bytes as they come."""

    status: int
    headers: Mapping[str, str]
    content_type: str
    _endpoint: Endpoint
    _upstream: "Upstream"
    _response: aiohttp.ClientResponse

    async def reads(self) -> AsyncIterator[bytes]:
        """The body, read by read. Raises EngineBroke or EngineSilent if it does not come to its end."""
        with self._upstream.naming_faults(self._endpoint):
            async for read in self._response.content.iter_any():
                yield read


def choose(endpoints: Sequence[Endpoint], rollout_id: str) -> Endpoint:
    """The endpoint for a rollout: always the same one while the endpoints are the same, so that its KV cache is reused.

    Rendezvous hashing: when an endpoint goes, only its rollouts move. Raises NoEngine if there is none.
    """
    return ranked(endpoints, rollout_id)[0]


def ranked(endpoints: Sequence[Endpoint], rollout_id: str) -> list[Endpoint]:
    """The endpoints in the order in which a rollout is tried at them; the first is its own. Raises NoEngine if none."""
    if not endpoints:
        raise NoEngine("no engine is configured; set engines.endpoints or start with --engine URL")
    name = rollout_id.encode()

    def weight(endpoint: Endpoint) -> bytes:
        return blake2b(name, key=endpoint.settings.url.encode()[:64]).digest()

    return sorted(endpoints, key=weight, reverse=True)


class Upstream:
    """The engines, reachable. Made inside the event loop; `close` when done."""

    def __init__(self, settings: EnginesSettings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self.endpoints = [_endpoint(endpoint) for endpoint in settings.endpoints]
        tls = ssl.create_default_context(cafile=settings.ca_file)
        pooled = aiohttp.TCPConnector(limit=settings.max_connections, keepalive_timeout=_KEEPALIVE_S, ssl=tls)
        alone = aiohttp.TCPConnector(limit=settings.max_connections, force_close=True, ssl=tls)
        self._session = _session(settings, pooled)
        self._unpooled = _session(settings, alone)
        # Held here and ended by `close`: nothing waits for it, since an engine may be away when the proxy starts.
        self._learning = asyncio.get_running_loop().create_task(self.learn())

    @asynccontextmanager
    async def send(
        self,
        endpoint: Endpoint,
        method: str,
        path: str,
        *,
        headers: Sequence[tuple[str, str]],
        body: bytes | None,
        alone: bool = False,
    ) -> AsyncIterator[Answer]:
        """Send a request. Leaving the context early closes the connection, which is how an engine learns to abort.

        `alone`: on a connection of its own. llama.cpp closes the one that a stream came on without having said so, and
        what is sent right after it would be lost (seen on 2026.10).
        Raises NoEngine (nothing was sent), EngineSilent, or EngineBroke (the engine went before it answered).
        """
        endpoint.in_flight += 1
        try:
            with self.naming_faults(endpoint):
                response = await (self._unpooled if alone else self._session).request(
                    method,
                    URL(endpoint.settings.url + path, encoded=True),  # as it came: not quoted a second time
                    data=BytesIO(body) if body else None,  # written in pieces: a large body does not hold the loop up
                    headers=upstream_headers(headers, api_key=endpoint.api_key),
                    allow_redirects=False,
                )
            try:
                content_type = response.headers.get("Content-Type", "")
                yield Answer(response.status, response.headers, content_type, endpoint, self, response)
            finally:
                # At the end of the body the connection is back in the pool already; anywhere else it must go.
                response.close()
        finally:
            endpoint.in_flight -= 1

    @contextmanager
    def naming_faults(self, endpoint: Endpoint) -> Iterator[None]:
        """Turn aiohttp's exceptions into ours, and count them."""
        try:
            yield
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            fault = self._fault(endpoint.settings.label, error)
            endpoint.faults += 1
            endpoint.is_known = False
            endpoint.last_fault = fault.message
            self._metrics.upstream_faults.labels(endpoint.settings.label, fault.fault).inc()
            raise fault from error

    def _fault(self, label: str, error: Exception) -> EngineFault:
        """An exception of aiohttp's by its name of ours."""
        if isinstance(error, aiohttp.ConnectionTimeoutError | aiohttp.ClientConnectorError):
            return NoEngine(f"the engine {label} cannot be reached: {_words(error)}")
        if isinstance(error, TimeoutError):
            return EngineSilent(f"the engine {label} was silent for {self._settings.read_timeout_s} s")
        return EngineBroke(f"the engine {label} broke off: {_words(error)}")

    async def learn(self) -> None:
        """Find out what each engine is. One that is away stays what it was."""
        await asyncio.gather(*map(self.know, self.endpoints))

    async def know(self, endpoint: Endpoint) -> EngineFault | None:
        """Find out what an engine is, unless that is known; the fault if it was never met, and cannot be reached.

        However many wait, the engine is asked once.
        """
        if not endpoint.is_known:
            if endpoint.asking is None:
                endpoint.asking = asyncio.get_running_loop().create_task(self._find_out(endpoint))
            await asyncio.wait([endpoint.asking], timeout=_KNOW_WITHIN_S)
        if endpoint.traits is not None or endpoint.settings.kind != "auto":
            return None
        return NoEngine(
            f"the engine {endpoint.settings.label} cannot be reached: {endpoint.last_fault or 'it is silent'}"
        )

    async def _find_out(self, endpoint: Endpoint) -> None:
        """Ask the questions, first those that only one kind of engine answers."""
        try:
            *own, common = QUESTIONS
            answers = dict(zip(own, await self._all_seen(endpoint, own), strict=True))
            traits = recognise(answers)
            if traits.kind == "plain":
                answers[common] = await self._seen(endpoint, common)
                traits = recognise(answers)
        except EngineFault as fault:
            endpoint.last_fault = fault.message
            return
        finally:
            endpoint.asking = None
        if endpoint.settings.kind not in {"auto", traits.kind}:
            LOG.warning("%s is configured as %s and looks like %s", endpoint.settings.label, endpoint.kind, traits.kind)
        is_loading = traits.kind == "plain" and any(seen.status == 503 for seen in answers.values())
        endpoint.traits, endpoint.is_known = traits, not is_loading

    async def _all_seen(self, endpoint: Endpoint, paths: Sequence[str]) -> list[Seen]:
        """The answers to all questions, asked at once. Raises EngineFault with the first fault; none is left asked then."""
        asking = [asyncio.get_running_loop().create_task(self._seen(endpoint, path)) for path in paths]
        try:
            return await asyncio.gather(*asking)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.wait(asking)

    async def _seen(self, endpoint: Endpoint, path: str) -> Seen:
        async with self.send(endpoint, "GET", path, headers=(), body=None) as answer:
            text = b"".join([read async for read in answer.reads()])
        try:
            body = orjson.loads(text) if answer.status == 200 else None
        except orjson.JSONDecodeError:
            body = None
        return Seen(answer.status, answer.headers.get("Server", ""), body)

    async def is_healthy(self, endpoint: Endpoint) -> bool:
        """Whether the engine answers `GET /health` with 200."""
        try:
            async with self.send(endpoint, "GET", "/health", headers=(), body=None) as answer:
                return answer.status == 200
        except EngineFault:
            return False

    async def close(self) -> None:
        """Close every connection."""
        asking = [endpoint.asking for endpoint in self.endpoints if endpoint.asking is not None]
        for task in (self._learning, *asking):
            task.cancel()
        await asyncio.wait([self._learning, *asking])
        await self._session.close()
        await self._unpooled.close()


def _session(settings: EnginesSettings, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=settings.connect_timeout_s, sock_read=settings.read_timeout_s
        ),
        read_bufsize=_READ_BUFFER_BYTES,
        auto_decompress=True,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent", "Content-Type"),
    )


def _endpoint(settings: EndpointSettings) -> Endpoint:
    key = settings.api_key.get_secret_value() if settings.api_key else None
    return Endpoint(settings, api_key=key)


def _words(error: BaseException) -> str:
    """What an exception says, or its name if it says nothing."""
    return str(error) or type(error).__name__
