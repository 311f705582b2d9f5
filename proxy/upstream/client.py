"""The sending of requests to engines, and the naming of what goes wrong.

Holds the endpoints and one aiohttp session. aiohttp's exceptions stop here. It must not choose an endpoint, nor understand
a body.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import aiohttp
import orjson
from aiohttp.abc import AbstractStreamWriter
from yarl import URL

from proxy.config.sections import EndpointSettings, EnginesSettings
from proxy.errors import EngineBroke, EngineFault, EngineSilent, NoEngine
from proxy.protocols.engines.detection import ProbeResponse, model_names
from proxy.telemetry.metrics import Metrics
from proxy.upstream.concurrency import off_loop
from proxy.upstream.detection import detect
from proxy.upstream.endpoint import Endpoint, make_endpoint
from proxy.upstream.failover import AWAY, Failover
from proxy.upstream.headers import upstream as upstream_headers
from proxy.upstream.health import HealthChecker

# uvicorn, under vLLM and SGLang, closes idle connections after 5 s; letting go first spares us the race in which a
# request is written to a connection that the engine has just closed.
_KEEPALIVE_S = 3
_IN_ONE_PIECE_BYTES = 2**16
_READ_BUFFER_BYTES = 2**18
_KNOW_WITHIN_S = 5  # a call waits so long to learn what its engine is
MOST_ANSWER_BYTES: Final = 2**25
_JSON: Final = (("Content-Type", "application/json"),)


@dataclass(slots=True)
class EngineResponse:
    """The engine's answer: its status and headers, and its bytes as they come."""

    status: int
    headers: Mapping[str, str]
    content_type: str
    _endpoint: Endpoint
    _upstream: "Upstream"
    _response: aiohttp.ClientResponse
    _is_aside: bool = False

    async def reads(self) -> AsyncIterator[bytes]:
        """The body, read by read. Raises EngineBroke or EngineSilent if it does not come to its end."""
        with self._upstream.naming_faults(self._endpoint, is_aside=self._is_aside):
            async for read in self._response.content.iter_any():
                yield read
        if self.status not in AWAY and not self._is_aside:
            self._upstream.watch.answered(self._endpoint)

    async def whole(self) -> bytearray:
        """The body of an answer beside a call (models, texts, counts of tokens). Raises EngineFault.

        It is bounded: no such answer is longer than one that has the ids of a prompt that fills any window.
        """
        body = bytearray()
        async for read in self.reads():
            body += read
            if len(body) > MOST_ANSWER_BYTES:
                raise EngineBroke(f"the engine answered more than {MOST_ANSWER_BYTES} bytes")
        return body

    async def json(self) -> Any:
        """Return the parsed body of a response beside a call: any JSON value. Raises EngineFault."""
        body = await self.whole()
        try:
            return await off_loop(len(body), orjson.loads, body)
        except orjson.JSONDecodeError as error:
            raise EngineBroke(f"the engine's answer is not JSON: {error}") from None


class Upstream:
    """The engines, reachable. Made inside the event loop; `close` when done."""

    def __init__(self, settings: EnginesSettings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        # True is aiohttp's own, made once: it trusts what the system does, and making one takes 20 ms.
        tls = True if settings.ca_file is None else ssl.create_default_context(cafile=settings.ca_file)
        pooled = aiohttp.TCPConnector(limit=settings.max_connections, keepalive_timeout=_KEEPALIVE_S, ssl=tls)
        alone = aiohttp.TCPConnector(limit=settings.max_connections, force_close=True, ssl=tls)
        self._session = _session(settings, pooled)
        self._unpooled = _session(settings, alone)
        self.watch = HealthChecker(settings.health_interval_s, metrics, self._health_of)
        self.endpoints: list[Endpoint] = []
        self.replace(settings.endpoints)

    def replace(self, endpoints: Sequence[EndpointSettings]) -> None:
        """From now on these are the endpoints. One whose URL was there stays as it is known, and with its calls in flight.

        Calls in flight at one that goes end there; those that wait for it and may go elsewhere do.
        """
        before = {endpoint.settings.url: endpoint for endpoint in self.endpoints}
        self.endpoints = [before.get(one.url) or make_endpoint(one, self._settings) for one in endpoints]
        for endpoint, said in zip(self.endpoints, endpoints, strict=True):
            endpoint.change(said)
            self.watch.follow(endpoint)
            self._ask(endpoint)  # nothing waits for it: an engine may be away now
        for endpoint in before.values():
            if endpoint not in self.endpoints:
                self.watch.leave(endpoint)
                endpoint.turns.turn_away()
                if endpoint.asking is not None:
                    endpoint.asking.cancel()

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
        is_aside: bool = False,
    ) -> AsyncIterator[EngineResponse]:
        """Send a request. Leaving the context early closes the connection, which is how an engine learns to abort.

        `alone`: on a connection of its own. llama.cpp closes the one that a stream came on without having said so, and
        what is sent right after it would be lost (seen on 2026.10).
        `is_aside`: a question beside a call (texts, counts of tokens). Its failure says nothing of the calls: it does not count
        towards ejection, since a gateway may have no route for it.
        Raises NoEngine (nothing was sent), EngineSilent, or EngineBroke (the engine went before it answered).
        """
        with self.naming_faults(endpoint, is_aside=is_aside):
            response = await (self._unpooled if alone else self._session).request(
                method,
                _address(endpoint.settings.url + path),
                data=_payload(body),
                headers=upstream_headers(headers, api_key=endpoint.api_key),
                allow_redirects=False,
            )
        if not 200 <= response.status <= 599:
            response.close()
            raise EngineBroke(f"the engine {endpoint.settings.label} answered with the status {response.status}")
        if response.status in AWAY and not is_aside:
            self.watch.failed(endpoint, f"the engine {endpoint.settings.label} answered {response.status}")
        try:
            content_type = response.headers.get("Content-Type", "")
            yield EngineResponse(response.status, response.headers, content_type, endpoint, self, response, is_aside)
        finally:
            # At the end of the body the connection is back in the pool already; anywhere else it must go.
            response.close()

    async def post_json(
        self, endpoint: Endpoint, path: str, body: bytes, *, alone: bool = False, is_aside: bool = True
    ) -> tuple[int, Any]:
        """POST a JSON body; return the status, and the parsed response if the status is 200, else None. Raises EngineFault."""
        async with self.send(
            endpoint, "POST", path, headers=_JSON, body=body, alone=alone, is_aside=is_aside
        ) as response:
            return response.status, await response.json() if response.status == 200 else None

    def endpoint_named(self, label: str) -> Endpoint | None:
        """Return the endpoint with this label, if one is configured."""
        return next((endpoint for endpoint in self.endpoints if endpoint.settings.label == label), None)

    @asynccontextmanager
    async def turn(self, endpoint: Endpoint, rollout_id: str, *, may_leave: bool) -> AsyncIterator[None]:
        """A call's turn at an endpoint, for as long as the context lasts.

        Raises EngineBusy if there is none in time, and NoEngine for a call that `may_leave` once the endpoint is ejected or
        gone.
        """
        waits = nullcontext() if endpoint.turns.is_free else self._waiting(endpoint.settings.label)
        with waits:
            has_turn = await endpoint.turns.take(rollout_id, may_leave=may_leave)
        if not has_turn:
            raise NoEngine(f"the engine {endpoint.settings.label} has no turn: {endpoint.last_fault or 'it is gone'}")
        try:
            yield
        finally:
            endpoint.turns.give_back()

    @asynccontextmanager
    async def send_to_any(
        self,
        endpoints: Sequence[Endpoint],
        method: str,
        path: str,
        *,
        headers: Sequence[tuple[str, str]],
        body: bytes | None,
    ) -> AsyncIterator[EngineResponse]:
        """Send to the first endpoint, in its turn; to the next one while it is away, up to `engines.max_attempts` of them.

        Raises EngineFault, as `send` does, if the last one could not answer, and EngineBusy.
        """
        failover = Failover(endpoints, self._settings.max_attempts)
        async with AsyncExitStack() as stack:
            while True:
                endpoint = failover.next()
                try:
                    await stack.enter_async_context(self.turn(endpoint, path, may_leave=failover.has_next))
                    sending = self.send(endpoint, method, path, headers=headers, body=body)
                    response = await stack.enter_async_context(sending)
                    failover.check_status(endpoint, response.status)
                except EngineFault as fault:
                    if not failover.may_go_on(fault):
                        raise
                else:
                    yield response
                    return
                await stack.aclose()

    @contextmanager
    def _waiting(self, label: str) -> Iterator[None]:
        with self._metrics.queued_calls.labels(label).track_inprogress(), self._metrics.queue_duration_seconds.time():
            yield

    @contextmanager
    def naming_faults(self, endpoint: Endpoint, *, is_aside: bool = False) -> Iterator[None]:
        """Turn aiohttp's exceptions into ours, and count them, unless they are of a question beside a call."""
        try:
            yield
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            fault = self._fault(endpoint.settings.label, error)
            if not is_aside:
                endpoint.is_known = False
                self.watch.failed(endpoint, fault.message)
                self._metrics.engine_faults.labels(endpoint.settings.label, fault.fault).inc()
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
        if (asking := self._ask(endpoint)) is not None:
            await asyncio.wait([asking], timeout=_KNOW_WITHIN_S)
        if endpoint.traits is not None or endpoint.settings.kind != "auto":
            return None
        return NoEngine(
            f"the engine {endpoint.settings.label} cannot be reached: {endpoint.last_fault or 'it is silent'}"
        )

    async def served_models(self, endpoint: Endpoint, name: str) -> frozenset[str] | None:
        """The models that an endpoint lists, by id, root and alias; None if it lists none.

        A name that is not listed is looked up again now and then: adapters are loaded at run time.
        """

        async def fetch() -> frozenset[str] | None:
            with suppress(EngineFault, TimeoutError):
                async with asyncio.timeout(_KNOW_WITHIN_S):
                    return model_names((await self._seen(endpoint, "/v1/models", alone=True)).body)
            return endpoint.models.names

        return await endpoint.models.updated_for(name, fetch)

    def _ask(self, endpoint: Endpoint) -> "asyncio.Task[None] | None":
        """Find out what an engine is: the task that does, None if that is known."""
        if not endpoint.is_known and endpoint.asking is None:
            endpoint.asking = asyncio.get_running_loop().create_task(detect(endpoint, self._seen))
        return endpoint.asking

    async def _seen(
        self, endpoint: Endpoint, path: str, *, body: Mapping[str, Any] | None = None, alone: bool = False
    ) -> ProbeResponse:
        """Send a request beside a call: a GET, or a POST of a JSON body."""
        method, headers = ("GET", ()) if body is None else ("POST", _JSON)
        payload = None if body is None else orjson.dumps(body)
        sending = self.send(
            endpoint, method, path, headers=headers, body=payload, alone=alone, is_aside=body is not None
        )
        async with sending as answer:
            text = await answer.whole()
        try:
            read = orjson.loads(text) if answer.status == 200 else None
        except orjson.JSONDecodeError:
            read = None
        return ProbeResponse(answer.status, answer.headers.get("Server", ""), read)

    async def _health_of(self, endpoint: Endpoint) -> int:
        async with self.send(endpoint, "GET", "/health", headers=(), body=None) as answer:
            return answer.status

    async def close(self) -> None:
        """Close every connection."""
        await self.watch.close()
        asking = [endpoint.asking for endpoint in self.endpoints if endpoint.asking is not None]
        for task in asking:
            task.cancel()
        if asking:
            await asyncio.wait(asking)
        await self._session.close()
        await self._unpooled.close()


@lru_cache(1024)
def _address(url: str) -> URL:
    return URL(url, encoded=True)  # as it came: not quoted a second time


class _Pieces(aiohttp.Payload):
    """A large body, written in pieces without a copy of it: aiohttp's own payloads copy it on the event loop."""

    _value: bytes

    def __init__(self, body: bytes) -> None:
        super().__init__(body)
        self._size = len(body)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Write it, waiting for the engine to take it."""
        view = memoryview(self._value)
        for start in range(0, len(view), _IN_ONE_PIECE_BYTES):
            await writer.write(view[start : start + _IN_ONE_PIECE_BYTES])

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """The body as text."""
        return self._value.decode(encoding, errors)


def _payload(body: bytes | None) -> bytes | _Pieces | None:
    return _Pieces(body) if body and len(body) > _IN_ONE_PIECE_BYTES else body or None


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


def _words(error: BaseException) -> str:
    """What an exception says, or its name if it says nothing."""
    return str(error) or type(error).__name__
